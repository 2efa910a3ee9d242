"""Names of the library that several tests need and that are not public (docs/api.md has those)."""

# ruff: noqa: F401
from pathlib import Path
from typing import Any

from dist_template import processes, weights
from dist_template.callbacks import global_order, numerics, preemption
from dist_template.callbacks.training_log import logs
from dist_template.checkpoint import commit, formats, manifest
from dist_template.checkpoint.formats import read_full
from dist_template.checkpoint.optimizer import by_name
from dist_template.checkpoint.stored import flat_range
from dist_template.cli.limits import Machine, violations
from dist_template.cluster import environment, run_lock
from dist_template.cluster.fingerprint import SameEnvironment
from dist_template.cluster.rendezvous import Rendezvous
from dist_template.compat.lightning_cli import keys_of
from dist_template.compat.loop import lighten
from dist_template.layout import total_norm
from dist_template.model import optim, proof, training_module
from dist_template.model.balance import Balancer
from dist_template.model.metrics import MetricBuffer
from dist_template.model.owners import Owners
from dist_template.observe.history.run import RunFile, read_lines
from dist_template.parallel.mesh import format as sharded
from dist_template.parallel.mesh.pipeline.schedule import SCHEDULES
from dist_template.parallel.mesh.sequence import shard_batch
from dist_template.parallel.zero.format import ZeroFormat
from dist_template.text.batches.rows import NOT_COUNTED, PackedRows, Rows
from dist_template.text.model import mtp, safetensors_files
from dist_template.text.model.head import ChunkedLoss
from dist_template.text.model.kernels import BOUNDS
from dist_template.text.model.quantize import quantize
from dist_template.text.objectives.pairs import PreferenceConfig
from dist_template.wings.history import read_run


def read_incidents(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / RunFile.INCIDENTS)
