"""What stands in a report beside curves and findings, as titled parts that HTML and Markdown both show."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...checkpoint import manifest
from ..history.run import History
from . import differences
from .commands import checkpoints
from .results import short, side_by_side, steps
from .tables import Table, shown

ROWS = 20  # of incidents, of checkpoints
SAMPLES = 6
OF_AN_ATTEMPT = ("time", "command", "job_started", "job_ends")  # another each time, and told elsewhere
ENVIRONMENT = ("time", "host", "platform", "cpu_count", "gpus", "driver", "cuda", "nccl", "python", "git_commit")
PACKAGES = ("torch", "lightning", "transformers", "deepspeed")


@dataclass(frozen=True)
class Text:
    """As it was written, line by line: generated text, a file.

    Args:
        title: May be empty.
        folded: Long, and shown on a click.
    """

    title: str
    body: str
    folded: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    parts: list[Table | Text] = field(default_factory=list)


def status(history: History) -> str:
    """How the run stands, in a few words."""
    done, last = steps(history), history.key("trainer.max_steps", -1)
    of = f" of {last:,}" if isinstance(last, int) and last > 0 else ""
    if of and done >= last:
        return f"finished all {done:,} steps"
    crashes = [each for each in history.crashes if each.get("kind") != "peer"] or history.crashes
    if crashes and ((crash := crashes[-1]).get("step") or 0) >= done:
        return f"crashed at step {done:,}{of}: {crash.get('error', 'no error')} on rank {crash.get('rank', '?')}"
    return f"stands at step {done:,}{of}"


def what(history: History) -> str:
    """What was trained, on what and when, as far as it is known."""
    total, ranks = history.fact("parameters.total"), history.fact("machine.world_size")
    known = [
        history.fact("model.model_type") or history.key("model.architecture.model_type"),
        f"{short(total)} parameters" if total else None,
        history.fact("training.strategy") or differences.flat(history.config).get("trainer.strategy"),
        f"{ranks} × {history.fact('machine.device')}" if ranks else None,
        history.fact("training.precision"),
        history.environment.get("time"),
    ]
    return ", ".join(str(each) for each in known if each)


def of_one(history: History) -> list[Section]:
    """All that one run has; sections without content are left out."""
    sections = [
        Section("Crashes", _crashes(history)),
        Section("Incidents", _incidents(history.incidents)),
        Section("Configuration", _configuration(history)),
        Section("Environment", _environment(history.environment)),
        Section("Samples of generated text", _samples(history.folder)),
        Section("Checkpoints", _checkpoints(history)),
    ]
    return [section for section in sections if section.parts]


def of_several(histories: list[History], names: list[str]) -> list[Section]:
    """Runs side by side: figures, and only what differs in configuration and environment."""
    configs = differences.between([differences.config_of(history) for history in histories])
    rows = [[key, *map(shown, values)] for key, values in configs]
    none = "" if rows else "The configurations are equal."
    environments = [
        {k: v for k, v in differences.flat(h.environment).items() if k not in OF_AN_ATTEMPT} for h in histories
    ]
    other = [[key, *map(shown, values)] for key, values in differences.between(environments)]
    return [
        Section("Side by side", list(side_by_side(histories, names))),
        Section("Configuration: what differs", [Table("", ["key", *names], rows, none)]),
        *([Section("Environment: what differs", [Table("", ["", *names], other)])] if other else []),
    ]


def _configuration(history: History) -> list[Table | Text]:
    changed = [[key, shown(value), shown(default)] for key, value, default in differences.from_defaults(history)]
    parts: list[Table | Text] = []
    if history.defaults:
        note = "" if changed else "Every key is at its default."
        parts.append(Table("What differs from the defaults", ["key", "this run", "default"], changed, note))
    if history.config:
        parts.append(
            Text("Every key", yaml.safe_dump(history.config, sort_keys=False, allow_unicode=True), folded=True)
        )
    return parts


def _environment(environment: dict[str, Any]) -> list[Table | Text]:
    known = [[key, shown(environment[key])] for key in ENVIRONMENT if environment.get(key) not in (None, "", [])]
    packages = environment.get("packages") or {}
    known += [[name, packages[name]] for name in PACKAGES if name in packages]
    variables = environment.get("variables") or {}
    listed = [f"{name}={value}" for name, value in variables.items()] + [f"{n}=={v}" for n, v in packages.items()]
    listed = [*(environment.get("git_changes") or "").splitlines(), *listed]
    more = Text("Changed files, variables, packages", "\n".join(listed), folded=True)
    return [*([Table("", ["", ""], known)] if known else []), *([more] if listed else [])]


def _samples(folder: Path) -> list[Table | Text]:
    """Some of them, from the first to the last."""
    path = folder / "samples.txt"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    _, *found = re.split(r"^--- step (\d+)$\n?", text, flags=re.MULTILINE)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    which = sorted({round(i * (len(pairs) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}) if pairs else []
    return [Text(f"Step {pairs[i][0]}", pairs[i][1].rstrip()) for i in which]


def _incidents(incidents: list[dict[str, Any]]) -> list[Table | Text]:
    """Bad steps that the numerics guard saw, the newest ones."""
    keys = ("time", "step", "kind", "decision", "loss", "limit", "gradient_norm", "suspects")
    rows = [[_figure(incident.get(key)) for key in keys] for incident in incidents[-ROWS:]]
    note = f"The newest {ROWS} of {len(incidents)}." if len(incidents) > ROWS else ""
    return [Table("", [key.replace("_", " ") for key in keys], rows, note)] if rows else []


def _crashes(history: History) -> list[Table | Text]:
    keys = ("step", "rank", "host", "error", "module", "where")
    rows = [[shown(crash.get(key, "")) for key in keys] for crash in history.crashes]
    messages = [
        Text(f"Rank {crash.get('rank', '?')}, step {crash.get('step', '?')}", str(crash.get("message", ""))[:4000])
        for crash in history.crashes[-1:]
    ]
    return [Table("", list(keys), rows), *messages] if rows else []


def _checkpoints(history: History) -> list[Table | Text]:
    rows = []
    for path in checkpoints(history)[:ROWS]:
        if torn := manifest.torn(path):
            rows.append([path.name, "", "", "", f"damaged: {torn}"])
            continue
        told = manifest.read(path)
        size = sum(size for size, _ in told["files"].values()) / 2**20
        rows.append([path.name, f"{size:,.1f}", str(told["world_size"]), str(told["strategy"]), "sizes agree"])
    return [Table("", ["name", "MiB", "processes", "strategy", "state"], rows)] if rows else []


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else shown(value)
