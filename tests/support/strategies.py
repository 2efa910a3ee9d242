"""Strategies by name: files of the library's configs/strategy, and variants of them by flags."""

from typing import Any

import yaml

from tests.support.runs import SHIPPED

ARGS = "--trainer.strategy.init_args"
HOST = [f"{ARGS}.offload_optimizer=true", f"{ARGS}.offload_parameters=true"]
NVME = [f"{ARGS}.offload_{what}_device=nvme" for what in ("optimizer", "params")]
VARIANTS = {  # name -> file, flags
    "zero2_offload": ("zero2", [f"{ARGS}.offload_optimizer=true"]),
    "zero3_offload": ("zero3", HOST),
    "zero3_nvme": ("zero3", [*HOST, *NVME]),
    "fsdp2_offload": ("fsdp2", [f"{ARGS}.cpu_offload=true"]),
    "fsdp2_tp_ep": ("fsdp2_tp", [f"{ARGS}.ep_size=2"]),
}
NAMES = sorted({*VARIANTS, *(path.stem for path in SHIPPED.glob("strategy/*.yaml"))})


def flags_of(name: str) -> list[str]:
    file, flags = VARIANTS.get(name, (name, []))
    return [f"--config=strategy/{file}", *flags]


def settings_of(name: str) -> Any:
    """What these flags set `trainer.strategy` to, as the YAML has it."""
    file, flags = VARIANTS.get(name, (name, []))
    content = yaml.safe_load((SHIPPED / "strategy" / f"{file}.yaml").read_text())
    strategy = content["trainer"]["strategy"]
    for flag in flags:
        key, _, value = flag.removeprefix(f"{ARGS}.").partition("=")
        strategy["init_args"][key] = yaml.safe_load(value)
    return strategy
