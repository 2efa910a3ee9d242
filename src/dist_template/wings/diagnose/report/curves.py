"""Curves of metrics over optimizer steps, as traces of plotly.

`panels` distributes the metrics of all runs over panels: losses first, then the library's other
metrics (PANELS), then those that a module has logged. `figures` makes a trace of each metric and
run that has a finite value."""

import html
from itertools import islice

from ....errors import with_codes
from ....metric_names import is_own, parts_of
from ...history import History

# Okabe and Ito's colours, which colour-blind readers can distinguish, in shades that can be read on
# the light page and on the dark one.
COLOURS = ("#2f93c8", "#e07b39", "#2aa57c", "#c473a5", "#b57b00", "#5fb0e6", "#868c93")
DASHES = ("solid", "dot", "dash", "dashdot")
MARKED = 40  # curves with at most so many points have markers
LOSS = "Loss"
OF_TEXT = f"{LOSS}, nats per token"
PANELS = {  # title: metrics
    OF_TEXT: ("train/loss", "eval/loss"),
    "Gradient norm before clipping": ("train/grad_norm",),
    "Learning rate": ("train/learning_rate",),
    "Tokens per second, all processes": ("perf/tokens_per_s",),
    "MFU, share of the hardware's peak": ("perf/mfu",),
    "Waiting for data, share of a step": ("perf/data_wait_share",),
    "GPU utilization: share of the time with a running kernel": (
        "gpu/utilization",
        "gpu/utilization_min",
    ),
    "Memory of the fullest process, GiB": ("memory/allocated_gib", "memory/reserved_gib"),
    "Memory in use on a GPU, by all processes, GiB": (
        "gpu/memory_used_gib",
        "gpu/memory_used_gib_max",
    ),
    "Power of a GPU, W": ("gpu/power_w", "gpu/power_w_max"),
    "Temperature of a GPU, °C": ("gpu/temperature_c", "gpu/temperature_c_max"),
    "Slowest process, times the median": ("rank/slowest_over_median",),
    "Busiest expert, times the mean load": ("moe/expert_load_max_over_mean",),
}
NOT_DRAWN = {"train/perplexity", "eval/perplexity", "train/tokens"}
MOST_PANELS = 40  # of a module's own metrics; the page of a module with 200 stays readable

Trace = dict[str, object]


def figures(histories: list[History], names: list[str]) -> dict[str, list[Trace]]:
    """Returns the traces of each panel that has a finite value, by its title."""
    found: dict[str, list[Trace]] = {}
    is_compared = len(histories) > 1
    for title, metrics in panels(histories).items():
        for number, metric in enumerate(metrics):
            for run, history in enumerate(histories):
                trace = _trace(history, metric, is_compared, run, number)
                if not trace:
                    continue
                name = f"{names[run]} {metric}" if is_compared else metric
                trace["name"] = html.escape(with_codes(name))
                found.setdefault(title, []).append(trace)
    return found


def panels(histories: list[History]) -> dict[str, tuple[str, ...]]:
    """Returns the metrics of each panel by its title: the library's, then those that the modules
    have logged, with the stages of one measure (train_acc, val_acc) in one panel."""
    drawn = NOT_DRAWN.union(*PANELS.values())
    losses = list(PANELS[OF_TEXT])
    by_measure: dict[str, list[str]] = {}
    for history in histories:
        for metric in filter(is_own, history.metrics.names):
            if metric in drawn:
                continue
            drawn.add(metric)
            parts = parts_of(metric)
            if parts.is_loss and parts.stage != "test":
                losses.append(metric)
            elif history.is_text or not parts.stage:
                by_measure.setdefault(metric, []).append(metric)
            else:
                by_measure.setdefault(parts.measure, []).append(metric)
    are_texts = all(history.is_text for history in histories)
    found = {OF_TEXT if are_texts else LOSS: tuple(losses)}
    for title, metrics in PANELS.items():
        if title != OF_TEXT:
            found[title] = metrics
    for measure, own in islice(by_measure.items(), MOST_PANELS):
        # A measure of a single stage is named as the module logged it.
        title = measure if len(own) > 1 else own[0]
        found[title] = tuple(own)
    return found


def _trace(history: History, metric: str, is_compared: bool, run: int, number: int) -> Trace:
    """Returns a curve, {} without a finite value; NaN and infinities are gaps.

    The metrics of one run differ in colour. Of several runs, each has a colour, and the metrics of
    a panel differ in their dashes."""
    series = history.metrics[metric]
    if not len(series.finite()):
        return {}
    if is_compared:
        colour, dash = run, number
    else:
        colour, dash = number, 0
    return {
        "type": "scatter",
        "x": series.steps.tolist(),
        "y": series.values.tolist(),
        "mode": "lines+markers" if len(series) <= MARKED else "lines",
        "line": {"width": 1.6, "color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash]},
        "hovertemplate": "%{y:.5~g}",
    }
