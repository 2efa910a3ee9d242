"""The sections of a report: titled tables and texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ....observe.history.run import History
from ....records import flatten, read_mapping
from ....table import Table
from ....text.cache.quality import as_table
from ...values import shown
from .curves import COLOURS, Figure, Panel
from .results import checkpoints, clock, short, side_by_side, steps

ROWS = 20  # of incidents, of checkpoints
SAMPLES = 6
NOT_SET = "–"  # the configuration has no such key, because it has another class there
PATHS = ("run", "ckpt_path", "config", "data.cache_dir")  # keys of paths, which change no result
# Keys of environment.json that differ between any two attempts, and those that a report shows.
OF_AN_ATTEMPT = ("time", "command", "job_started", "job_ends")
ENVIRONMENT = (
    "time", "host", "platform", "cpu_count", "gpus", "driver", "cuda", "nccl", "python",
    "git_commit", "torch", "lightning", "transformers", "deepspeed",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """Text that keeps its lines: generated text, a file.

    Args:
        title: May be empty.
        folded: Whether it is long, and shown on a click.
    """

    title: str
    body: str
    folded: bool = False


Parts = list[Table | Text]


@dataclass(frozen=True)
class Section:
    title: str
    parts: Parts


def status(history: History) -> str:
    """Returns how the run ended or where it is, as the rest of a sentence."""
    done, last = steps(history), history.key("trainer.max_steps", -1)
    of = ""
    if isinstance(last, int) and last > 0:
        of = f" of {last:,}"
        if done >= last:
            return f"finished all {done:,} steps"
    causes = [crash for crash in history.crashes if crash.get("kind") != "peer"]
    crashes = causes or history.crashes  # a peer fails because another rank has failed
    if crashes and (crashes[-1].get("step") or 0) >= done:
        error, rank = crashes[-1].get("error", "no error"), crashes[-1].get("rank", "?")
        return f"crashed at step {done:,}{of}: {error} on rank {rank}"
    return f"is at step {done:,}{of}"


def what(history: History) -> str:
    """Describes the run: model, size, strategy, devices, precision, start; skips the unknown."""
    total, ranks = history.fact("parameters.total"), history.fact("machine.world_size")
    known = [history.fact("model.model_type") or history.key("model.architecture.model_type")]
    if total:
        known.append(f"{short(total)} parameters")
    strategy = history.fact("training.strategy")
    known.append(strategy or flatten(history.config).get("trainer.strategy"))
    if ranks:
        known.append(f"{ranks} × {history.fact('machine.device')}")
    known += [history.fact("training.precision"), history.environment.get("time")]
    return ", ".join(map(str, filter(None, known)))


def of_one(history: History) -> list[Section]:
    """Returns the sections of one run that have content."""
    data: Parts = []
    if quality := history.fact("data.quality"):
        data.append(as_table(quality))
    return _with_content({
        "Evaluation": _evaluation(history.folder),
        "Where the time went": _goodput([history], ["time"]),
        "Data": data,
        "Crashes": _crashes(history.crashes),
        "Incidents": _incidents(history.incidents),
        "Configuration": _configuration(history),
        "Environment": _environment(history.environment),
        "Samples of generated text": _samples(history.folder),
        "Checkpoints": _checkpoints(history),
    })  # fmt: skip


def of_several(histories: list[History], names: list[str]) -> list[Section]:
    """Returns the runs side by side: figures, time, differences of configuration, environment."""
    environments = []
    for history in histories:
        flat = flatten(history.environment)
        for key in OF_AN_ATTEMPT:
            flat.pop(key, None)
        environments.append(flat)
    equal = Table("", [], [], "The configurations are equal.")
    configs = _differing("key", map(History.portable_config, histories), names)
    return _with_content({
        "Side by side": [*side_by_side(histories, names)],
        "Where the time went": _goodput(histories, names),
        "Configuration: what differs": configs or [equal],
        "Environment: what differs": _differing("", environments, names),
    })  # fmt: skip


def _with_content(parts_of: Mapping[str, Parts]) -> list[Section]:
    return [Section(title, parts) for title, parts in parts_of.items() if parts]


def from_defaults(history: History) -> list[tuple[str, object, object]]:
    """Returns (key, value, default) where they differ; [] if the run recorded no defaults."""
    defaults, found = flatten(history.defaults), []
    for key, value in history.portable_config().items():
        default = defaults.get(key, NOT_SET)
        if defaults and value != default:
            found.append((key, value, default))
    return found


def _table(head: list[str], rows: list[list[str]], note: str = "") -> Parts:
    return [Table("", head, rows, note)] if rows else []


def _differing(head: str, trees: Iterable[Mapping[str, object]], names: list[str]) -> Parts:
    """Returns a table of the keys whose values differ, of flat trees."""
    trees, rows = list(trees), []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key, NOT_SET) for tree in trees]
        is_path = key in PATHS or key.startswith(tuple(f"{path}." for path in PATHS))
        if not is_path and any(value != values[0] for value in values):
            rows.append([key, *map(shown, values)])
    return _table([head, *names], rows)


def newest_evaluation(run: Path) -> dict[str, Any]:
    """Reads the newest result of the verb evaluate; {} without one."""
    files = sorted((run / "evaluation").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return read_mapping(files[-1], "evaluate again, or remove it") if files else {}


def differences_to_baseline(run: Path) -> list[Figure]:
    """Returns a plot of each comparison's difference and interval, in percent of the baseline."""
    names, middle, plus, minus = [], [], [], []
    for each in newest_evaluation(run).get("comparisons", ()):
        if baseline := abs(each["baseline"] or 0):
            names.append(each["name"])
            middle.append(100 * each["difference"] / baseline)
            plus.append(100 * each["high"] / baseline - middle[-1])
            minus.append(middle[-1] - 100 * each["low"] / baseline)
    if not names:
        return []
    trace: dict[str, object] = {
        "type": "scatter",
        "x": middle,
        "y": names,
        "mode": "markers",
        "error_x": {"type": "data", "array": plus, "arrayminus": minus},
        "marker": {"size": 8, "color": COLOURS[0]},
    }
    x, layout = {"title": {"text": "% of the baseline"}}, {"hovermode": "closest"}
    panel = Panel("Differences to the baseline", "with 95 % intervals", ())
    return [Figure(panel, [trace], x, {"type": "category"}, layout)]


