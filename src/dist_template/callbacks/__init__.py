"""Lightning callbacks: what is measured, shown, saved and guarded during training.

cli/defaults.py has the order in which they run: measure, write, show, act. Those below also work in
any Trainer, without the command line; names are imported when they are first used."""

from ..lazy import attribute_of

PLACES = {  # public name -> the module that defines it, in the order for a Trainer's `callbacks`
    "Watchdog": "callbacks.watchdog",
    "RandomState": "callbacks.random_state",
    "SampleOrder": "callbacks.sample_order",
    "Numerics": "callbacks.numerics",
    "Replicas": "callbacks.replicas",
    "Throughput": "callbacks.throughput",
    "GpuGauges": "callbacks.gpu",
    "TrainingLog": "callbacks.training_log",
    "Console": "callbacks.console",
    "LastCheckpoint": "callbacks.checkpoint",
    "BestCheckpoint": "callbacks.checkpoint",
    "StopEarly": "callbacks.early_stopping",
    "Goodput": "callbacks.goodput",
    "Preemption": "callbacks.preemption",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)
__getattr__ = attribute_of(__name__, PLACES)
