"""`plan`: predicted against measured bytes, known models, the library's examples, bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from trainer_dev.module import LanguageModule

from dist_template import OptimConfig
from dist_template.cli.limits.machine import Machine as Described
from dist_template.parallel.spec import spec_of
from dist_template.parallel.spec.candidates import Candidate
from dist_template.parallel.spec.facts import STATE
from dist_template.text.objectives.mtp import MtpConfig
from dist_template.wings.plan.estimate import Machine, Planned
from dist_template.wings.plan.planner import Planner
from dist_template.wings.plan.trace import Traced
from dist_template.wings.rehearse.command import main as rehearse_main
from tests import ROOT
from tests.support import pairs
from tests.support.memory import Allocated, Live, State
from tests.support.parity import MODELS
from tests.support.runs import CONFIGS, OURS, SHIPPED, Workers, refused, run
from tests.support.strategies import ARGS, flags_of, settings_of
from tests.support.tiers import tiers

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
    ahead = MtpConfig() if of_modules(shape) else None
    optim = OptimConfig(optimizer=by)
    full = {"vocab_size": 257} | shape
    module = LanguageModule(architecture=full, mtp=ahead, optim=optim)
    sizes = {"seq_len": seq_len, "global_batch_size": batch, "batch_sizes": (batch, batch)}
    data = SimpleNamespace(**sizes, cross_document_attention=False)
    return Planner(module, data, {}, Described(on, 1, 1, precision or "bf16-mixed"))


def estimate(made: Planner, name: str, ranks: int, rows: int, mode: str = "none") -> Planned:
    candidate = Candidate(name, "", {}, spec_of(settings_of(name)))
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
    parts, memory = planned.parts(), planned.spec.memory(planned.facts)
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero3"], daily=["fsdp2"]))
def test_a_reference_and_its_logits_are_planned(tmp_path: Path, strategy: str) -> None:
    """Preferences keep a frozen copy of the model, and the logits of all tokens."""
    records = pairs.LENGTHS * 20
    given = [
        *pairs.flags(tmp_path, records),
        f"--run.root={tmp_path / 'runs'}",
        *flags_of(strategy),
    ]
    given += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--run.report=false"]
    given += ["--trainer.precision=32-true", "--model.loss_chunk=64"]
    train(tmp_path, 2, LLAMA, 4 * ROWS, given, [State(tmp_path), Allocated(tmp_path)])
    made = planner(LLAMA, 4 * ROWS, SEQ_LEN, "32-true", "cpu")
    made = Planner(made._module, with_pairs(made.data), {}, Described("cpu", 1, 1, "32-true"))
    planned = estimate(made, strategy, 2, ROWS)
    parts, memory = planned.parts(), planned.spec.memory(planned.facts)
    moving = parts["activations"] + max(parts["logits"], parts["backward"])
    moving += memory.get("gathered weights", 0)
    predicted = sum(parts[name] for name in STATE)
    assert predicted == pytest.approx(most(tmp_path, "state"), rel=0.05)
    assert moving == pytest.approx(most(tmp_path, "allocated"), rel=0.15)


def with_pairs(data: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(data), source=SimpleNamespace(pairs=True))


STAGES = [
    (2, "1F1B", LLAMA),
    (4, "1F1B", LLAMA),
    (2, "Interleaved1F1B", LLAMA),
    (4, "GPipe", LLAMA),
    (2, "InterleavedZeroBubble", LLAMA),
    (2, "ZBVZeroBubble", LLAMA),
    (4, "ZBVZeroBubble", LLAMA),
    (4, "DualPipeV", LLAMA),
    (2, "1F1B", PREDICTING),
    (4, "1F1B", PREDICTING),
    (2, "DualPipeV", PREDICTING),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "schedule", "shape"), tiers(STAGES, daily=[]))
def test_predicted_bytes_of_stages_are_those_of_a_step(
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
    parts = made.option(Candidate("", "pp", {}, spec_of(given)), machine, ROWS, "none").parts()
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
        for key, value in candidate.spec.arguments.items():
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
    "--devices=8 --memory=80GB --model.distillation.teacher=/nowhere": (
        "model.distillation.teacher '/nowhere' cannot be loaded"
    ),
    "--devices=7 --memory=80GB": "data.global_batch_size 16 is not a multiple of 1 x 7 devices",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_one_sentence(given: str, capfd: Any) -> None:
    assert refused("plan", [*FLAGS, *given.split()], capfd).startswith(f"error: {BAD[given]}")


QWEN: dict[str, Any] = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
QWEN |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SMALL = QWEN | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
SMALL |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
SMALL |= {"tie_word_embeddings": True}
LLAMA_3: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336}
LLAMA_3 |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_3 |= {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
LLAMA_3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
LLAMA_70B = LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28_672}
LLAMA_70B |= {"num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_2: dict[str, Any] = {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13_824}
LLAMA_2 |= {"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}
LLAMA_2 |= {"vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
QWEN_30B = QWEN | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144}
QWEN_30B |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
QWEN_30B |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN_30B |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.001}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # weights: parameters, and config.json's sizes
    "Qwen/Qwen3-0.6B": (596_049_920, SMALL),
    "meta-llama/Llama-2-13b-chat-hf": (13_015_864_320, LLAMA_2),
    "meta-llama/Llama-3.1-70B-Instruct": (70_553_706_496, LLAMA_70B),
    "meta-llama/Llama-3.1-8B-Instruct": (8_030_261_248, LLAMA_3),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, QWEN_30B),
}
EXAMPLES = sorted(path.stem for path in (SHIPPED / "example").glob("*.yaml"))
EXAMPLE_ROW = re.compile(
    r"^\| `example/(\w+)` \| (.+) \| (\d+) x (\d+) x (\S+) \| ([\d.]+) \|", re.M
)


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((SHIPPED / "example" / f"{name}.yaml").read_text("utf-8"))


def typed(name: str, folder: Path) -> list[str]:
    """As typed, but for the weights: a folder with the published configuration alone."""
    _, sizes = PUBLISHED[content(name)["model"]["pretrained"]]
    (folder / "config.json").write_text(json.dumps(sizes | {"eos_token_id": 0}), "utf-8")
    files = [f"--config={CONFIGS}/finetune.yaml", f"--config=example/{name}"]
    return [*files, f"--model.pretrained={folder}"]


def test_every_example_has_a_row_and_names_its_tokenizer_and_machine() -> None:
    rows = EXAMPLE_ROW.findall((ROOT / "docs" / "plan.md").read_text("utf-8"))
    assert sorted(row[0] for row in rows) == EXAMPLES and len(EXAMPLES) == 7
    for name in EXAMPLES:
        given = content(name)
        trainer, site = given["trainer"], given["cluster"]
        assert given["data"]["tokenizer"]["init_args"]["path"] == given["model"]["pretrained"]
        assert trainer["devices"] == site["devices_per_node"]
        assert trainer["num_nodes"] == site.get("nodes", 1)
        assert f"--config example/{name} " in (SHIPPED / "example" / f"{name}.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_as_planned(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The verb `plan`, for the file's own strategy, micro-batch and checkpointing alone."""
    given, found = content(name), list[tuple[Planner, Planned]]()

    def own(planner: Planner, machine: Any) -> list[Planned]:
        strategy = spec_of(given["trainer"].get("strategy"))
        rows, mode = given["data"]["micro_batch_size"], given["model"]["blocks"]["checkpointing"]
        option = planner.option(Candidate("its own", "", {}, strategy), machine, rows, mode)
        found.append((planner, option))
        return [option]

    monkeypatch.setattr(Planner, "options", own)
    assert run("plan", *typed(name, tmp_path)) == 0
    printed = capsys.readouterr().out
    ((planner, option),) = found
    parameters, _ = PUBLISHED[given["model"]["pretrained"]]
    size, adapters = planner.traced.size, "adapter" in given["model"]
    assert size.total - adapters * size.trainable == parameters
    assert option.is_allowed and option.fits and "Nothing fits" not in printed
    assert option.machine.memory == GB * int(given["cluster"]["device_memory"].removesuffix("GB"))
    rows = {
        row[0]: row[1:] for row in EXAMPLE_ROW.findall((ROOT / "docs/plan.md").read_text("utf-8"))
    }
    weights, nodes, devices, memory, total = rows[name]
    assert weights.startswith(given["model"]["pretrained"].split("/")[1].removesuffix("-Instruct"))
    machine = (option.machine.nodes, option.machine.devices, given["cluster"]["device_memory"])
    assert (int(nodes), int(devices), memory) == machine
    print(f"{name}: {option.total() / GB:.1f} GB of {memory}")
    assert total == f"{option.total() / GB:.1f}"


def verdicts(name: str, folder: Path, only: str) -> list[str]:
    """Of the checks of a rehearsal that passed as a whole."""
    flags = [*typed(name, folder), f"--only={only}", f"--output={folder / 'out'}"]
    rehearse_main(["rehearse", *flags], OURS)
    report = json.loads((folder / "out" / "rehearsal.json").read_text("utf-8"))
    assert report["ok"]
    return [check["verdict"] for check in report["checks"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_fit_would_accept_an_example_on_its_machine(name: str, tmp_path: Path) -> None:
    """All checks before a start, at full size."""
    assert verdicts(name, tmp_path, "the real sizes fit together") == ["pass"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_reduced_example_trains_like_one_process(name: str, tmp_path: Path) -> None:
    assert {*verdicts(name, tmp_path, "loss curve")} == {"pass"}
