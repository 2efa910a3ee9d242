"""The project beside a hand-written loop and its peers: `make bench PART="step dist"`.

arms.py      runs what is compared: in a new order each round, in one process
ranks.py     runs a function on several processes, which may take turns
record.py    what was measured, as JSON with all that it depends on, and the table made from it
against.py   has anything become slower since a commit
learning.py  do the defaults of a fine-tuning learn, on a published model
loops/       the same training in a hand-written loop, by the project, by each peer
<part>.py    what one part compares, and its targets
results/     the newest JSON of each part, their tables, and figures of parts that are gone
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import tests  # noqa: E402, F401  (links the un-rendered project into build/dev as trainer_dev, and finds it)

# apart from the environment that the project is tested in
sys.path.append(str(ROOT / "build" / "peers"))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# its store looks up hosts
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
# for every arm, as the project has it: else page faults by chance
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # more threads add noise and nothing else to small models
    os.environ.setdefault("OMP_NUM_THREADS", "1")
