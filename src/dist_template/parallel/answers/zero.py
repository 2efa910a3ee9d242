"""ZeroStrategy's configuration, and what DeepSpeed does not support. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from ...errors import InputError, require
from ..configured import ARGS, Configured
from ..deepspeed_config import resolve
from .plain import Plain, selective_refusal

BUCKET = 200_000_000  # elements of DeepSpeed's reduce bucket
SECTIONS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")


@dataclass(frozen=True)
class Zero(Plain):
    """Shards by DeepSpeed's ZeRO; `given` is its configuration before "auto" is resolved."""

    name: str = "ZeroStrategy"
    given: Mapping[str, Any] = field(default_factory=dict)

    is_replicated: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = (
        "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true",
    )  # fmt: skip

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
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
        if setup.saves_asynchronously and "nvme" in map(self._device, SECTIONS):
            why = "does not work with state on NVMe, which DeepSpeed copies synchronously"
            yield f"last_checkpoint.asynchronous true {why}: set it to false"
        # DeepSpeed passes flat shards to the optimizer, which must be element-wise.
        module, _, name = setup.optimizer.get("class_path", "").rpartition(".")
        allowed = self.given.get("zero_allow_untested_optimizer") or not name
        if not allowed and not (module.startswith("torch.optim") and name in ELEMENTWISE):
            yield (
                f"--optimizer {name}: ZeRO flattens parameters, which only element-wise optimizers allow: set one of"
                f" {', '.join(ELEMENTWISE)}, a file such as configs/strategy/fsdp2.yaml, or"
                " zero_allow_untested_optimizer true in a DeepSpeed file if it is one of those"
            )
        if setup.trains:
            try:
                resolve(self.given, setup)
            except InputError as error:
                yield str(error)
        if self.stage == 3:
            yield from selective_refusal(setup, "ZeRO stage 3")
