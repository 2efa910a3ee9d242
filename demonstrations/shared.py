"""What the demonstrations share: a project in a temporary folder, its commands, and two processes
of plain torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
# also of its processes
FOLDER = Path(os.environ.get("DEMONSTRATION") or tempfile.mkdtemp(prefix="demonstration-"))
LLAMA = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
LLAMA += " num_attention_heads: 2, num_key_value_heads: 2}"
DATA = [
    "--data.source=TextFiles",
    f"--data.source.paths=[{FOLDER}/text/*.txt]",
    "--data.tokenizer=Bytes",
]
DATA += [f"--data.cache_dir={FOLDER}/cache", "--data.seq_len=64", "--data.global_batch_size=4"]
DATA += ["--data.micro_batch_size=2", "--data.num_workers=0"]
TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.limit_val_batches=0",
    "--run.report=false",
]
TRAINER += [
    "--trainer.max_steps=4",
    "--model.optim.warmup=0",
    "--trainer.logger=false",
    f"--run.root={FOLDER}/runs",
]

shutil.copytree(TEMPLATE / "{{cookiecutter.package_name}}", FOLDER / "trainer", dirs_exist_ok=True)
os.environ["DEMONSTRATION"] = str(FOLDER)
sys.path.insert(0, str(FOLDER))
(FOLDER / "text").mkdir(exist_ok=True)
for page in (ROOT / "docs").glob("*.md"):
    for number, paragraph in enumerate(page.read_text(encoding="utf-8").split("\n\n")[:10]):
        (FOLDER / "text" / f"{page.stem}{number}.txt").write_text(paragraph, encoding="utf-8")


def strategy(name: str) -> str:
    """The flag for a strategy of the project's configurations."""
    return f"--config={TEMPLATE}/configs/strategy/{name}.yaml"


def command(*arguments: str) -> tuple[int, str]:
    """Runs a command of the project as a user would; returns its exit code and what it prints."""
    paths = os.pathsep.join([str(FOLDER), str(HERE), os.environ.get("PYTHONPATH", "")])
    started = [sys.executable, "-m", "trainer", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | {
        "PYTHONPATH": paths
    }
    ended = subprocess.run(
        started,
        cwd=FOLDER,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return ended.returncode, ended.stdout


def plain_llama() -> Any:
    """A small model of transformers."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **sizes))


def built_under_zero3(build: Callable[[], Any]) -> Any:
    """What `build` makes in a process of its own group, with parameters partitioned by
    DeepSpeed."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for minutes
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    os.environ["LOCAL_RANK"] = "0"  # `command` removes it
    deepspeed.init_distributed("gloo", verbose=False)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        return build()


def exported_adapter(elsewhere: str, *flags: str) -> tuple[dict[str, Any], str]:
    """The tensors that `export` writes of a trained adapter, and what it prints; ends where a
    command fails."""
    from safetensors.torch import load_file

    code, printed = command("fit", *DATA, *TRAINER, *flags)
    if code == 0:
        run = next(FOLDER.glob("runs/*/*"))
        code, printed = command("export", str(run), "--output", str(FOLDER / "adapter"))
    if code:
        show(elsewhere, printed[-3000:], False)
    return load_file(FOLDER / "adapter" / "adapter_model.safetensors"), printed


def rehearse(only: str, *flags: str) -> tuple[bool, str]:
    """Whether the checks of `rehearse` with `only` in their name pass, and their lines."""
    code, printed = command("rehearse", *flags, "--only", only)
    lines = [
        " ".join(line.split())
        for line in printed.splitlines()
        if only in line or line.startswith("FAIL")
    ]
    return code == 0, "; ".join(lines) or printed[-2000:]


def _process(rank: int, port: int, function: Callable[[int], None]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank)


def two_processes(function: Callable[[int], None]) -> None:
    """Calls function(rank) in two processes that can form a group."""
    import socket

    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, function), nprocs=2)


def show(elsewhere: str, here: str, holds: bool) -> None:
    """Prints both and exits, with 0 if the demonstration holds."""
    print(f"elsewhere: {elsewhere}\nhere:      {here}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    raise SystemExit(0 if holds else 1)
