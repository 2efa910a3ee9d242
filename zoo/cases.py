"""Which causal language models of transformers train under which strategies to the numbers of one
process.

Each type that transformers registers gets a small odd configuration, twice where it has optional
switches (models.py), and trains six steps on packed documents, with masked labels, accumulation and
clipping, on one process and under each arm; arms named lora_* train adapters of all linear layers
and experts, and are compared with one process that does so. A case ends as:
    right    losses within 1e-6 of one process's, norms and evaluation within 1e-5, replicas
    bit-identical refused  in a sentence, before the start fault    with the first difference, named
    by rehearse's root cause, or the error
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import yaml

from dist_template.model import proof
from dist_template.project import Project
from dist_template.wings.rehearse.compare import relative_difference, replicas, trace
from dist_template.wings.rehearse.first_step import FirstStep
from dist_template.wings.rehearse.interventions import LeakageTest, RaggedLabels
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.rehearse.shrink_config import write_texts
from dist_template.wings.rehearse.workers import run_ranks

from . import ROOT
from .arms import ARMS, OF_A_SWITCH, OF_LORA, ONE, reference_of
from .models import SEQ_LEN, configured, parts, plans, variants
from .table import without_table

PROJECT = Project("trainer_dev")
LOSS, NORM = 1e-6, 1e-5  # relative
STEPS, CLIP = 6, 0.3
SINGLE = ", single rows"
UNUSED = "ddp_find_unused_parameters_true"  # DDP's form for models that leave parameters out


class Zoo:
    """Runs cases in `folder` and keeps their verdicts in a file of lines there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "verdicts.jsonl"
        write_texts(folder / "texts", 16_000)
        run_ranks(
            1, PROJECT, ["prepare", *self.flags()], folder / "prepare", timeout_s=None
        ).check()
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        found = [json.loads(line) for line in lines]
        now = [each for each in found if each["versions"] == proof.versions()]
        self.known = {(each["type"], each["variant"], each["arm"]): each for each in now}

    def put(self, kind: str, variant: str, arm: str, verdict: str, **more: Any) -> None:
        case = {"type": kind, "variant": variant, "arm": arm, "verdict": verdict, **more}
        case["versions"] = proof.versions()
        self.known[kind, variant, arm] = case
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(case) + "\n")
        print(
            f"{kind:<24} {variant:<9} {arm:<16} {verdict} {more.get('why', '')[:160]}", flush=True
        )

    def run_type(
        self, kind: str, arms: list[str], among: Container[str] = ("default", "switched")
    ) -> None:
        """Runs the cases of a type, and of its variants in `among`, that have no verdict yet."""
        try:
            found = variants(kind)
        except Exception as error:  # of any class: a row
            self.put(
                kind,
                "default",
                "one",
                "not run",
                why=parts(kind) or f"{type(error).__name__}: {error}"[:300],
            )
            return
        for variant, architecture in found.items():
            if variant not in among:
                continue
            chosen = [arm for arm in arms if variant == "default" or arm in OF_A_SWITCH]
            chosen = [arm for arm in chosen if {*ARMS[arm].plan} <= plans(architecture)]
            todo = [arm for arm in chosen if (kind, variant, arm) not in self.known]
            if not todo:
                continue
            one = adapted = self.train(kind, variant, "one", architecture)
            switches = proof.switches_of(configured(architecture))
            if not one.ok:
                self.put(kind, variant, "one", "not run", why=one.error, switches=switches)
                continue
            if (kind, variant, "one") not in self.known:
                seen = {
                    what: where for what, where in (one.tensors("leakage") or {}).items() if where
                }
                verdict = "leaks" if seen else "right"
                self.put(
                    kind,
                    variant,
                    "one",
                    verdict,
                    why=str(seen or ""),
                    leaks=seen,
                    switches=switches,
                )
            if OF_LORA.keys() & {*todo}:
                adapted = self.train(kind, variant, "lora_one", architecture)
            for arm in todo:
                started = time.perf_counter()
                reference = adapted if arm in OF_LORA else one
                verdict, why = self.judge(kind, variant, arm, architecture, reference)
                took = round(time.perf_counter() - started, 1)
                self.put(kind, variant, arm, verdict, why=why, switches=switches, seconds=took)
            shutil.rmtree(self.folder / "runs" / kind, ignore_errors=True)

    def judge(
        self, kind: str, variant: str, arm: str, architecture: dict[str, Any], one: RunRecord
    ) -> tuple[str, str]:
        """Returns the verdict of one case, and its reason."""
        if not one.ok:  # with adapters; without them, `run_type` ends
            return (
                "refused" if one.refusal else "fault"
            ), f"on one process: {one.refusal or one.error}"
        reference = reference_of(arm)
        many = self.train(kind, variant, arm, architecture)
        if UNUSED in many.error:  # the sentence that ends the first step names it
            many = self.train(
                kind, variant, arm, architecture, more=[f"--trainer.strategy={UNUSED}"]
            )
        if many.refusal and not many.ranks[0]:
            return "refused", many.refusal
        if not many.ok:
            return "fault", many.error
        if not (difference := differs(one, many)):
            return "right", ""
        # Where a model amplifies rounding, one process with other micro-batches differs as well.
        other = self.train(kind, variant, reference + SINGLE, architecture)
        if other.ok and not differs(one, many, differences(one, other)):
            return "right", ""
        traced = [
            self.train(kind, variant, each, architecture, is_traced=True)
            for each in (reference, arm)
        ]
        cause = trace(*traced) if all(each.ok for each in traced) else "the traced training failed"
        return "fault", f"{difference}: {cause}"

    def train(
        self,
        kind: str,
        variant: str,
        arm: str,
        architecture: dict[str, Any],
        is_traced: bool = False,
        more: Sequence[str] = (),
    ) -> RunRecord:
        """Trains `STEPS` steps; a folder of its own for each."""
        chosen = (ARMS | ONE)[arm.removesuffix(SINGLE)]
        # a pipeline needs four micro-batches
        rows = 8 // chosen.batches // (4 if chosen.file.startswith("pp") else 2)
        rows = 1 if arm.endswith(SINGLE) else rows
        name = hashlib.sha256(f"{kind} {variant} {arm} {is_traced}".encode()).hexdigest()[:12]
        folder = self.folder / "runs" / kind / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = (
            [f"--config={ROOT}/build/dev/configs/strategy/{chosen.file}.yaml"]
            if chosen.file
            else []
        )
        config = folder / "architecture.yaml"
        config.write_text(yaml.safe_dump({"model": {"architecture": architecture}}), "utf-8")
        argv = [
            "fit",
            f"--config={config}",
            *self.flags(),
            *flags,
            *chosen.flags,
            *more,
            f"--run.root={folder}/runs",
        ]
        argv += [f"--trainer.devices={chosen.ranks}", f"--data.micro_batch_size={max(1, rows)}"]
        recorders = [FirstStep(folder, True)] if is_traced else []
        callbacks = [RaggedLabels(), *recorders, *([LeakageTest(folder)] if arm == "one" else [])]
        options = {"callbacks": callbacks, "prelude": without_table, "run_id": name}
        return run_ranks(chosen.ranks, PROJECT, argv, folder, **options)

    def flags(self) -> list[str]:
        return [
            "--run.report=false", "--data.source=TextFiles",
            f"--data.source.paths=[{self.folder}/texts/*.txt]",
            "--data.source.separator=\n", "--data.tokenizer=Bytes",
            f"--data.cache_dir={self.folder}/cache",
            f"--data.seq_len={SEQ_LEN}", "--data.global_batch_size=8",
            "--data.validation_share=0.02", "--data.test_share=0.02",
            "--model.optim.learning_rate=0.003",
            "--model.optim.warmup=2", "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}",
            "--trainer.log_every_n_steps=1", f"--trainer.val_check_interval={STEPS}",
            "--trainer.num_sanity_val_steps=0", "--trainer.logger=false",
            f"--trainer.gradient_clip_val={CLIP}",
            "--watchdog.timeout_s=0", "--trainer.enable_checkpointing=false",
            "--diagnosis.enabled=false",
            "--samples.folder=null",
        ]  # fmt: skip


def differs(one: RunRecord, many: RunRecord, rounding: dict[str, float] | None = None) -> str:
    """Describes how a training differs from one process; "" if nothing does.

    Ten times the differences that another order of sums alone makes, `rounding`, are allowed.
    """
    for name, most in differences(one, many).items():
        if most > max(LOSS if name == "loss" else NORM, 10 * (rounding or {}).get(name, 0.0)):
            return f"{name} differs by {most:.1e}"
    if found := replicas(many):
        return "replicas of {1} differ between ranks {2} and {3} after step {0}".format(*found)
    return ""


def differences(one: RunRecord, many: RunRecord) -> dict[str, float]:
    """Returns the largest relative differences of losses, norms and the evaluation."""
    found: dict[str, float] = {}
    for name in ("loss", "grad_norm"):
        found[name], each = relative_difference(getattr(one, name), getattr(many, name))
        if len(each) != STEPS:
            found[name] = float("inf")
    evals = [
        {step: metrics["eval/loss"] for step, metrics in run.eval().items()} for run in (one, many)
    ]
    found["evaluation"], _ = relative_difference(*evals)
    return found
