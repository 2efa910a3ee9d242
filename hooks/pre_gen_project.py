"""Refuse an answer that cannot work, in one sentence that names it. Nothing is generated then."""

import json
import keyword
import re
import sys
import unicodedata

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

FOLDERS = {
    "build",
    "configs",
    "data_cache",
    "environment",
    "launch",
    "runs",
    "tests",
    "vendor",
    "wheels",
}
# The library and what the locks install, by distribution and by import name; a test keeps the list
# complete.
DEPENDENCIES = set(
    """
_cffi_backend _distutils_hack _hypothesis_ftz_detector _hypothesis_globals _hypothesis_pytestplugin
_multiprocess _plotly_utils _pytest _xxhash _yaml absl absl_py accelerate aiobotocore
aiohappyeyeballs aiohttp aioitertools aiosignal alembic annotated_doc annotated_types anyio arrow
attr attrs binaryornot bitsandbytes blinker boto3 botocore certifi cffi chardet charset_normalizer
click cloudpickle colorama colorlog cookiecutter coreweave_evaluations cpuinfo cryptography cwevals
dataproperty datasets dateutil deepmerge deepspeed defusedxml dill dist_template distro
docstring_parser dominate einops evaluate example execnet fastapi filelock flask flask_cors
flatbuffers frozenlist fsspec functorch git google googleapis_common_protos grpc grpcio h11 hf_xet
hjson httpcore httpcore2 httpx httpx2 httpx2_jsfetch huggingface_hub hypothesis idna
importlib_resources iniconfig isympy itsdangerous jinja2 jiter jmespath joblib jsonargparse
jsonschema jsonschema_specifications kubernetes_validate lightning lightning_fabric
lightning_utilities lm_eval logbook lxml mako markdown markdown_it markdown_it_py markupsafe
materialx mbstrdecoder mdurl ml_dtypes more_itertools moto mpmath msgfy msgpack multidict
multiprocess narwhals networkx ninja nltk numpy nvidia_ml_py onnx onnx_ir onnxruntime onnxscript
openai opentelemetry opentelemetry_api opentelemetry_exporter_http_transport
opentelemetry_exporter_otlp_common opentelemetry_exporter_otlp_proto_common
opentelemetry_exporter_otlp_proto_http opentelemetry_proto opentelemetry_sdk
opentelemetry_semantic_conventions optuna packaging pandas pathspec pathvalidate peft pil pillow pip
pkg_resources platformdirs plotly pluggy portalocker propcache protobuf psutil py py_cpuinfo
py_partiql_parser pyarrow pycparser pydantic pydantic_core pygments pymdown_extensions pymdownx
pynvml pytablewriter pytest pytest_timeout pytest_xdist python_dateutil python_slugify
pytorch_lightning pytz pyyaml referencing regex requests responses rich rouge_score rpds rpds_py
ruff s3fs s3transfer sacrebleu safetensors scikit_learn scipy sentencepiece setuptools shellingham
six sklearn slugify sniffio sortedcontainers sqlalchemy sqlitedict starlette sympy tabledata
tabulate tensorboard tensorboard_data_server text_unidecode threadpoolctl tiktoken tiktoken_ext
tokenizers tomli torch torchgen torchmetrics tqdm transformers triton trl truststore ty typepy typer
typeshed_client typing_extensions typing_inspection tzdata urllib3 uv uvicorn wandb werkzeug
word2number wrapt xdist xmltodict xxhash yaml yarl zensical
""".split()
)


def underscored(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def package_problem(name: str) -> str | None:
    if not (name.isascii() and name.isidentifier()):
        return "must be a Python identifier: ASCII letters, digits and underscores, no digit first"
    if len(name) > 60:
        return f"has {len(name)} characters; 60 are allowed"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "is a keyword of Python"
    if name.lower() in {module.lower() for module in sys.stdlib_module_names} | {"test"}:
        return "is a module of Python's standard library, which it would hide"
    if name.lower() in DEPENDENCIES:
        return "is the name of a package that the project needs, which it would hide"
    if name.lower() in FOLDERS:
        return "is the name of a folder of the project"
    return "must not begin with two underscores" if name.startswith("__") else None


def slug_problem(name: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        return (
            "must be a plain folder name: ASCII letters, digits, and between them '-', '_' or '.'"
        )
    if underscored(name) in DEPENDENCIES:
        return "is the name of a package that the project needs"
    return None


def text_problem(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    if len(text) > 300:
        return f"has {len(text)} characters; 300 are allowed"
    # Cc: control characters, line breaks among them; Cs: lone surrogates; Zl, Zp: Unicode's own
    # line breaks.
    if any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} for char in text):
        return "must be one line without control characters"
    return None


CHECKS = {
    "project_name": text_problem,
    "project_slug": slug_problem,
    "package_name": package_problem,
    "description": text_problem,
    "author": text_problem,
}
for key, problem in CHECKS.items():
    if reason := problem(ANSWERS[key]):
        sys.exit(f"{key} {ANSWERS[key][:80]!r} {reason}; give another {key}.")
