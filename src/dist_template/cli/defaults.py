"""Defaults of every run: callbacks, Trainer settings, filters for expected warnings."""

import logging
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any

from ..plugins import LIBRARY, OURS, Plugin, registered

__all__ = ["always_on"]

# Configuration key: callback, in the order of calls. OBSERVERS measure, write and show; callbacks
# that packages register follow; SAVERS save and stop.
CALLBACKS = "dist_template.callbacks"
OBSERVERS = {
    "watchdog": "callbacks.watchdog:Watchdog",
    "same_environment": "cluster.fingerprint:SameEnvironment",
    "random_state": "callbacks.random_state:RandomState",
    "epoch_metrics": "callbacks.epoch_metrics:EpochMetrics",
    "parameter_names": "checkpoint.optimizer:ParameterNames",
    "numerics": "callbacks.numerics:Numerics",
    "replicas": "callbacks.replicas:Replicas",
    "throughput": "callbacks.throughput:Throughput",
    "gpu": "callbacks.gpu:GpuGauges",
    "experts": "callbacks.experts:Experts",
    "objective": "callbacks.objective:Objective",
    "training_log": "callbacks.training_log:TrainingLog",
    "console": "callbacks.console:Console",
}
SAVERS = {
    "samples": "callbacks.samples:Samples",
    "last_checkpoint": "callbacks.checkpoint:LastCheckpoint",
    "best_checkpoint": "callbacks.checkpoint:BestCheckpoint",
    "goodput": "callbacks.goodput:Goodput",
    "preemption": "callbacks.preemption:Preemption",
}


# Further keys at the top of a configuration, which no package's callback can have.
TAKEN = """config help print_config print_shtab seed_everything trainer model data run cluster
optimizer lr_scheduler ckpt_path weights_only verbose return_predictions deepspeed""".split()


def always_on() -> dict[str, Plugin]:
    """Returns the callbacks of every run by key, in the order of calls."""
    others = registered(CALLBACKS, taken={*OBSERVERS, *SAVERS, *TAKEN})
    return _plugins(OBSERVERS) | others | _plugins(SAVERS)


def _plugins(places: dict[str, str]) -> dict[str, Plugin]:
    found = {}
    for key, at in places.items():
        found[key] = Plugin(EntryPoint(key, f"{LIBRARY}.{at}", CALLBACKS), OURS)
    return found


TRAINER_DEFAULTS: dict[str, object] = {
    "log_every_n_steps": 10,
    "enable_progress_bar": False,  # callbacks/console.py shows progress without a device sync
    "enable_model_summary": False,
    # FSDP2 fails on its tensors (torch 2.13); under gloo, Lightning takes no_grad by itself
    "inference_mode": False,
    "logger": [],
}
TRAINER_DEFAULTS_OF_TEXT: dict[str, object] = {
    "use_distributed_sampler": False,  # the data module orders the samples
    "num_sanity_val_steps": -1,  # a full validation before training gives the initial loss
    "check_val_every_n_epoch": None,  # val_check_interval counts across epochs
    "val_check_interval": 100,
    "gradient_clip_val": 1.0,
}
if find_spec("tensorboard"):
    tensorboard = {"class_path": "TensorBoard", "init_args": {"save_dir": "{run}"}}
    TRAINER_DEFAULTS["logger"] = [tensorboard]


def trainer_defaults(module: type) -> dict[str, object]:
    """Returns the Trainer's arguments that differ from Lightning's in a run of this module's class:
    clipping and validation by steps are a language model's."""
    if getattr(module, "counts_tokens", False):
        return TRAINER_DEFAULTS | TRAINER_DEFAULTS_OF_TEXT
    return dict(TRAINER_DEFAULTS)


def differing(given: Mapping[str, Any]) -> str:
    """Returns the line that says which of the Trainer's arguments are not Lightning's, though the
    user gave none of them; "" if there is none."""
    found = []
    for key, value in TRAINER_DEFAULTS.items():
        if key != "logger" and given.get(key) == value:
            found.append(f"{key} {str(value).lower()}")
    loggers = given.get("logger")
    if isinstance(loggers, list) and loggers:
        found.append(f"logger {', '.join(type(each).__name__ for each in loggers)}")
    if not found:
        return ""
    return f"trainer           Lightning's defaults, but {', '.join(found)}"


def hide_expected() -> None:
    """Hides what Lightning logs about itself at every start, and warnings about intended settings.
    Call it after `import lightning`, which sets the level of its loggers."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for asked_for in ("profilers", "callbacks"):  # output that the user asks for
        logging.getLogger(f"lightning.pytorch.{asked_for}").setLevel(logging.INFO)
    for expected in (
        ".*LeafSpec.*",  # torch 2.13 with lightning 2.6
        ".*your dataloader is not resumable.*",  # the data module counts consumed samples
        ".*smaller than the logging interval.*",  # training_log.py counts steps across epochs
        ".*find_unused_parameters=True was specified.*",  # a default of manual optimization
        ".*exists and is not empty.*",  # a resumed run continues in its folder
    ):
        warnings.filterwarnings("ignore", message=expected)
    if "SLURM_JOB_ID" not in os.environ:  # on a login node; inside a job the warning stays
        warnings.filterwarnings("ignore", message="The `srun` command is available on your system")
