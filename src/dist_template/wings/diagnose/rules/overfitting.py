"""Rule about a model that learns its training data by heart."""

from collections.abc import Iterator

import numpy as np

from ...history import History, Series
from .. import expected, robust
from ..finding import Cause, Change, Finding

MIN_VALIDATIONS = 4  # after the first step; fewer tell no trend from noise
ENOUGH = 5  # validations, of which a rise by `RISE` is believed; of fewer, one by `CERTAIN`
MIN_LATER = 3  # validations after the best one
RISE = 0.02  # of the lowest validation loss; a smaller rise costs nothing
CERTAIN = 0.1  # of it
SIGMAS = 4.0  # a smaller rise is noise: the lowest of many values is two below their mean
FEW = 5.0  # validations, from which their noise is not known well: as much again is allowed for
RISING = 0.75  # share of pairs, from the best validation on, whose later value is higher
FALL = 0.02  # of the training loss at the best validation
EPOCHS = 4  # repeated tokens are almost as good as new ones so often (arXiv:2305.16264)


def overfits(history: History) -> Iterator[Finding]:
    """Reports a validation loss that rises above its lowest value while the training loss falls."""
    training = expected.training_loss(history)
    loss = expected.metric(history, training)
    name, validated = _validation(history)
    if len(validated) < MIN_VALIDATIONS or not len(loss) or history.key("data.repeat_first_batch"):
        return  # repeat_first_batch learns one batch by heart on purpose
    # A median of neighbours: the lowest of noisy values is an outlier.
    smooth = robust.running_median(validated.values, 3)
    best = int(np.argmin(smooth[: len(smooth) - MIN_LATER]))
    since, lowest = validated[best:], float(smooth[best])
    end = robust.median(since.values[-MIN_LATER:])
    noise = _noise(validated.values) * (1 + FEW / len(validated))
    is_rising = robust.rising_share(since) >= RISING
    least = RISE if len(validated) >= ENOUGH else CERTAIN
    if not is_rising or end - lowest <= max(least * abs(lowest), SIGMAS * noise):
        return
    at = validated[int(np.argmin(validated.values))]
    step, last = int(at.steps), int(validated.steps[-1])
    before = loss[loss.steps <= max(step, int(loss.steps[min(2, len(loss) - 1)]))]
    then, now = robust.median(before.values[-3:]), robust.tail(loss)
    if now > (1 - FALL) * then:
        return  # both rise: training diverges
    evidence = (
        f"{name} was {at.values:.4g} at step {step} and is {validated.last:.4g} at step {last},"
        f" while {training} fell from {then:.4g} to {now:.4g}."
    )
    confidence = "certain" if end > (1 + CERTAIN) * lowest else "likely"
    causes, title = [*_causes(history, name, step)], "the model overfits"
    yield Finding("overfits", "warning", confidence, title, evidence, causes, (step, last))


def _validation(history: History) -> tuple[str, Series]:
    """Returns the validation loss of the run, without the one before training."""
    name = expected.validation_loss(history)
    series = expected.metric(history, name)
    return name, series[series.steps > 0]


def _noise(values: np.ndarray) -> float:
    """Returns the standard deviation of values around a smooth curve, which second differences
    remove; a curve that falls and then rises is no noise."""
    bends = np.abs(np.diff(values, n=2))
    return robust.MAD_TO_SIGMA * robust.median(bends) / 6**0.5


def _causes(history: History, name: str, step: int) -> Iterator[Cause]:
    stop = [Change("trainer.max_steps", history.key("trainer.max_steps"), step, "the best step")]
    if not _stops_early(history):
        stop.insert(0, Change("config", None, "preset/early_stopping"))
    kept = f"; the best checkpoint, best-step{step:08d}, is kept" if _keeps_best(history) else ""
    yield Cause(f"Training goes on after the lowest {name}: stop early{kept}.", stop)
    regularize, decay = [], history.key("model.optim.weight_decay")
    if isinstance(decay, int | float):
        to = robust.rounded(max(3 * decay, 0.1))
        regularize.append(Change("model.optim.weight_decay", decay, to))
    if history.key("model.adapter") and not history.key("model.adapter.dropout"):
        regularize.append(Change("model.adapter.dropout", 0.0, 0.1))
    yield Cause("Too little regularization: more weight decay, dropout.", regularize)
    read, more = expected.passes(history, step), "The model is too large for so few data"
    if read:
        more += f", which had been read {read:.1f} times at the best step"
    epochs = history.key("trainer.max_epochs")
    fewer = []
    if isinstance(epochs, int) and epochs > EPOCHS:
        fewer = [Change("trainer.max_epochs", epochs, EPOCHS)]
    yield Cause(f"{more}: more data, fewer epochs, a smaller model or an adapter.", fewer)


def _stops_early(history: History) -> bool:
    callbacks = history.key("trainer.callbacks") or []
    classes = [each.get("class_path", "") for each in callbacks if isinstance(each, dict)]
    return any(path.rpartition(".")[2] in ("EarlyStopping", "StopEarly") for path in classes)


def _keeps_best(history: History) -> bool:
    return history.key("best_checkpoint.keep", 1) != 0
