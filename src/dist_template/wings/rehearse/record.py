"""Reads what the ranks of one command recorded. recorder.py and first_step.py write the files.

First how the command ended on each rank, then the events of each step, then the tensors of the
first step and the weights. What a rank or a training has not recorded is empty, {} or "", and the
checks say what that means: `_same_curve` in checks.py, for example, that nothing is logged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ...errors import Exit, another_rank_is_gone
from ...project import is_users
from .gpu.events import Event as DeviceEvent

TRAINING_VERBS = ("fit", "validate", "test", "predict")  # others run on one process
Event = dict[str, Any]  # a line of JSON, see recorder.py


class ForwardPass(TypedDict):
    """A micro-batch of the first step."""

    rows: list[str]  # a hash of each sample
    tensors: dict[str, Tensor]  # see ForwardHooks


class DeviceRecord(NamedTuple):
    """What fake devices reported on all ranks."""

    plain: int  # micro-batches that log nothing, on the rank that has most of them
    events: list[DeviceEvent]  # with the count of the rank where each came most often


@dataclass(frozen=True)
class RunRecord:
    """The record of one command on N ranks."""

    folder: Path
    answers: dict[int, str]  # "done", an error, "refused: …" (bad input), "killed: …", "hung: …"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.answers)

    @property
    def ok(self) -> bool:
        return set(self.answers.values()) == {"done"}

    @property
    def failed_rank(self) -> int:
        """The rank whose failure caused the others; 0 if none failed."""
        failed = [rank for rank, answer in sorted(self.answers.items()) if answer != "done"]
        for rank in failed:
            answer = self.answers[rank]
            was_stopped = answer.startswith("stopped:") or "gloo" in answer
            if not was_stopped and not another_rank_is_gone(answer):
                return rank
        return failed[0] if failed else 0

    @property
    def error(self) -> str:
        """The error of `failed_rank`, with the rank, or the watchdog's sentence; "" if no rank
        failed."""
        rank, answer = self.failed_rank, self.answers[self.failed_rank]
        if self.hung:
            logs = "\n".join(self.log(each_rank) for each_rank in self.answers)
            of_watchdog = re.findall("^no progress for [^;\n]+: .*", logs, re.MULTILINE)
            if of_watchdog:
                return of_watchdog[-1]
            return answer.removeprefix("hung: ")
        if answer.startswith("killed:"):
            answer += f"; the last line of its log: {self.last_line(rank)}"
        return "" if answer == "done" else f"rank {rank}: {answer}"

    @property
    def hung(self) -> bool:
        """Whether the ranks stopped making progress."""
        answers = " ".join(self.answers.values())
        return "hung:" in answers or f"killed: exit code {Exit.HUNG:d}" in answers

    @property
    def was_killed(self) -> bool:
        return set(self.answers.values()) == {"killed: exit code -9"}

    @property
    def refusal(self) -> str:
        """The message if the command was refused as bad input, otherwise ""."""
        answer = self.answers[self.failed_rank]
        if not answer.startswith("refused: "):
            return ""
        return answer.removeprefix("refused: ")

    def check(self) -> RunRecord:
        """Returns this record; raises RuntimeError with the end of a log if the command failed."""
        if self.ok:
            return self
        rank = self.failed_rank
        end = f"--- the end of {self.folder}/rank{rank}.log\n{self.log(rank)[-4000:]}"
        raise RuntimeError(f"{self.error}\n{end}")

    def log(self, rank: int = 0) -> str:
        """Returns the rank's output; "" if it could not start."""
        path = self.folder / f"rank{rank}.log"
        if not path.exists():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    def last_line(self, rank: int) -> str:
        """Returns the last line that the rank printed; for a crash in C, where it happened."""
        last = fatal = ""
        for line in self.log(rank).splitlines():
            line = line.strip()
            if line:
                last = line
            # Then faulthandler writes the stack, the innermost frame first.
            if line.startswith("Fatal Python error"):
                fatal = line
            elif fatal and line.startswith('File "') and is_users(line.split('"')[1]):
                return f"{fatal}, {line}"
        return fatal or last or "it printed nothing"

    # ---- each step, on each rank -----------------------------------------------------------

    @cached_property
    def ranks(self) -> list[list[Event]]:
        """The events of every rank, in order of time."""
        ranks: list[list[Event]] = []
        for rank in sorted(self.answers):
            path = self.folder / f"rank{rank}.jsonl"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            complete = text.rpartition("\n")[0]  # a killed rank may leave an incomplete line
            ranks.append([json.loads(line) for line in complete.splitlines()])
        return ranks

    def events(self, kind: str, rank: int = 0) -> list[Event]:
        return [event for event in self.ranks[rank] if event["event"] == kind]

    @property
    def run(self) -> Path:
        """The run folder, with checkpoints and logs."""
        return Path(self.events("run")[-1]["folder"])

    def metric(self, name: str) -> dict[int, float]:
        """Returns {optimizer step: value that the module logged as `name`}, of the steps at which
        it logged one: {} for a module that never logs it."""
        values: dict[int, float] = {}
        for event in self.events("step"):
            if name in event["metrics"]:
                values[event["step"]] = event["metrics"][name]
        return values

    @property
    def loss(self) -> dict[int, float]:
        return self.metric("train/loss")

    @property
    def grad_norm(self) -> dict[int, float]:
        return self.metric("train/grad_norm")

    def eval(self, stage: str = "validate") -> dict[int, dict[str, float]]:
        """Returns {optimizer step: metrics} of validations, or of the stage `sanity_check` or
        `test`."""
        metrics: dict[int, dict[str, float]] = {}
        for event in self.events("eval"):
            if event["stage"] == stage:
                metrics[event["step"]] = event["metrics"]
        return metrics

    def rows(self) -> dict[int, list[str]]:
        """Returns {step: a hash of each sequence}; ranks that share a batch count once."""
        rows: dict[int, list[str]] = {}
        first: dict[int, int] = {}  # data-parallel rank: the first rank that has it
        for rank in range(self.size):
            started = self.events("run", rank)
            dp_rank = started[-1]["dp_rank"] if started else rank
            if first.setdefault(dp_rank, rank) == rank:
                for event in self.events("rows", rank):
                    rows.setdefault(event["step"], []).extend(event["rows"])
        return rows

    def random(self, rank: int = 0) -> dict[int, str]:
        """Returns {optimizer step: hash of the rank's random state before its last micro-batch}."""
        return {event["step"]: event["random"] for event in self.events("rows", rank)}

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers, such as dropout's."""
        if self.tensors("dropout").get("seeded"):  # the states before its steps are set
            return "draws" in self.tensors("dropout")
        first_states = list(self.random().values())[:2]
        return len(set(first_states)) > 1

    def after(self, step: int, kind: str, rank: int) -> Any:
        """Returns what the rank recorded as `kind` after `step` (see recorder.py); {} if it was
        killed before, or did not run that step."""
        for event in self.events("step", rank):
            if event["step"] == step:
                return event[kind]
        return {}

    @cached_property
    def device(self) -> DeviceRecord:
        """What fake devices reported, see gpu/observer.py."""
        counts: dict[tuple[str, ...], int] = {}
        plain = 1
        for rank in range(self.size):
            content = json.loads((self.folder / f"events{rank}.json").read_text(encoding="utf-8"))
            plain = max(plain, content["plain"])
            for event in content["events"]:
                key, count = tuple(event[:-1]), event[-1]
                counts[key] = max(counts.get(key, 0), count)
        events = [DeviceEvent(*key, count) for key, count in counts.items()]
        return DeviceRecord(plain, events)

    # ---- tensors -----------------------------------------------------------------------------

    def tensors(self, name: str) -> Any:
        """Returns the content of `name`.pt, see `FirstStep`; {} if it was not written."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return {}
        return torch.load(path, weights_only=True)

    def forward_passes(self) -> list[tuple[int, ForwardPass]]:
        """Returns (rank, forward pass) of each micro-batch of the first step."""
        passes: list[tuple[int, ForwardPass]] = []
        for rank in range(self.size):
            for forward_pass in self.tensors(f"forward{rank}"):
                passes.append((rank, forward_pass))
        return passes

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Unsharded weights before the first step."""
        return self.tensors("start")

    @cached_property
    def end(self) -> dict[str, Tensor]:
        """Unsharded weights after the last step."""
        return self.tensors("end")

    @cached_property
    def places(self) -> dict[str, str]:
        """{module: class and file:line}."""
        return self.tensors("places")

    def owner(self, tensor: str) -> str:
        """Returns class and file:line of the module that owns a parameter or buffer."""
        return self.places.get(tensor.split(" ")[0].rpartition(".")[0], "?")
