"""Curves of metrics over optimizer steps, as traces of plotly."""

import html

from ...history import History

# Okabe and Ito's colours, which colour-blind readers can distinguish, in shades that can be read on
# the light page and on the dark one.
COLOURS = ("#2f93c8", "#e07b39", "#2aa57c", "#c473a5", "#b57b00", "#5fb0e6", "#868c93")
DASHES = ("solid", "dot", "dash", "dashdot")
MARKED = 40  # curves with at most so many points have markers
PANELS = {  # title: metrics
    "Loss, nats per token": ("train/loss", "eval/loss"),
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
# Of these groups each other metric has a panel of its own; others are for TensorBoard.
OWN_PANEL = ("train/", "eval/")
NOT_DRAWN = {"train/perplexity", "eval/perplexity", "train/tokens"}

Trace = dict[str, object]


def figures(histories: list[History], names: list[str]) -> dict[str, list[Trace]]:
    """Returns the traces of each panel that has a finite value, by its title."""
    drawn = NOT_DRAWN.union(*PANELS.values())
    panels: dict[str, tuple[str, ...]] = dict(PANELS)
    for history in histories:
        for metric in history.metrics.names:
            if metric.startswith(OWN_PANEL) and metric not in drawn:
                panels[metric] = (metric,)
    found: dict[str, list[Trace]] = {}
    for title, metrics in panels.items():
        for number, metric in enumerate(metrics):
            for run, history in enumerate(histories):
                trace = _trace(history, metric, len(histories) > 1, run, number)
                if trace:
                    trace["name"] = html.escape(
                        metric if len(histories) == 1 else f"{names[run]} {metric}"
                    )
                    found.setdefault(title, []).append(trace)
    return found


def _trace(history: History, metric: str, is_compared: bool, run: int, number: int) -> Trace:
    """Returns a curve, {} without a finite value; NaN and infinities are gaps. Colours are the
    metrics of one run, or several runs, with dashed metrics."""
    series = history.metrics[metric]
    if not len(series.finite()):
        return {}
    colour, dash = (run, number) if is_compared else (number, 0)
    return {
        "type": "scatter",
        "x": series.steps.tolist(),
        "y": series.values.tolist(),
        "mode": "lines+markers" if len(series) <= MARKED else "lines",
        "line": {"width": 1.6, "color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash]},
        "hovertemplate": "%{y:.5~g}",
    }
