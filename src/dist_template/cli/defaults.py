"""What every training has without a key: callbacks, the Trainer's defaults, warnings that are expected."""

from __future__ import annotations

import logging
import os
import warnings

from ..callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from ..callbacks.console import Console
from ..callbacks.diagnosis import Diagnosis
from ..callbacks.experts import Experts
from ..callbacks.goodput import Goodput
from ..callbacks.hardware import Hardware
from ..callbacks.inputs import Inputs
from ..callbacks.ledger import SampleLedger
from ..callbacks.messages import WarningsOfRanks
from ..callbacks.numerics import Numerics
from ..callbacks.preemption import Preemption
from ..callbacks.random_state import RandomState
from ..callbacks.samples import Samples
from ..callbacks.throughput import Throughput
from ..callbacks.training_log import TrainingLog
from ..callbacks.watchdog import Watchdog
from ..checkpoint.optimizer import ParameterNames
from ..cluster.fingerprint import SameEnvironment

# In the order in which they are called: measure, write, show, act.
ALWAYS_ON = {
    "watchdog": Watchdog,
    "same_environment": SameEnvironment,
    "random_state": RandomState,
    "parameter_names": ParameterNames,
    "numerics": Numerics,
    "sample_ledger": SampleLedger,
    "throughput": Throughput,
    "hardware": Hardware,
    "inputs": Inputs,
    "experts": Experts,
    "messages": WarningsOfRanks,
    "training_log": TrainingLog,
    "console": Console,
    "diagnosis": Diagnosis,
    "samples": Samples,
    "last_checkpoint": LastCheckpoint,
    "best_checkpoint": BestCheckpoint,
    "goodput": Goodput,
    "preemption": Preemption,
}

SAVERS = (LastCheckpoint, BestCheckpoint)  # which trainer.enable_checkpointing false takes out

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # data.py owns the order of samples
    "num_sanity_val_steps": -1,  # a whole validation before training: where did it begin?
    "check_val_every_n_epoch": None,  # val_check_interval counts across epochs
    "val_check_interval": 100,
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "enable_progress_bar": False,  # callbacks/console.py shows progress without a device sync
    "enable_model_summary": False,
    "logger": [{"class_path": "TensorBoard", "init_args": {"save_dir": "{run}"}}],
}


# What Lightning says at every start about itself; its warnings stay.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
for asked_for in ("profilers", "callbacks"):  # a profiler's report, a summary of the model, what verbose=True prints
    logging.getLogger(f"lightning.pytorch.{asked_for}").setLevel(logging.INFO)
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # torch 2.13 with lightning 2.6
for expected in (
    ".*sync_dist=True.*",  # module.py has reduced them already
    ".*your dataloader is not resumable.*",  # data.py's is, by samples consumed
    ".*smaller than the logging interval.*",  # callbacks/training_log.py counts optimizer steps across epochs
    ".*exists and is not empty.*",  # a resumed run goes on in its folder
):
    warnings.filterwarnings("ignore", message=expected)
if "SLURM_JOB_ID" not in os.environ:  # a login node, or a workstation that has Slurm's commands: inside a job it stays
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
