"""What `fit` refuses of a training that is described by its objects."""

from typing import Any

from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template.cli.limits import Machine, violations

EIGHT_GPUS = Machine("cuda", 8, precision="bf16-mixed")
LLAMA = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=4)


def violations_of(strategy: Any = "ddp", machine: Machine = EIGHT_GPUS, **given: Any) -> list[str]:
    """The violations of an otherwise possible training; `given`: more arguments of the Trainer."""
    module = given.pop("module", LanguageModule())
    data = given.pop("data", DataModule(global_batch_size=1024, micro_batch_size=1))
    config = given.pop("config", LLAMA)
    typed = frozenset(given.pop("typed", ()))
    trainer = {"strategy": strategy, "max_steps": 1000, **given}
    return violations(machine, trainer, module, data, config, typed=typed)
