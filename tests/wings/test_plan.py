"""`plan`: predicted against measured bytes, what it says of known models, and bad input."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from trainer_dev.module import LanguageModule

from dist_template import OptimConfig
from dist_template.cli.limits.machine import Machine as Described
from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.candidates import Candidate
from dist_template.parallel.estimates.facts import STATE
from dist_template.wings.plan.estimate import Machine, Planned
from dist_template.wings.plan.planner import Planner
from tests.support.library import mtp
from tests.support.memory import Allocated, Live, State
from tests.support.parity import MODELS
from tests.support.runs import Workers, refused, run
from tests.support.strategies import ARGS, flags_of, settings_of
from tests.support.tiers import tiers
from tests.support.wings import Traced

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
LLAMA: dict[str, Any] = WIDE | HEADS
ROUTED = {"moe_intermediate_size": 128, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS: dict[str, Any] = HEADS | ROUTED | {"model_type": "qwen3_moe", "hidden_size": 256}
EXPERTS |= {"num_hidden_layers": 4, "norm_topk_prob": True}
PREDICTING = yaml.safe_load(MODELS["mtp"])  # a block of its own width more for each of two tokens
PREDICTING |= {"hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 128}
KINDS = {"experts": EXPERTS, "predicting": PREDICTING}
LLAMA_8B = {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8}
LLAMA_8B |= {"vocab_size": 128256}
SEQ_LEN, ROWS, GB = 256, 4, 1e9
TRAINED = """ddp 32-true none, ddp bf16-mixed none, fsdp2 bf16-mixed none, fsdp2 32-true full,
    fsdp2 bf16-mixed none experts, fsdp2_ep bf16-mixed none experts, tp 32-true none,
    zero1 bf16-mixed none, zero2 32-true none, zero3 bf16-mixed none, ddp 32-true selective,
    fsdp2_offload bf16-true full, ddp 32-true full experts, ddp 32-true none predicting,
    fsdp2 bf16-mixed full predicting, zero3 bf16-mixed none predicting, ddp 32-true none muon,
    fsdp2_ep bf16-mixed none experts muon"""
CASES = [" ".join(case.split()) for case in TRAINED.split(",")]
DAILY = [CASES[5], CASES[9]]
H100S = Machine(1, 2, 80 * GB, 6e14, 3e11, 4e10)
FLAGS = [f"--model.architecture={json.dumps(LLAMA | {'vocab_size': 257})}"]
FLAGS += ["--trainer.precision=bf16-mixed", "--trainer.accelerator=gpu"]


def of_modules(shape: Any) -> list[str]:
    return ["--model.mtp.weight=0.3"] * ("num_mtp_layers" in shape)


def planner(
    shape: Any, batch: int, seq_len: int, precision: str = "", on: str = "cuda", by: Any = "adamw"
) -> Planner:
    ahead = mtp.MtpConfig() if of_modules(shape) else None
    optim = OptimConfig(optimizer=by)
    full = {"vocab_size": 257} | shape
    module = LanguageModule(architecture=full, mtp=ahead, optim=optim)
    sizes = {"seq_len": seq_len, "global_batch_size": batch, "batch_sizes": (batch, batch)}
    data = SimpleNamespace(**sizes, cross_document_attention=False)
    return Planner(module, data, {}, Described(on, 1, 1, precision or "bf16-mixed"))


def estimate(made: Planner, name: str, ranks: int, rows: int, mode: str = "none") -> Planned:
    candidate = Candidate(name, "", {}, estimate_of(settings_of(name)))
    return made.option(candidate, replace(H100S, nodes=1, devices=ranks), rows, mode)


def train(folder: Path, ranks: int, shape: Any, batch: int, flags: Any, with_: Any) -> None:
    sizes = [f"--data.seq_len={SEQ_LEN}", f"--data.micro_batch_size={ROWS}"]
    sizes += [f"--data.global_batch_size={batch}", f"--model.architecture={json.dumps(shape)}"]
    given = [*(flag for flag in flags if "architecture" not in flag), *sizes]
    given += [f"--trainer.devices={ranks}", "--trainer.max_steps=3"]
    given.append("--trainer.limit_val_batches=0")
    run("prepare", *given)
    Workers(ranks).run(["fit", *given], folder / "record", callbacks=with_).check()


def most(folder: Path, what: str) -> float:
    """Of the rank that needs most: ranks of expert parallelism get different numbers of tokens."""
    return max(json.loads(file.read_text()) for file in folder.glob(f"{what}[0-9].json"))


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, DAILY))
def test_predicted_bytes_are_those_of_a_training(flags: Any, tmp_path: Path, case: str) -> None:
    """State within 5 %; within 15 % what the last of two micro-batches allocates."""
    strategy, precision, mode, *more = case.split()
    architecture = next((KINDS[each] for each in more if each in KINDS), LLAMA)
    by = "muon" if "muon" in more else "adamw"
    batch = 2 * ROWS if strategy == "tp" else 4 * ROWS
    own = [f"--model.blocks.checkpointing={mode}", f"--trainer.precision={precision}"]
    own += [f"--model.optim.optimizer={by}", *of_modules(architecture)]
    with_ = [State(tmp_path), Allocated(tmp_path)]
    train(tmp_path, 2, architecture, batch, [*flags, *flags_of(strategy), *own], with_)
    made = planner(architecture, batch, SEQ_LEN, precision, "cpu", by)
    planned = estimate(made, strategy, 2, ROWS, mode)
    parts, memory = planned.parts(), planned.sharding.memory(planned.facts)
    moving = parts["activations"] + max(parts["logits"], parts["backward"])
    moving += memory.get("gathered weights", 0)
    if strategy == "zero2":  # others keep their buffers from the first step on
        moving += memory["communication buffers"]
    measured, allocated = most(tmp_path, "state"), most(tmp_path, "allocated")
    predicted = sum(parts[name] for name in STATE)
    print(f"{case}: state {predicted / measured:.3f}", end=", ")
    print(f"activations {moving / allocated:.3f} of the measured {allocated / 2**20:.0f} MiB")
    assert predicted == pytest.approx(measured, rel=0.05)
    assert moving == pytest.approx(allocated, rel=0.15)


STAGES = [(2, "1F1B", LLAMA), (4, "1F1B", LLAMA), (2, "Interleaved1F1B", LLAMA),
          (2, "1F1B", PREDICTING), (4, "1F1B", PREDICTING)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "schedule", "shape"), tiers(STAGES, daily=[]))
def test_predicted_bytes_of_stages(
    flags: Any, tmp_path: Path, stages: int, schedule: str, shape: Any
) -> None:
    """What a step of 8 micro-batches allocates, gradients among it, within 15 %."""
    batch, architecture = 8 * ROWS, shape | {"num_hidden_layers": 8}
    own = [*flags, *flags_of("pp"), f"{ARGS}.pp_size={stages}", f"{ARGS}.pp_schedule={schedule}"]
    own += ["--trainer.precision=32-true", *of_modules(shape)]
    train(tmp_path, stages, architecture, batch, own, [Live(tmp_path)])
    measured = most(tmp_path, "live")
    sizes = {"pp_size": stages, "pp_schedule": schedule}
    given = {"class_path": "MeshStrategy", "init_args": settings_of("pp")["init_args"] | sizes}
    made = planner(architecture, batch, SEQ_LEN, "32-true", "cpu")
    machine = Machine(1, stages, 1, 1, 1, 1)
    parts = made.option(Candidate("", "pp", {}, estimate_of(given)), machine, ROWS, "none").parts()
    predicted = parts["activations"] + max(parts["logits"], parts["backward"]) + parts["gradients"]
    print(f"pp {stages} {schedule}: {predicted / measured:.3f} of {measured / 2**20:.0f} MiB")
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_the_best_option_fits_and_known_models_have_known_figures() -> None:
    made = planner(LLAMA_8B, 256, 4096)
    best, *_ = options = made.options(replace(H100S, devices=8))
    fits = [option.fits for option in options]
    assert fits == sorted(fits, reverse=True)
    mfu = 256 * 4096 / 8 * made.traced.flops_per_token / best.seconds() / 1e15
    assert best.total() <= 80 * GB and 0.3 < mfu <= 0.6
    modes = [made.option(best.candidate, best.machine, 1, mode) for mode in ("full", "none")]
    full, none = (option.parts()["activations"] for option in modes)
    # a block's input in bf16 of 32 blocks, against about 34 bytes x tokens x width x blocks
    assert full == pytest.approx(2 * 4096 * 4096 * 32, rel=0.3)
    assert none == pytest.approx(34 * 4096 * 4096 * 32 * 1.5, rel=0.25)


def test_the_flags_of_every_candidate_describe_its_arguments() -> None:
    for candidate in Candidate.of(2, 8):
        file = settings_of(candidate.file)
        given = {**(file["init_args"] if isinstance(file, dict) else {}), **candidate.options}
        for key, value in candidate.sharding.arguments.items():
            assert given[key] in (value, "auto"), (candidate.name, key)


@pytest.mark.slow
def test_a_strategy_whose_trace_fails_does_not_end_the_plan(monkeypatch: Any, capsys: Any) -> None:
    short = Traced._short

    def failing(*given: Any) -> Any:
        if given[-1] > 1:
            raise RuntimeError("shapes do not match. Details")
        return short(*given)

    monkeypatch.setattr(Traced, "_short", failing)
    assert run("plan", *FLAGS, *(given := ["--devices=2", "--memory=80GB"])) == 0
    printed = capsys.readouterr().out
    assert "fails: tp 2 with checkpointing none (shapes do not match)" in printed
    assert "1 x 2    ddp" in printed and "\nCheckpoints: best every " in printed
    monkeypatch.setattr(Traced, "_short", lambda *_: 1 / 0)
    assert run("plan", *FLAGS, *given) == 2
    error = capsys.readouterr().err
    assert error.endswith("error: plan cannot trace this model: division by zero\n")


BAD = {
    "--devices=8 --memory=80": "cluster.device_memory is '80'; give a number with a unit",
    "--devices=8": "plan needs the memory of a device: give it, as --memory 80GB",
    "--trainer.devices=auto --memory=80GB": "trainer.devices is auto: give a node's devices",
    "--devices=7 --memory=80GB": "data.global_batch_size 16 is not a multiple of 1 x 7 devices",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_one_sentence(given: str, capfd: Any) -> None:
    assert refused("plan", [*FLAGS, *given.split()], capfd).startswith(f"error: {BAD[given]}")
