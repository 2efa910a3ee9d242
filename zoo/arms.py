"""The strategies under which cases.py trains each type, in full and with LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace

ARGS = "--trainer.strategy.init_args"
# a parameter with fewer elements is kept on each rank
SHARDED = f"{ARGS}.param_persistence_threshold={{}}"


@dataclass(frozen=True)
class Arm:
    file: str  # of configs/strategy
    axes: str  # as `proof.axes_of` names it
    ranks: int = 2
    batches: int = 2  # data-parallel ranks
    plan: tuple[str, ...] = ()  # the tensor ("tp") or expert ("ep") plan that it needs of the model
    flags: tuple[str, ...] = ()


ARMS = {
    "ddp": Arm("ddp", "ddp"),
    "fsdp2": Arm("fsdp2", "fsdp"),
    "tp": Arm("tp", "tp", batches=1, plan=("tp",)),
    "ep": Arm("fsdp2_ep", "fsdp+ep", plan=("ep",)),
    "cp": Arm("cp", "fsdp+cp", batches=1),
    "pp": Arm("pp", "pp", batches=1),
    "zero2": Arm("zero2", "zero2"),
    "zero3": Arm("zero3", "zero3", flags=(SHARDED.format(16),)),
    "fsdp2_tp": Arm("fsdp2_tp", "fsdp+tp", ranks=4, plan=("tp",)),
    "pp_fsdp2": Arm("pp_fsdp2", "fsdp+pp", ranks=4),
    "pp_ep": Arm("pp_ep", "fsdp+ep+pp", ranks=4, plan=("ep",)),
}
LORA = ("--model.adapter.rank=3", "--model.adapter.alpha=5", "--model.adapter.targets=all-linear")
ONE = {"one": Arm("", "", 1, 1), "lora_one": Arm("", "", 1, 1, flags=LORA)}  # references
# of adapters the larger ones; small ones are kept on each rank in practice too
SOME_SHARDED = (SHARDED.format(200),)
OF_LORA = {
    f"lora_{name}": replace(
        arm,
        axes=f"lora+{arm.axes}",
        flags=(*LORA, *(SOME_SHARDED if name == "zero3" else arm.flags)),
    )
    for name, arm in ARMS.items()
    if name in ("ddp", "fsdp2", "tp", "ep", "zero3")
}
ARMS |= OF_LORA
OF_A_SWITCH = ("tp", "ep", "cp", "pp")  # arms whose result depends on what the model computes


def reference_of(arm: str) -> str:
    """Returns the training on one process, of `ONE`, that an arm is compared with."""
    return "lora_one" if arm in OF_LORA else "one"
