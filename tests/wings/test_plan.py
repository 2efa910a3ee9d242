"""`plan`: predicted against measured bytes, what it says of known models, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_dev.module import LanguageModule

from dist_template import Project
from dist_template.cli.limits.machine import Machine as Described
from dist_template.cli.main import command
from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.candidates import Candidate
from dist_template.parallel.estimates.facts import STATE
from dist_template.wings.plan.estimate import Machine, Planned
from dist_template.wings.plan.planner import Planner
from tests.support.classifier import CLASSIFIER, PLAIN
from tests.support.memory import Allocated, Live, State
from tests.support.runs import PACKAGE, Workers, run
from tests.support.strategies import ARGS, flags_of, settings_of
from tests.support.tiers import tiers
from tests.support.wings import Traced

GB = 1e9
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "vocab_size": 129280}
CASES = [  # strategy, architecture, precision, checkpointing
    ("ddp", LLAMA, "32-true", "none"),
    ("ddp", LLAMA, "bf16-mixed", "none"),
    ("fsdp2", LLAMA, "bf16-mixed", "none"),
    ("fsdp2", LLAMA, "32-true", "full"),
    ("fsdp2", EXPERTS, "bf16-mixed", "none"),
    ("fsdp2_ep", EXPERTS, "bf16-mixed", "none"),
    ("tp", LLAMA, "32-true", "none"),
    ("zero1", LLAMA, "bf16-mixed", "none"),
    ("zero2", LLAMA, "32-true", "none"),
    ("zero3", LLAMA, "bf16-mixed", "none"),
    ("ddp", LLAMA, "32-true", "selective"),
    ("fsdp2_offload", LLAMA, "bf16-true", "full"),
    ("ddp", EXPERTS, "32-true", "full"),
]
DAILY, SEQ_LEN, ROWS = [CASES[1], CASES[5], CASES[9]], 256, 4
H100S = Machine(1, 2, 80 * GB, 6e14, 3e11, 4e10)


def planner(
    architecture: dict[str, Any], batch: int, seq_len: int, precision: str, accelerator: str
) -> Planner:
    module = LanguageModule(architecture={"vocab_size": 257} | architecture)
    data = SimpleNamespace(seq_len=seq_len, global_batch_size=batch, cross_document_attention=False)
    return Planner(module, data, {}, Described(accelerator, 1, 1, precision))


def estimate(
    made: Planner, name: str, ranks: int, rows: int, mode: str = "none", nodes: int = 1
) -> Planned:
    candidate = Candidate(name, "", {}, estimate_of(settings_of(name)))
    return made.option(candidate, replace(H100S, nodes=nodes, devices=ranks // nodes), rows, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "architecture", "precision", "mode"), tiers(CASES, DAILY))
def test_predicted_bytes_are_those_of_a_training(
    flags: list[str],
    tmp_path: Path,
    strategy: str,
    architecture: dict[str, Any],
    precision: str,
    mode: str,
) -> None:
    """State within 5 %; within 15 % what the last of two micro-batches allocates, by torch's profiler.

    Under expert parallelism ranks get different numbers of tokens: the larger one is compared.
    """
    batch = 2 * ROWS if strategy == "tp" else 4 * ROWS
    shape = ", ".join(f"{key}: {str(value).lower()}" for key, value in architecture.items())
    flags = [flag for flag in flags if "architecture" not in flag] + flags_of(strategy)
    flags += [
        f"--data.seq_len={SEQ_LEN}",
        f"--data.micro_batch_size={ROWS}",
        f"--data.global_batch_size={batch}",
    ]
    flags += [
        f"--model.architecture={{{shape}}}",
        f"--model.blocks.checkpointing={mode}",
        "--trainer.devices=2",
    ]
    flags += [
        "--trainer.max_steps=3",
        "--trainer.limit_val_batches=0",
        f"--trainer.precision={precision}",
    ]
    run("prepare", *flags)
    with Workers(2) as workers:
        workers.run(
            ["fit", *flags], tmp_path / "record", callbacks=[State(tmp_path), Allocated(tmp_path)]
        ).check()
    planned = estimate(
        planner(architecture, batch, SEQ_LEN, precision, "cpu"), strategy, 2, ROWS, mode
    )
    parts, memory = planned.parts(), planned.sharding.memory(planned.facts)
    moving = (
        parts["activations"]
        + max(parts["logits"], parts["backward"])
        + memory.get("gathered weights", 0)
    )
    if strategy == "zero2":  # others keep their buffers from the first step on
        moving += memory["communication buffers"]
    measured, allocated = (
        max(json.loads((tmp_path / f"{what}{rank}.json").read_text()) for rank in range(2))
        for what in ("state", "allocated")
    )
    predicted = sum(parts[name] for name in STATE)
    print(f"{strategy} {precision} {mode}: state {predicted / measured:.3f}, activations {moving / allocated:.3f}"
          f" of the measured {allocated / 2**20:.0f} MiB")  # fmt: skip
    assert predicted == pytest.approx(measured, rel=0.05)
    assert moving == pytest.approx(allocated, rel=0.15)


STAGES = [(2, "1F1B"), (4, "1F1B"), (2, "Interleaved1F1B")]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "schedule"), tiers(STAGES, [STAGES[0]]))
def test_predicted_activations_of_stages_are_those_of_a_training(
    flags: list[str], tmp_path: Path, stages: int, schedule: str
) -> None:
    """What a step of 8 micro-batches allocates on the rank that needs most, gradients among it, within 15 %."""
    batch, architecture = 8 * ROWS, LLAMA | {"num_hidden_layers": 8}
    flags = [flag for flag in flags if "architecture" not in flag] + flags_of("pp")
    flags += [
        f"{ARGS}.pp_size={stages}",
        f"{ARGS}.pp_schedule={schedule}",
        f"--trainer.devices={stages}",
    ]
    flags += [
        f"--data.seq_len={SEQ_LEN}",
        f"--data.micro_batch_size={ROWS}",
        f"--data.global_batch_size={batch}",
    ]
    flags += [f"--model.architecture={json.dumps(architecture)}", "--trainer.precision=32-true"]
    flags += ["--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    run("prepare", *flags)
    with Workers(stages) as workers:
        workers.run(["fit", *flags], tmp_path / "record", callbacks=[Live(tmp_path)]).check()
    measured = max(
        json.loads((tmp_path / f"live{rank}.json").read_text()) for rank in range(stages)
    )
    sizes = {"pp_size": stages, "pp_schedule": schedule}
    candidate = Candidate(
        "",
        "pp",
        {},
        estimate_of(
            {"class_path": "MeshStrategy", "init_args": settings_of("pp")["init_args"] | sizes}
        ),
    )
    made, machine = (
        planner(architecture, batch, SEQ_LEN, "32-true", "cpu"),
        Machine(1, stages, 1, 1, 1, 1),
    )
    parts = made.option(candidate, machine, ROWS, "none").parts()
    predicted = parts["activations"] + max(parts["logits"], parts["backward"]) + parts["gradients"]
    print(
        f"pp {stages} {schedule}: {predicted / measured:.3f} of the measured {measured / 2**20:.0f} MiB"
    )
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_the_best_schedule_of_a_pipeline_is_shown() -> None:
    """On devices that compute slowly; of 8 micro-batches."""
    made = planner(LLAMA | {"num_hidden_layers": 4}, 32, 64, "bf16-mixed", "cuda")
    slow = Machine(4, 2, 80 * GB, 1e10, 3e11, 4e10)
    shown = {option.candidate.name: option for option in made.options(slow)}
    assert {"pp 2 x fsdp2 4", "pp 2 x hsdp 2 x 2", "pp 4 x fsdp2 2"} <= set(shown)
    best = shown["pp 2 x fsdp2 4"].candidate
    assert best.flags.endswith(
        "--trainer.strategy.pp_size 2 --trainer.strategy.pp_schedule Interleaved1F1B"
    )
    assert "pp_schedule" not in shown["pp 4 x fsdp2 2"].candidate.options, (
        "4 blocks are too few for 8 stages"
    )
    every = {
        each.options.get("pp_schedule", "1F1B"): each
        for each in Candidate.of(4, 2)
        if each.name == best.name
    }
    planned = {name: made.option(each, slow, 1, "none") for name, each in every.items()}
    assert planned["1F1B"].seconds() > planned["Interleaved1F1B"].seconds()
    made._module.adapter = SimpleNamespace(quantize="nf4", rank=4)
    assert not [each.name for each in made._accepted(slow) if "pp" in each.name], "fit refuses it"


@pytest.mark.slow
def test_fsdp2_without_expert_parallelism_gathers_a_whole_layer_of_experts() -> None:
    """11.5 B parameters: 21 GiB each of two layers in bf16, 43 GiB of gradients in fp32."""
    made = planner(DEEPSEEK_V3, 4096, 4096, "bf16-mixed", "cuda")
    assert made.traced.size.total == 671_026_404_352
    machine, every = (
        replace(H100S, nodes=32, devices=8),
        {each.name: each for each in Candidate.of(32, 8)},
    )
    found = {
        name: made.option(every[name], machine, 1, "full")
        for name in ("fsdp2 256", "fsdp2 256 x ep 64")
    }
    alone, by_experts = found.values()
    assert alone.parts()["buffers"] > 2 * 21 * 2**30 and alone.parts()["backward"] > 43 * 2**30
    assert by_experts.fits and not alone.fits
    assert (
        by_experts.parts()["weights"]
        == alone.parts()["weights"]
        == 4 * made.traced.size.total / 256
    )


@pytest.mark.slow
def test_the_best_fits_and_its_flags_are_accepted_by_fit() -> None:
    made = planner(LLAMA_8B, 256, 4096, "bf16-mixed", "cuda")
    best, *_ = options = made.options(replace(H100S, devices=8))
    assert [option.fits for option in options] == sorted(
        (option.fits for option in options), reverse=True
    )
    mfu = 256 * 4096 / 8 * made.traced.flops_per_token / best.seconds() / 1e15
    assert best.total() <= 80 * GB and 0.3 < mfu <= 0.6
    parts = {
        mode: made.option(best.candidate, best.machine, 1, mode).parts()
        for mode in ("none", "full")
    }
    # a block's input in bf16 of 32 blocks, and little more, against about 34 bytes x tokens x width x blocks
    assert parts["full"]["activations"] == pytest.approx(2 * 4096 * 4096 * 32, rel=0.3)
    assert parts["none"]["activations"] == pytest.approx(34 * 4096 * 4096 * 32 * 1.5, rel=0.25)


def test_the_flags_of_every_candidate_describe_its_arguments() -> None:
    for candidate in Candidate.of(2, 8):
        file = settings_of(candidate.file)
        given = {**(file["init_args"] if isinstance(file, dict) else {}), **candidate.options}
        for key, value in (candidate.sharding.arguments).items():
            assert given[key] == value or given[key] == "auto", (candidate.name, key)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", tiers(["qwen2", "starcoder2", "gpt_neox"], ["qwen2"]))
def test_column_parallel_biases_are_as_short_as_their_weights(model_type: str) -> None:
    fields = {
        key: size
        for key, size in LLAMA.items()
        if key != "num_key_value_heads" or model_type != "gpt_neox"
    }
    made = planner(fields | {"model_type": model_type}, 8, 64, "bf16-mixed", "cuda")
    assert "tp 2" in {option.candidate.name for option in made.options(H100S)} and made.failed == {}


@pytest.mark.slow
def test_a_strategy_whose_trace_fails_does_not_end_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = Traced._short

    def failing(*given: Any) -> Any:
        if given[-1] > 1:
            raise RuntimeError("shapes do not match. Details")
        return short(*given)

    monkeypatch.setattr(Traced, "_short", failing)
    assert run("plan", *FLAGS, *(given := ["--devices=2", "--memory=80GB"])) == 0
    printed = capsys.readouterr().out
    assert (
        "fails: tp 2 with checkpointing none (shapes do not match)" in printed
        and "1 x 2    ddp" in printed
    )
    monkeypatch.setattr(Traced, "_short", lambda *_: 1 / 0)
    assert run("plan", *FLAGS, *given) == 2
    assert capsys.readouterr().err.endswith(
        "error: plan cannot trace this model: division by zero\n"
    )


@pytest.mark.parametrize(("share", "fits"), [(0.96, False), (0.94, True)])
def test_a_twentieth_of_the_memory_is_left(share: float, fits: bool) -> None:
    one = estimate(
        planner(LLAMA | {"num_hidden_layers": 2}, 8, 64, "bf16-mixed", "cuda"), "ddp", 2, 1
    )
    one.machine = replace(H100S, memory=one.total() / share)
    assert one.fits is fits


@pytest.mark.slow
def test_the_simplest_of_equally_fast_strategies_comes_first() -> None:
    made = planner(LLAMA | {"num_hidden_layers": 2}, 8, 64, "bf16-mixed", "cuda")
    slow = replace(H100S, flops=1e10)  # computation hides what is sent
    names = [option.candidate.name for option in made.options(slow)]
    assert names[0] == "ddp" and names.index("fsdp2 2") < min(
        map(names.index, ("zero1", "zero2", "zero3"))
    )
    alone = {option.candidate.name for option in made.options(replace(slow, devices=1))}
    assert "one device" in alone and not {"zero1", "zero2", "zero3"} & alone


FLAGS = [f"--model.architecture={json.dumps(LLAMA | {'vocab_size': 257})}", "--trainer.precision=bf16-mixed",
         "--trainer.accelerator=gpu"]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--devices=8", "--memory=80"], "cluster.device_memory is '80'; give a number with a unit, as 80GB or 80GiB"),
        (["--devices=8"], "plan needs the memory of a device: give it, as --memory 80GB"),
        (["--devices=eight", "--memory=80GB"],
         "argument --devices: 'eight' is not allowed, give a whole number from 1 to 100,000;"
         f" `python -m {PACKAGE} plan --help` explains every flag"),
        (["--trainer.devices=auto", "--memory=80GB"], "trainer.devices is auto: give a node's devices, as --devices 8"),
        (["--devices=7", "--memory=80GB"],
         "data.global_batch_size 16 is not a multiple of 1 x 7 devices: edit it"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *FLAGS, *given) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {sentence}"


@pytest.mark.parametrize("project", [CLASSIFIER, PLAIN], ids=["TrainingModule", "plain"])
def test_another_kind_of_model_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command(["plan", "--devices=2", "--memory=1GB", "--trainer.accelerator=cpu"], project) == 2
    )
    error = capsys.readouterr().err
    assert (
        error.startswith("error: plan traces language models of transformers, and ")
        and error.count("\n") == 1
    )


@pytest.mark.slow
def test_a_cluster_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--cluster.nodes=1", "--cluster.device_memory=24GB", "--devices=4", "--tflops=75"]
    assert run("plan", *FLAGS, *given) == 0
    printed = capsys.readouterr().out
    assert {*re.findall(r"^1 x (\d) ", printed, re.MULTILINE)} == {"4"}
    assert "Not calibrated on a GPU" in printed and "--config configs/strategy/" in printed
