"""What the name of a metric says. Modules of users name metrics as they like: train_loss, val/acc,
loss, valid_loss_epoch, acc_val."""

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["is_own", "loss_of", "parts_of"]

STAGES = {
    "train": "train",
    "training": "train",
    "eval": "validation",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
WORD = re.compile(r"[^\W_]+")
OF_SELF_LOG = re.compile(r"[_/](step|epoch)$")  # Lightning's, of on_step and on_epoch together
LOADER = re.compile(r"/dataloader_idx_\d+$")  # Lightning's, of several validation loaders
# Groups of metrics that the library measures; all others are a module's own.
MEASURED = ("perf/", "memory/", "gpu/", "rank/", "health/", "moe/", "rewards/", "goodput/")
COUNTED = {
    "epoch",
    "train/learning_rate",
    "train/grad_norm",
    "train/tokens",
    "train/samples",
    "train/global_batch_size",
}


class Name(NamedTuple):
    """The parts of a metric's name. `stage` is train, validation, test, or "" if the name has
    none; `measure` is the rest, such as loss or top-5_acc."""

    stage: str
    measure: str

    @property
    def is_loss(self) -> bool:
        return self.measure.lower() == "loss"


def parts_of(name: str) -> Name:
    """Returns the stage and the measure that a metric's name has."""
    text = OF_SELF_LOG.sub("", LOADER.sub("", name))
    words = [*WORD.finditer(text)]
    for word in (*words[:1], *words[-1:]):
        if stage := STAGES.get(word[0].lower()):
            rest = f"{text[: word.start()]}{text[word.end() :]}".strip("/_-. ")
            return Name(stage, rest or text)
    return Name("", name)


def is_own(name: str) -> bool:
    """Returns whether a module has logged this metric, or it is one of a step's loss; all others
    are measured by the library or by callbacks."""
    return not name.startswith((*MEASURED, "lr-")) and name not in COUNTED


def loss_of(names: Iterable[str], ours: str, stage: str) -> str:
    """Returns the name of a stage's loss among `names`: `ours`, the library's, else the shortest
    that means a loss; "" if there is none."""
    known = [*names]
    if ours in known:
        return ours
    found = []
    for name in known:
        parts = parts_of(name)
        if parts.stage == stage and parts.is_loss:
            found.append(name)
    return min(found, key=len, default="")
