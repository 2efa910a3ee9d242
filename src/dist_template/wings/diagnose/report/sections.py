"""The sections of a report: titled tables and texts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ....checkpoint import manifest
from ....observe.history import goodput
from ....observe.history.run import History
from ....records import flatten
from ....table import Table, shown
from ....text.cache.quality import as_table
from . import differences, evaluation
from .commands import checkpoints
from .results import clock, short, side_by_side, steps

ROWS = 20  # of incidents, of checkpoints
SAMPLES = 6
# Keys of environment.json that differ between any two attempts, and those that a report shows.
OF_AN_ATTEMPT = ("time", "command", "job_started", "job_ends")
ENVIRONMENT = (
    "time", "host", "platform", "cpu_count", "gpus", "driver", "cuda", "nccl", "python",
    "git_commit",
)  # fmt: skip
PACKAGES = ("torch", "lightning", "transformers", "deepspeed")


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


@dataclass(frozen=True)
class Section:
    title: str
    parts: list[Table | Text] = field(default_factory=list)


def status(history: History) -> str:
    """Returns how the run ended or where it is, as the rest of a sentence."""
    done, last = steps(history), history.key("trainer.max_steps", -1)
    of = f" of {last:,}" if isinstance(last, int) and last > 0 else ""
    if of and done >= last:
        return f"finished all {done:,} steps"
    crashes = [each for each in history.crashes if each.get("kind") != "peer"] or history.crashes
    if crashes and ((crash := crashes[-1]).get("step") or 0) >= done:
        error, rank = crash.get("error", "no error"), crash.get("rank", "?")
        return f"crashed at step {done:,}{of}: {error} on rank {rank}"
    return f"is at step {done:,}{of}"


def what(history: History) -> str:
    """Returns what was trained, on what and when, as far as it is known."""
    total, ranks = history.fact("parameters.total"), history.fact("machine.world_size")
    known = [
        history.fact("model.model_type") or history.key("model.architecture.model_type"),
        f"{short(total)} parameters" if total else None,
        history.fact("training.strategy") or flatten(history.config).get("trainer.strategy"),
        f"{ranks} × {history.fact('machine.device')}" if ranks else None,
        history.fact("training.precision"),
        history.environment.get("time"),
    ]
    return ", ".join(str(each) for each in known if each)


def of_one(history: History) -> list[Section]:
    """Returns the sections of one run that have content."""
    quality = history.fact("data.quality")
    sections = [
        Section("Evaluation", [*evaluation.tables(evaluation.newest(history.folder))]),
        Section("Where the time went", _goodput([history], ["time"])),
        Section("Data", [as_table(quality)] if quality else []),
        Section("Crashes", _crashes(history)),
        Section("Incidents", _incidents(history.incidents)),
        Section("Configuration", _configuration(history)),
        Section("Environment", _environment(history.environment)),
        Section("Samples of generated text", _samples(history.folder)),
        Section("Checkpoints", _checkpoints(history)),
    ]
    return [section for section in sections if section.parts]


def of_several(histories: list[History], names: list[str]) -> list[Section]:
    """Returns the runs side by side: figures, time, differences of configuration, environment."""
    configs = [differences.config_of(history) for history in histories]
    environments = []
    for history in histories:
        flat = flatten(history.environment)
        environments.append({key: flat[key] for key in flat if key not in OF_AN_ATTEMPT})
    equal = Table("", [], [], "The configurations are equal.")
    sections = [
        Section("Side by side", list(side_by_side(histories, names))),
        Section("Where the time went", _goodput(histories, names)),
        Section("Configuration: what differs", _differing("key", configs, names) or [equal]),
        Section("Environment: what differs", _differing("", environments, names)),
    ]
    return [section for section in sections if section.parts]


def _differing(head: str, trees: list[dict[str, Any]], names: list[str]) -> list[Table | Text]:
    rows = [[key, *map(shown, values)] for key, values in differences.between(trees)]
    return [Table("", [head, *names], rows)] if rows else []


def _goodput(histories: list[History], names: list[str]) -> list[Table | Text]:
    """Returns seconds and shares of each kind of time, over all attempts."""
    totals = [sum(history.goodput.values()) or 1e-9 for history in histories]
    rows = []
    for kind in goodput.KINDS:
        seconds = [history.goodput.get(kind, 0.0) for history in histories]
        if not any(seconds):
            continue
        cells = [f"{s / total:.1%}, {clock(s)}" for s, total in zip(seconds, totals, strict=True)]
        rows.append([kind.replace("_", " "), *cells])
    return [Table("", ["", *names], rows)] if rows else []


def _configuration(history: History) -> list[Table | Text]:
    parts: list[Table | Text] = []
    if history.defaults:
        changed = differences.from_defaults(history)
        rows = [[key, shown(value), shown(default)] for key, value, default in changed]
        head, note = ["key", "this run", "default"], "" if changed else "Every key has its default."
        parts.append(Table("What differs from the defaults", head, rows, note))
    if history.config:
        every = yaml.safe_dump(history.config, sort_keys=False, allow_unicode=True)
        parts.append(Text("Every key", every, folded=True))
    return parts


def _environment(environment: dict[str, Any]) -> list[Table | Text]:
    packages, variables = environment.get("packages") or {}, environment.get("variables") or {}
    known = [key for key in ENVIRONMENT if environment.get(key) not in (None, "", [])]
    rows = [[key, shown(environment[key])] for key in known]
    rows += [[name, packages[name]] for name in PACKAGES if name in packages]
    lines: list[str] = str(environment.get("git_changes") or "").splitlines()
    lines += [f"{name}={value}" for name, value in variables.items()]
    lines += [f"{name}=={version}" for name, version in packages.items()]
    parts: list[Table | Text] = []
    if rows:
        parts.append(Table("", ["", ""], rows))
    if lines:
        title = "Changed files, variables, packages"
        parts.append(Text(title, "\n".join(lines), folded=True))
    return parts


def _samples(folder: Path) -> list[Table | Text]:
    """Returns a few samples, from the first to the last."""
    path = folder / "samples.txt"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    _, *found = re.split(r"^--- step (\d+)$\n?", text, flags=re.MULTILINE)
    samples = [Text(f"Step {s}", t.rstrip()) for s, t in zip(found[::2], found[1::2], strict=True)]
    if len(samples) <= SAMPLES:
        return [*samples]
    return [samples[round(i * (len(samples) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]


def _incidents(incidents: list[dict[str, Any]]) -> list[Table | Text]:
    """Returns the newest anomalous steps that the numerics guard recorded."""
    keys = ("time", "step", "kind", "decision", "loss", "limit", "gradient_norm", "suspects")
    rows = [[_figure(incident.get(key)) for key in keys] for incident in incidents[-ROWS:]]
    note = f"The newest {ROWS} of {len(incidents)}." if len(incidents) > ROWS else ""
    return [Table("", [key.replace("_", " ") for key in keys], rows, note)] if rows else []


def _crashes(history: History) -> list[Table | Text]:
    if not history.crashes:
        return []
    keys = ("step", "rank", "host", "error", "module", "where")
    rows = [[shown(crash.get(key, "")) for key in keys] for crash in history.crashes]
    last = history.crashes[-1]
    title = f"Rank {last.get('rank', '?')}, step {last.get('step', '?')}"
    return [Table("", list(keys), rows), Text(title, str(last.get("message", ""))[:4000])]


def _checkpoints(history: History) -> list[Table | Text]:
    rows = []
    for path in checkpoints(history)[:ROWS]:
        if torn := manifest.torn(path):
            rows.append([path.name, "", "", "", f"damaged: {torn}"])
            continue
        saved = manifest.read(path)
        mib = sum(size for size, _ in saved["files"].values()) / 2**20
        ranks, strategy = str(saved.get("world_size", "")), str(saved.get("strategy", ""))
        rows.append([path.name, f"{mib:,.1f}", ranks, strategy, "sizes match"])
    return [Table("", ["name", "MiB", "processes", "strategy", "state"], rows)] if rows else []


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else shown(value)
