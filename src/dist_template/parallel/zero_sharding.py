"""ZeroStrategy's configuration: what DeepSpeed does not support, memory and messages of its stages. No torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InputError, require
from .facts import ARGS, BlockRun, Configured, Facts, Saving, Sent, Small
from .plain import ADAMW_BYTES, SLOWER, Plain, selective_refusal

LIVE_PARAMETERS = 10**9  # stage3_max_live_parameters of DeepSpeed: what ZeRO-3 gathers at most
BUCKET = 200_000_000  # elements of DeepSpeed's reduce bucket
PERSISTENT = 64  # elements: ZeRO-3 then keeps norms unsharded and shards matrices, as at full size
REPLACED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REPLACED += ("bf16", "fp16")  # keys of a DeepSpeed file that the Trainer's settings replace
SECTIONS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")


@dataclass(frozen=True)
class Zero(Plain):
    """Shards by DeepSpeed's ZeRO; `given` is its configuration before "auto" is resolved."""

    name: str = "ZeroStrategy"
    given: Mapping[str, Any] = field(default_factory=dict)

    is_replicated: ClassVar[bool] = False
    creates_state_at_start: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = (
        "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true",
    )  # fmt: skip

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Zero:
        """Returns the sharding of ZeroStrategy's arguments, or of the file among them."""
        config = arguments.get("config") or {}
        if isinstance(config, str):
            config = json.loads(Path(config).read_text(encoding="utf-8")) if Path(config).exists() else {}
        zero = {"reduce_bucket_size": arguments.get("reduce_bucket_size", BUCKET)}
        zero |= config.get("zero_optimization") or {}
        zero["stage"] = zero.get("stage") or arguments.get("stage") or 2
        for section, key in SECTIONS.items():
            if arguments.get(key):
                zero[section] = {"device": "cpu"}
        return cls(arguments, given={**config, "zero_optimization": zero})

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

    @property
    def complexity(self) -> int:
        return 2 + 2 * (self.offload_optimizer or self.offload_parameters)

    # ---- before a start --------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        try:
            require("deepspeed", self.name)
        except InputError as error:
            yield str(error)
            return
        yield from super().refusals(setup)
        if setup.trainer.get("gradient_clip_algorithm") == "value":
            yield "trainer.gradient_clip_algorithm 'value': DeepSpeed clips by norm only; set 'norm'"
        if self.offload_parameters and self.stage != 3:
            why = f"needs ZeRO stage 3, which shards parameters, but the stage is {self.stage}"
            yield f"{ARGS}.offload_parameters {why}: set stage 3, or offload_parameters false"
        if self.stage == 3 and setup.setting("preference.precompute"):
            yield "model.preference.precompute does not work under ZeRO stage 3: set it to false"
        writer = (self.given.get("checkpoint") or {}).get("writer") or {}
        if writer.get("decoupled") or self.given.get("datastates_ckpt", False) is not False:
            yield (
                f"{ARGS}.config makes DeepSpeed write checkpoints after the save has returned, but they are hashed"
                " then: remove checkpoint.writer.decoupled and datastates_ckpt from the DeepSpeed file"
            )
        nvme = [section for section in SECTIONS if self._device(section) == "nvme"]
        if nvme and setup.saves_asynchronously:
            why = "does not work with state on NVMe, which DeepSpeed copies synchronously"
            yield f"last_checkpoint.asynchronous true {why}: set it to false"
        for folder in {str(self.zero[section].get("nvme_path")) for section in nvme}:
            if setup.machine.is_this_one and not Path(folder).is_dir():
                yield (f"{ARGS}.nvme_path {folder!r} is not a folder of this machine: give one on a fast local disk")
        # DeepSpeed passes flat shards to the optimizer, which must be element-wise.
        module, _, name = setup.optimizer.get("class_path", "").rpartition(".")
        allowed = self.given.get("zero_allow_untested_optimizer") or not name
        if name and "optimizer" in self.given:
            has = f"{ARGS}.config, the DeepSpeed file, has an `optimizer`"
            yield f"--optimizer {name}, and {has}: remove one of the two"
        if not allowed and not (module.startswith("torch.optim") and name in ELEMENTWISE):
            yield (
                f"--optimizer {name}: ZeRO flattens parameters, which only element-wise optimizers allow: set one of"
                f" {', '.join(ELEMENTWISE)}, a file such as configs/strategy/fsdp2.yaml, or"
                " zero_allow_untested_optimizer true in a DeepSpeed file if it is one of those"
            )
        if setup.trains:
            from .deepspeed_config import resolve, settings_of

            try:
                resolve(self.given, settings_of(setup))
            except InputError as error:
                yield str(error)
        if self.stage == 3:
            yield from selective_refusal(setup, "ZeRO stage 3")

    # ---- memory: DeepSpeed 0.19 keeps an fp32 copy of the weights at every stage and precision ---

    def weight_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a stored weight: 2 under -mixed too, besides the fp32 copy."""
        return 2 if facts.is_half else 4

    def state(self, facts: Facts) -> dict[str, float]:
        width, n, is_3 = self.weight_bytes(facts), facts.world_size, self.stage == 3
        bucket = self.zero.get("reduce_bucket_size", BUCKET)
        bucket = bucket if isinstance(bucket, int) else 0  # "auto" is small
        parts = {
            "weights": self.all_weights(facts) / (n if is_3 else 1),
            "gradients": facts.trainable * (4 / n if self.stage > 1 else width),  # fp32 shards
            "optimizer state": facts.trainable * (ADAMW_BYTES + 4) / n,
            "communication buffers": bucket * width * (1.0 if is_3 else 2.0),
        }
        if is_3:
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
            cost = ("same communication", "weights are gathered in every forward and backward")[self.stage - 1]
            yield Saving(f"ZeRO stage {self.stage + 1}: {cost}.", {f"{ARGS}.stage": (self.stage, self.stage + 1)})
        if not self.offload_optimizer:
            change = {f"{ARGS}.offload_optimizer": (False, True)}
            yield Saving(f"Optimizer state in host memory: {SLOWER}", change, is_on_host=True)
        elif self.stage == 3 and not self.offload_parameters:
            change = {f"{ARGS}.offload_parameters": (False, True)}
            sentence = "Parameters in host memory too: each is fetched when its module runs."
            yield Saving(sentence, change, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Stages 1 and 2 all-reduce gradients, once or in every micro-batch, and gather parameters
        after the step. The calls of stage 3 are an upper bound: small tensors stay unsharded, and
        what is fetched ahead is fetched together."""
        n, width, m = facts.world_size, self.weight_bytes(facts), self.accumulation(facts)
        trained, buckets = facts.trainable, ceil(facts.trainable / BUCKET)
        if self.stage < 3:
            m = m if self.stage > 1 else 1
            yield Sent("all_reduce", m * trained, width, n, m * buckets, n)
            yield Sent("all_gather", trained, width, n, buckets + 1, n)  # two parameter groups
            return
        gathers = m * (1 if facts.parameters < LIVE_PARAMETERS else 2)
        calls = gathers * facts.tensors
        yield Sent("all_gather", gathers * facts.parameters, width, n, calls, n)
        yield Sent("reduce_scatter", m * trained, width, n, m * buckets, n)

    def allows(self, facts: Facts) -> bool:
        return self.stage < 3 or facts.checkpointing != "selective"

    def on_host(self, facts: Facts) -> tuple[float, float]:
        updated = facts.trainable / facts.world_size * self.offload_optimizer
        return updated, facts.parameters / facts.world_size * self.offload_parameters

    # ---- fewer processes -------------------------------------------------------------------------

    def shrunk(self, processes: int | None) -> Small:
        small = super().shrunk(processes)
        options = small.arguments
        if options.get("config") is not None:
            options["config"] = _small_config(options["config"])
        elif "param_persistence_threshold" in options:
            options["param_persistence_threshold"] = PERSISTENT
        for name in ("offload_optimizer_device", "offload_params_device"):
            if options.get(name) == "nvme":
                options[name] = "cpu"
                small.notes.append(f"{name} is host memory here, not NVMe")
        return small


def _small_config(config: Any) -> dict[str, Any]:
    """Returns a user's DeepSpeed JSON without the keys that the Trainer's settings replace."""
    if isinstance(config, str):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    small = copy.deepcopy(dict(config))
    for key in REPLACED:
        small.pop(key, None)
    zero = small.get("zero_optimization", {})
    if "stage3_param_persistence_threshold" in zero:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    for section in SECTIONS:
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["device"] = "cpu"
    return small
