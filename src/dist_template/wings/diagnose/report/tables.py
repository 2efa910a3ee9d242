"""The tables of a report, with a column for each run, in the order of the page.

A function for each table collects what is known of a run as {name of the row: value}; `_rows`
writes a row for each name that any run has. Tables without rows are left out."""

from collections.abc import Collection
from datetime import timedelta
from itertools import chain

import numpy as np

from ....metric_names import is_own, parts_of
from ....observe.history.run import RunFile
from ....project import has_command_line
from ....records import flatten
from ....table import Table
from ...history import History
from ...preflight.interval import compared
from ...values import shown
from ..expected import last_step, validation_loss
from ..next_commands import next_commands

NOT_SET = "–"  # the run has no such figure, or its configuration no such key
NUM_INCIDENTS = 20
# keys of paths, which change no result
PATHS = ("run.", "ckpt_path.", "config.", "data.cache_dir.")
# Keys of environment.json that are shown even if all runs have the same value.
ENVIRONMENT = (
    "time",
    "host",
    "platform",
    "cpu_count",
    "gpus",
    "driver",
    "cuda",
    "nccl",
    "python",
    "git_commit",
    "packages.torch",
    "packages.lightning",
    "packages.transformers",
    "packages.deepspeed",
)
OF_AN_ATTEMPT = ("command.", "job_started.", "job_ends.")  # differ between any two attempts
MOST_RESULTS = 60  # metrics of a module; the others are counted
AT_TOKENS = ("train/loss", "eval/loss", "eval/bits_per_byte", "eval/token_accuracy")
FACTS = {
    "parameters": "parameters.total",
    "strategy": "training.strategy",
    "processes": "machine.world_size",
    "device": "machine.device",
    "precision": "training.precision",
}
SPEEDS = {"tokens/s": ("perf/tokens_per_s", "{:,.0f}"), "MFU": ("perf/mfu", "{:.1%}")}


def _next(histories: list[History]) -> Table:
    """Returns the next commands of the one run of a report."""
    rows = []
    if len(histories) == 1 and has_command_line():
        rows = [list(pair) for pair in next_commands(histories[0]).items()]
    return Table("Next", ["", "command"], rows)


def tables(histories: list[History], names: list[str]) -> list[Table]:
    """Returns the tables that have rows."""
    environments = [flatten(history.environment) for history in histories]
    head = ["", *names]
    made = [
        Table("Results", head, _rows(list(map(_results, histories)))),
        _at_equal_length(histories, names),
        Table("Where the time went", head, _rows(list(map(_goodput, histories)))),
        Table("Values by consumed tokens", head, _rows(list(map(_phases, histories)))),
        _next(histories),
        _settings(histories, names),
        _events(histories, names),
        Table("Environment", head, _differing(environments, OF_AN_ATTEMPT, ENVIRONMENT)),
    ]
    return [table for table in made if table.rows]


def _results(history: History) -> dict[str, object]:
    """Returns what was trained, the last losses and figures of speed, memory and time, as far as
    they are known."""
    found: dict[str, object] = {"optimizer steps": f"{last_step(history):,}"}
    for name, fact in FACTS.items():
        known = history.fact(fact)
        if known:
            found[name] = known
    logged = list(filter(_is_result, history.metrics.names))
    for name in logged[:MOST_RESULTS]:
        found[name] = f"{history.metrics[name].last:.5g}"
    if len(logged) > MOST_RESULTS:
        more = len(logged) - MOST_RESULTS
        found["further metrics"] = f"{more:,}, in {RunFile.METRICS}"
    validated = validation_loss(history)
    losses = history.metrics[validated].finite()
    if len(losses):
        found[f"{validated}, lowest"] = f"{losses.values.min():.5g}"
    for name, (metric, form) in SPEEDS.items():
        values = history.metrics[metric].finite().values
        if len(values) > 1:
            values = values[1:]  # the first one includes the warm-up of kernels
        if len(values):
            found[name] = form.format(np.median(values))
    memory = history.metrics["memory/reserved_gib"].finite()
    if len(memory):
        found["memory, most"] = f"{memory.values.max():.1f} GiB"
    if history.goodput:
        total_s = sum(history.goodput.values())
        found["goodput"] = f"{history.goodput['productive'] / max(total_s, 1e-9):.0%}"
        found["duration"] = _duration(total_s)
    return found