def _evaluation(run: Path) -> Parts:
    """Returns the verdicts."""
    found = newest_evaluation(run).get("comparisons", ())
    return _table(["", "verdict"], [[each["name"], each["sentence"]] for each in found])


def _goodput(histories: list[History], names: list[str]) -> Parts:
    """Returns seconds and shares of each kind of time, over all attempts."""
    rows, kinds = [], dict[str, float]()
    for history in histories:
        kinds |= history.goodput
    for kind in kinds:
        cells = []
        for history in histories:
            seconds, total = history.goodput.get(kind, 0.0), sum(history.goodput.values())
            cells.append(f"{seconds / (total or 1e-9):.1%}, {clock(seconds)}")
        if any(history.goodput.get(kind) for history in histories):
            rows.append([kind.replace("_", " "), *cells])
    return _table(["", *names], rows)


def _configuration(history: History) -> Parts:
    parts: Parts = []
    if history.defaults:
        rows = [[key, shown(value), shown(default)] for key, value, default in from_defaults(history)]
        note = "" if rows else "Every key has its default."
        head = ["key", "this run", "default"]
        parts.append(Table("What differs from the defaults", head, rows, note))
    if history.config:
        every = yaml.safe_dump(history.config, sort_keys=False, allow_unicode=True)
        parts.append(Text("Every key", every, folded=True))
    return parts


def _environment(environment: Mapping[str, Any]) -> Parts:
    packages, variables = environment.get("packages") or {}, environment.get("variables") or {}
    rows, known = [], {**environment, **packages}
    for key in ENVIRONMENT:
        if known.get(key) not in (None, "", []):
            rows.append([key, shown(known[key])])
    lines = str(environment.get("git_changes") or "").splitlines()
    lines += map("{0[0]}={0[1]}".format, variables.items())
    lines += map("{0[0]}=={0[1]}".format, packages.items())
    parts = _table(["", ""], rows)
    if lines:
        parts.append(Text("Changed files, variables, packages", "\n".join(lines), folded=True))
    return parts


def _samples(folder: Path) -> Parts:
    """Returns a few samples, from the first to the last."""
    path = folder / "samples.txt"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    _, *found = re.split(r"^--- step (\d+)$\n?", text, flags=re.MULTILINE)
    samples: Parts = []
    for step, sample in zip(found[::2], found[1::2], strict=True):
        samples.append(Text(f"Step {step}", sample.rstrip()))
    if len(samples) <= SAMPLES:
        return samples
    return [samples[round(i * (len(samples) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]


def _incidents(incidents: list[dict[str, Any]]) -> Parts:
    """Returns the newest anomalous steps that the numerics guard recorded."""
    keys = ["time", "step", "kind", "decision", "loss", "limit", "gradient_norm", "suspects"]
    rows = []
    for incident in incidents[-ROWS:]:
        rows.append([_figure(incident.get(key)) for key in keys])
    note = ""
    if len(incidents) > ROWS:
        note = f"The newest {ROWS} of {len(incidents)}."
    return _table(keys, rows, note)


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else shown(value)


def _crashes(crashes: list[dict[str, Any]]) -> Parts:
    if not crashes:
        return []
    keys = ["step", "rank", "host", "error", "module", "where"]
    rows = [[shown(crash.get(key, "")) for key in keys] for crash in crashes]
    last = crashes[-1]
    title = f"Rank {last.get('rank', '?')}, step {last.get('step', '?')}"
    return [*_table(keys, rows), Text(title, str(last.get("message", ""))[:4000])]


def _checkpoints(history: History) -> Parts:
    rows = []
    for saved in checkpoints(history)[:ROWS]:
        name = saved.path.name
        if saved.damage:
            rows.append([name, "", "", "", f"damaged: {saved.damage}"])
            continue
        found = saved.manifest
        mib = sum(size for size, _ in found["files"].values()) / 2**20
        ranks, strategy = str(found.get("world_size", "")), str(found.get("strategy", ""))
        rows.append([name, f"{mib:,.1f}", ranks, strategy, "sizes match"])
    return _table(["name", "MiB", "processes", "strategy", "state"], rows)
