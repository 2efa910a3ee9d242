"""Which models train under which strategies: `python -m zoo` writes src/dist_template/proof.json
and docs/models.md."""

import os
from pathlib import Path

import tests  # noqa: F401  (links the un-rendered project into build/dev as trainer_dev, and finds it)

ROOT = Path(__file__).parents[1]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