def _is_result(name: str) -> bool:
    return is_own(name) or name.startswith(("train/", "eval/", "test/"))


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _at_equal_length(histories: list[History], names: list[str]) -> Table:
    """Compares the losses at the number of tokens, or else of samples, that the shortest run has
    seen."""
    unit, counter = "tokens", "train/tokens"
    if any(not len(history.metrics[counter].finite()) for history in histories):
        unit, counter = "samples", "train/samples"
    ends = []
    for history in histories:
        known = history.metrics[counter].finite()
        ends.append(known.last if len(known) else 0.0)
    least = min(ends)
    columns: list[dict[str, object]] = []
    if len(histories) > 1 and least:
        columns = [_losses_at(least, counter, history) for history in histories]
    title = f"At {least:,.0f} {unit}, the length of the shortest run"
    return Table(title, ["", *names], _rows(columns))


def _losses_at(count: float, counter: str, history: History) -> dict[str, object]:
    """Returns the last value of each compared metric before `counter` exceeds `count`."""
    found: dict[str, object] = {}
    counted = history.metrics[counter].finite()
    for name in _compared(history):
        series = history.metrics[name]
        # Metrics are logged at other steps than the counter, which starts at 0.
        at_step = np.interp(series.steps, [0, *counted.steps], [0.0, *counted.values])
        reached = series[at_step <= count * (1 + 1e-9)]
        if len(reached):
            found[name] = f"{reached.last:.5g}"
    return found


def _compared(history: History) -> list[str]:
    """Returns the metrics that are compared at equal length."""
    if history.is_text:
        return list(AT_TOKENS)
    own = filter(is_own, history.metrics.names)
    return [name for name in own if parts_of(name).stage in ("train", "validation")][:MOST_RESULTS]


def _goodput(history: History) -> dict[str, object]:
    """Returns seconds and shares of each kind of time, over all attempts."""
    found: dict[str, object] = {}
    total_s = sum(history.goodput.values())
    for kind, seconds in history.goodput.items():
        if seconds:
            share = seconds / total_s
            found[kind.replace("_", " ")] = f"{share:.1%}, {_duration(seconds)}"
    interval = compared(history)
    if interval:
        found["interval of checkpoints"] = interval
    return found


def _settings(histories: list[History], names: list[str]) -> Table:
    """Lists the keys of the configuration that differ between the runs, or from the defaults of one
    run."""
    trees, head = [history.portable_config() for history in histories], names
    if len(histories) == 1:
        trees.append(flatten(histories[0].defaults))
        head = [*names, "default"]
    return Table("Settings that differ", ["key", *head], _differing(trees, PATHS))


def _phases(history: History) -> dict[str, object]:
    """Returns the keys that have phases by consumed tokens (by_tokens.py), with a sentence."""
    found: dict[str, object] = {}
    for key, value in history.portable_config().items():
        if not isinstance(value, list):
            continue
        parts = []
        for phase in value:
            if isinstance(phase, dict) and phase.keys() >= {"value", "until", "shape"}:
                end = f" until {phase['until']:.6g} tokens" if phase["until"] else ""
                parts.append(f"{phase['shape']} {phase['value']:g}{end}")
        if parts:
            found[key] = ", then ".join(parts)
    return found


def _events(histories: list[History], names: list[str]) -> Table:
    """Lists the crashes, and the newest anomalous steps that the numerics guard recorded."""
    rows = []
    for history, name in zip(histories, names, strict=True):
        for crash in history.crashes:
            message = str(crash.get("message", ""))[:1000]
            who = f"rank {crash.get('rank', '?')} on {crash.get('host', '?')}"
            what = f"{crash.get('error', '')}: {message}"
            rows.append([name, str(crash.get("step", "")), f"crash of {who}", what])
        for incident in history.incidents[-NUM_INCIDENTS:]:
            parts = []
            for key in ("decision", "loss", "limit", "gradient_norm", "suspects"):
                if incident.get(key) is not None:
                    parts.append(f"{key} {shown(incident[key])}")
            first = incident.get("first_bad")
            if first:
                parts.append(f"first non-finite {first['what']} {first['module']}")
            step, kind = str(incident.get("step", "")), str(incident.get("kind", ""))
            rows.append([name, step, kind, ", ".join(parts)])
    return Table("Crashes and incidents", ["run", "step", "kind", "what"], rows)


def _differing(
    trees: list[dict[str, object]], skipped: tuple[str, ...], always: Collection[str] = ()
) -> list[list[str]]:
    """Returns rows for the keys whose values differ, and for those in `always`, without those below
    `skipped`."""
    rows = []
    for row in _rows(trees):
        key, *values = row
        if f"{key}.".startswith(skipped):
            continue
        if key in always or len(set(values)) > 1:
            rows.append(row)
    return rows


def _rows(columns: list[dict[str, object]]) -> list[list[str]]:
    """Returns a row for each name in any column."""
    rows = []
    for name in dict.fromkeys(chain(*columns)):
        rows.append([name, *(shown(column.get(name, NOT_SET)) for column in columns)])
    return rows
