"""ZeroStrategy's configuration: what DeepSpeed does not support, and the memory and messages of
its stages. No torch.

DeepSpeed 0.19 keeps an fp32 copy of the weights at every stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from ...errors import InputError, require
from ..configured import ARGS, Configured, overrides
from ..own_code import code_of
from ..spec.base import ADAMW_BYTES, SLOWER, ReducedStrategy, Spec
from ..spec.facts import BlockRun, Facts, Saving, Sent
from ..spec.refusals import measured_refusal, selective_refusal
from . import check as deepspeed_check
from .json import KEY, read, resolve

BUCKET = 200_000_000  # elements of DeepSpeed's reduce bucket
LIVE_PARAMETERS = 10**9  # stage3_max_live_parameters of DeepSpeed: what ZeRO-3 gathers at most
SECTIONS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
PERSISTENT = 64  # elements: ZeRO-3 then keeps norms unsharded and shards matrices, as at full size
REPLACED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REPLACED += ("bf16", "fp16")  # keys of a DeepSpeed file that the Trainer's settings replace
# Hooks of a LightningModule that have no effect, because the engine does the same by itself, and
# what to do instead.
WITHOUT_EFFECT = {
    "configure_gradient_clipping": "DeepSpeed clips in its own step: set trainer.gradient_clip_val",
    "backward": "DeepSpeed's engine calls backward: scale the loss in training_step",
}
HOOKS_OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


@dataclass(frozen=True)
class ZeroSpec(Spec):
    """Shards by DeepSpeed's ZeRO; `given` is its configuration before "auto" is resolved."""

    name: str = "ZeroStrategy"
    given: Mapping[str, Any] = field(default_factory=dict)

    creates_state_at_start: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = (
        "32-true",
        "bf16-mixed",
        "bf16-true",
        "16-mixed",
        "16-true",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the spec of ZeroStrategy's arguments, or of the file among them."""
        config = arguments.get("config") or {}
        if config:
            config = read(config)
        zero = {"reduce_bucket_size": arguments.get("reduce_bucket_size", BUCKET)}
        zero |= config.get("zero_optimization") or {}
        zero["stage"] = zero.get("stage") or arguments.get("stage") or 2
        for section, key in SECTIONS.items():
            if arguments.get(key):
                zero[section] = {"device": "cpu"}
        return cls(arguments, given={**config, "zero_optimization": zero})

    @staticmethod
    def strategy_class() -> type:
        from .strategy import ZeroStrategy

        return ZeroStrategy

    @staticmethod
    def format_class() -> type:
        from .format import ZeroFormat

        return ZeroFormat

    @property
    def zero(self) -> Mapping[str, Any]:
        return self.given["zero_optimization"]

    @property
    def stage(self) -> int:
        return self.zero["stage"]

    @property
    def offload_optimizer(self) -> bool:
        return self._device("offload_optimizer") != "none"

    @property
    def offload_parameters(self) -> bool:
        return self._device("offload_param") != "none"

    def _device(self, section: str) -> str:
        return (self.zero.get(section) or {}).get("device", "none")

    def axes(self, world_size: int) -> list[str]:
        return [f"zero{self.stage}"]

    def reduced(self, processes: int | None = None) -> ReducedStrategy:
        options, notes = dict(self.arguments), list[str]()
        if options.get("config") is not None:
            options["config"] = _small_config(options["config"])
        elif "param_persistence_threshold" in options:
            options["param_persistence_threshold"] = PERSISTENT
        for name in ("offload_optimizer_device", "offload_params_device"):
            if options.get(name) == "nvme":
                options[name] = "cpu"
                notes.append(f"{name} is host memory here, not NVMe")
        num = processes or 2
        return ReducedStrategy(options, num, num, notes=notes)

    # ---- refusals --------------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        try:
            require("deepspeed", self.name)
        except InputError as error:
            yield str(error)
            return
        yield from super().refusals(setup)
        if setup.trainer.get("gradient_clip_algorithm") == "value":
            yield (
                "trainer.gradient_clip_algorithm 'value': DeepSpeed clips by norm only; set 'norm'"
            )
        if setup.trains:
            for hook, instead in WITHOUT_EFFECT.items():
                code = code_of(type(setup.module))
                is_extended = code is not None and code.extends(hook)
                if setup.overrides(hook) and not is_extended:
                    yield (
                        f"{type(setup.module).__name__} has its own {hook}, which has no effect"
                        f" under ZeRO: {instead}, and remove the hook, or use --config"
                        " strategy/fsdp2"
                    )
            yield from self._hooks_of_gradients(setup)
            yield from self._changes_of_weights(setup)
        if self.offload_parameters and self.stage != 3:
            why = f"needs ZeRO stage 3, which shards parameters, but the stage is {self.stage}"
            if self.arguments.get("config"):
                key = f"{KEY}: zero_optimization.offload_param"
                yield f"{key} {why}: remove it, or set zero_optimization.stage 3"
            else:
                yield f"{ARGS}.offload_parameters {why}: set stage 3, or offload_parameters false"
        if setup.saves_asynchronously and "nvme" in map(self._device, SECTIONS):
            why = "does not work with state on NVMe, which DeepSpeed copies synchronously"
            yield f"last_checkpoint.asynchronous true {why}: set it to false"
        writer = (self.given.get("checkpoint") or {}).get("writer") or {}
        if writer.get("decoupled") or self.given.get("datastates_ckpt", False) is not False:
            yield (
                "the DeepSpeed JSON's checkpoint.writer.decoupled or datastates_ckpt writes in"
                " the background, outside of the commit that makes a checkpoint whole: remove it,"
                " and set last_checkpoint.asynchronous true"
            )
        yield from self._optimizer(setup)
        if setup.trains:
            try:
                complete = resolve(self.given, setup)
            except InputError as error:
                yield str(error)
                return
            if self.arguments.get("config"):
                for why in deepspeed_check.refusals(complete, setup.machine.accelerator):
                    yield f"{KEY}: {why}"
        if self.stage == 3:
            yield from selective_refusal(setup, "ZeRO stage 3")
            yield from measured_refusal(setup, "ZeRO stage 3")

    def _optimizer(self, setup: Configured) -> Iterator[str]:
        """DeepSpeed passes flat shards to the optimizer, which must be element-wise."""
        from ..element_wise import ELEMENTWISE  # it imports torch

        module, _, name = setup.optimizer.get("class_path", "").rpartition(".")
        allowed = self.given.get("zero_allow_untested_optimizer") or not name
        if name == "Muon" and module.startswith("torch.optim"):
            why = (
                "flattens parameters, and DeepSpeed's own Muon clips updates in place of gradients"
            )
            yield (
                f"Muon does not work under ZeRO, which {why}: set model.optim.optimizer adamw, or"
                " use strategy/fsdp2"
            )
        elif not allowed and not (module.startswith("torch.optim") and name in ELEMENTWISE):
            yield (
                f"--optimizer {name}: ZeRO flattens parameters, which only element-wise optimizers"
                f" allow: set one of {', '.join(ELEMENTWISE)}, another strategy as --config"
                " strategy/fsdp2, or zero_allow_untested_optimizer true in a DeepSpeed file if it"
                " is one of those"
            )

    def _changes_of_weights(self, setup: Configured) -> Iterator[str]:
        """Under ZeRO-3 a parameter is empty outside of `forward`: a change would be lost."""
        for one in (setup.module, *setup.callbacks) if self.stage == 3 else ():
            code = code_of(type(one))
            if code is not None and (hook := code.changes_weights_in()):
                yield (
                    f"{hook} of {type(one).__name__} changes tensors in place and mentions"
                    " weights, which are empty there under ZeRO-3: use --config strategy/zero2,"
                    " strategy/fsdp2 or strategy/ddp"
                )

    def _hooks_of_gradients(self, setup: Configured) -> Iterator[str]:
        """The engine keeps gradients to itself: `.grad` is None in hooks, so that a norm would not
        be logged, and a change would be lost."""
        for one in (setup.module, *setup.callbacks):
            code = code_of(type(one))
            for hook in HOOKS_OF_GRADIENTS:
                if overrides(one, hook) and code is not None and code.reads_gradients(hook):
                    yield (
                        f"{hook} of {type(one).__name__} reads gradients, which DeepSpeed keeps to"
                        " itself: `.grad` is None there. The norm is logged as train/grad_norm"
                        " anyway; remove the hook, or use --config strategy/fsdp2 or strategy/ddp"
                    )

    # ---- memory, messages and time ---------------------------------------------------------------

    def weight_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a stored weight: 2 under -mixed too, besides the fp32 copy."""
        return 2 if facts.is_half else 4

    def state(self, facts: Facts) -> dict[str, float]:
        width, n, is_3 = self.weight_bytes(facts), facts.world_size, self.stage == 3
        bucket = self.zero.get("reduce_bucket_size", BUCKET)
        if bucket == "auto":  # DeepSpeed's default
            bucket = BUCKET
        parts = {
            "weights": self.all_weights(facts),
            "gradients": facts.trainable * (4 / n if self.stage > 1 else width),  # fp32 shards
            "optimizer state": facts.trainable * (ADAMW_BYTES + 4) / n,
            "communication buffers": bucket * width * (2.0 - is_3),
        }
        if is_3:
            parts["weights"] /= n
            most = max(LIVE_PARAMETERS, facts.block_experts)  # a layer's experts are one module
            parts["gathered weights"] = float(min(facts.parameters, most) * width)
        if self.offload_optimizer and not facts.on_host:
            parts |= {"gradients": 0.0, "optimizer state": 0.0}
        if self.offload_parameters and not facts.on_host:
            parts["weights"] = 0.0
        return parts

    def block_run(self, facts: Facts) -> BlockRun:
        return BlockRun(facts.is_half, casts=False, shared_by=1)

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if facts.world_size > 1 and self.stage < 3:
            cost = ("same communication", "weights are gathered in every forward and backward")[
                self.stage - 1
            ]
            yield Saving(
                f"ZeRO stage {self.stage + 1}: {cost}.",
                {f"{ARGS}.stage": (self.stage, self.stage + 1)},
            )
        if not self.offload_optimizer:
            change = {f"{ARGS}.offload_optimizer": (False, True)}
            yield Saving(f"Optimizer state in host memory: {SLOWER}", change, is_on_host=True)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Stages 1 and 2 all-reduce gradients, once or in every micro-batch, and gather parameters
        after the step. Stage 3 gathers what is not small where it is used."""
        n, width, m = facts.world_size, self.weight_bytes(facts), self.accumulation(facts)
        if self.stage < 3:
            yield Sent("all_reduce", (m if self.stage > 1 else 1) * facts.trainable, width, n, n)
            yield Sent("all_gather", facts.trainable, width, n, n)
            return
        gathers = m * (1 + (facts.parameters >= LIVE_PARAMETERS))
        yield Sent("all_gather", gathers * facts.parameters, width, n, n)
        yield Sent("reduce_scatter", m * facts.trainable, width, n, n)

    def allows(self, facts: Facts) -> bool:
        return self.stage < 3 or facts.checkpointing != "selective"

    def on_host(self, facts: Facts) -> tuple[float, float]:
        updated = facts.trainable / facts.world_size * self.offload_optimizer
        return updated, facts.parameters / facts.world_size * self.offload_parameters


def _small_config(config: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a user's DeepSpeed JSON without the keys that the Trainer's settings replace."""
    text = (
        Path(config).read_text(encoding="utf-8") if isinstance(config, str) else json.dumps(config)
    )
    small: dict[str, Any] = json.loads(text)
    for key in REPLACED:
        small.pop(key, None)
    zero = small.get("zero_optimization", {})
    if "stage3_param_persistence_threshold" in zero:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["device"] = "cpu"
    return small
