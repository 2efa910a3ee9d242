"""Reads what `recorder.py` wrote, for checks and tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import another_rank_is_gone
from ...project import is_users

Event = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The record of one command on N ranks.

    Args:
        folder: Folder of its files.
        answers: {rank: how it ended}: "done", an error, "refused: …" (bad input), "killed: …",
            "hung: …".
    """

    folder: Path
    answers: dict[int, str]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.answers)

    @property
    def ok(self) -> bool:
        return all(answer == "done" for answer in self.answers.values())

    @property
    def error(self) -> str:
        """The error that caused the others, with its rank; "" if there is none."""
        if self.ok:
            return ""
        rank, answer = self.failed_rank, self.answers[self.failed_rank]
        if self.hung:
            return answer.removeprefix("hung: ")
        if answer.startswith("killed:"):
            answer += f"; the last line of its log: {self.last_line(rank)}"
        return f"rank {rank}: {answer}"

    @property
    def hung(self) -> bool:
        """Whether the ranks stopped making progress."""
        return self.answers[self.failed_rank].startswith("hung: ")

    def last_line(self, rank: int) -> str:
        """Returns the last line that the rank printed; for a crash in C, where it happened."""
        lines = [line.strip() for line in self.log(rank).splitlines() if line.strip()]
        for number, line in enumerate(lines):
            if line.startswith("Fatal Python error"):
                stack = [each for each in lines[number:] if each.startswith('File "')]
                own = [each for each in stack if is_users(each.split('"')[1])]
                return f"{line}, {[*own, *stack, 'outside of Python'][0]}"
        return lines[-1] if lines else "it printed nothing"

    @property
    def failed_rank(self) -> int:
        """The rank that failed first; 0 if none did."""
        wrong = [rank for rank, answer in sorted(self.answers.items()) if answer != "done"]
        causes = [rank for rank in wrong if not _is_consequence(self.answers[rank])]
        return [*causes, *wrong, 0][0]

    @property
    def refusal(self) -> str:
        """The message if the command was refused as bad input, otherwise ""."""
        answer = self.answers[self.failed_rank]
        return answer.removeprefix("refused: ") if answer.startswith("refused: ") else ""

    @property
    def was_killed(self) -> bool:
        return all(answer.startswith("killed: exit code -9") for answer in self.answers.values())

    def check(self) -> RunRecord:
        """Returns this record if the command succeeded.

        Raises:
            RuntimeError: it failed; with the error and the end of that rank's log.
        """
        if self.ok:
            return self
        path = self.log_path(self.failed_rank)
        log = self.log(self.failed_rank)
        raise RuntimeError(f"{self.error}\n--- the end of {path}\n{log[-4000:]}")

    def log_path(self, rank: int = 0) -> Path:
        return self.folder / f"rank{rank}.log"

    def log(self, rank: int = 0) -> str:
        """Returns the rank's output."""
        return self.log_path(rank).read_text(encoding="utf-8", errors="replace")

    @cached_property
    def ranks(self) -> list[list[Event]]:
        """The events of every rank, in order of time."""
        paths = [self.folder / f"rank{rank}.jsonl" for rank in sorted(self.answers)]
        return [_read(path) if path.exists() else [] for path in paths]

    def events(self, kind: str, rank: int = 0) -> list[Event]:
        return [event for event in self.ranks[rank] if event["event"] == kind]

    @property
    def run(self) -> Path:
        """The run folder, with checkpoints and logs."""
        return Path(self.events("run")[-1]["folder"])

    def metric(self, name: str) -> dict[int, float]:
        """Returns {optimizer step: value that the module logged as `name`}."""
        return {e["step"]: e["metrics"][name] for e in self.events("step") if name in e["metrics"]}

    @property
    def loss(self) -> dict[int, float]:
        return self.metric("train/loss")

    @property
    def grad_norm(self) -> dict[int, float]:
        return self.metric("train/grad_norm")

    def eval(self, stage: str = "validate") -> dict[int, dict[str, float]]:
        """Returns {optimizer step: metrics} of validations, or of the stage `sanity` or `test`."""
        return {e["step"]: e["metrics"] for e in self.events("eval") if e["stage"] == stage}

    def rows(self) -> dict[int, list[tuple[str, int]]]:
        """Returns {step: (hash, rank) of each sequence}; ranks that share a batch count once."""
        rows: dict[int, list[tuple[str, int]]] = {}
        seen: set[int] = set()
        for rank in range(self.size):
            started = self.events("run", rank)
            dp_rank = started[-1]["dp_rank"] if started else rank
            if dp_rank in seen:
                continue
            seen.add(dp_rank)
            for event in self.events("rows", rank):
                rows.setdefault(event["step"], []).extend((row, rank) for row in event["rows"])
        return rows

    def random(self, rank: int) -> dict[int, str]:
        """Returns {optimizer step: hash of the rank's random state before its last micro-batch}."""
        return {event["step"]: event["random"] for event in self.events("rows", rank)}

    def after(self, step: int, kind: str, rank: int | None) -> Any:
        """Returns what the rank recorded as `kind` after `step` (see recorder.py), or {}.

        Rank None: of all ranks, each entry from the first rank that has it; stages of a pipeline
        have different ones.
        """
        if rank is None:
            states = [self.after(step, kind, each) for each in reversed(range(self.size))]
            return {name: value for state in states for name, value in state.items()}
        events = self.events("step", rank)
        found = next((event[kind] for event in events if event["step"] == step), {})
        return events[0][kind] | found if found and kind == "python" else found

    @property
    def buffers(self) -> set[str]:
        """The names of the buffers among the recorded tensors."""
        return {name for rank in self.ranks for e in rank for name in e.get("buffers", ())}

    @cached_property
    def places(self) -> dict[str, str]:
        """{module: class and file:line}; see `first_step.Details`."""
        return self.tensors("places") or {}

    def owner(self, tensor: str) -> str:
        """Returns class and file:line of the module that owns a parameter or buffer."""
        return self.places.get(tensor.split(" ")[0].rpartition(".")[0], "?")

    def tensors(self, name: str) -> Any:
        """Returns the content of `name`.pt; None if it was not written."""
        path = self.folder / f"{name}.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def forward_passes(self, rank: int) -> list[dict[str, Any]]:
        """Returns {rows, tensors} of each micro-batch of the rank's first step."""
        return self.tensors(f"forward{rank}") or []

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Unsharded gradients of the first step, before clipping."""
        return self.tensors("gradients") or {}

    @property
    def draws(self) -> dict[str, str]:
        """{module: "dropout", or another random number that its forward draws}."""
        return self.tensors("draws") or {}

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Unsharded weights before the first step."""
        return torch.load(self.folder / "start.pt", weights_only=True)

    @cached_property
    def end(self) -> dict[str, Tensor]:
        """Unsharded weights after the last step."""
        return torch.load(self.folder / "end.pt", weights_only=True)


def _read(path: Path) -> list[Event]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A killed rank may leave an incomplete line.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _is_consequence(text: str) -> bool:
    """Returns whether an error only follows from the failure of another rank."""
    return text.startswith("stopped:") or "gloo" in text or another_rank_is_gone(text)
