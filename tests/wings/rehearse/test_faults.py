"""`rehearse` fails on planted faults, names them in its first failure, accuses no sound module.

Trainings that a fault does not affect run once, in the unmodified project."""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template.parallel.spec import spec_of
from dist_template.strategies import MeshStrategy
from dist_template.wings.rehearse import command, shrink_model
from dist_template.wings.rehearse.checks import CHECKS, Check, run_checks
from dist_template.wings.rehearse.command import main
from dist_template.wings.rehearse.compare import gradients, relative_difference, trace
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.rehearse.report import Result
from dist_template.wings.rehearse.runs import RunFailed, Runs
from dist_template.wings.rehearse.shrink_config import shrink
from tests.support import faults as f
from tests.support.faults import after_configure_model
from tests.support.runs import CONFIGS, OURS, SMALL_LLAMA
from tests.support.strategies import flags_of
from tests.support.tiers import NIGHTLY, tiers

MOE = "{model_type: deepseek_v3, num_hidden_layers: 2, first_k_dense_replace: 1,"
MOE += " n_group: 1, topk_group: 1}"
MORE = {  # checks that need trainings of their own
    "accumulation = one big batch": "big",
    "kill and resume = uninterrupted": "resumed",
    "checkpoint -> exported model": "never",
}
HANG_S = 10.0  # without progress, for the fault that hangs; the others have a minute


@dataclass(frozen=True)
class Plant:
    """A fault, and what the first failing check must say.

    Args:
        names: Parts of the sentence: what is planted, as a module, a parameter or file:line.
        sound: The trainings that the fault does not change.
        processes: None: what the strategy needs.
        more: One of `MORE`'s values: also run that check. For resumed, run no other.
    """

    fault: FunctionType
    names: tuple[str, ...]
    sound: tuple[str, ...] = ("one",)
    strategy: str = "ddp"
    model: str = SMALL_LLAMA
    processes: int | None = None
    more: str = ""

    @property
    def checks(self) -> list[Check]:
        always = [check for check in CHECKS if check.name not in MORE]
        more = [check for check in CHECKS if MORE.get(check.name) == self.more]
        return more if self.more == "resumed" else always + more


RESUMED: dict[str, Any] = {"sound": (), "processes": 1, "more": "resumed"}
LOADED: dict[str, Any] = RESUMED | {"sound": ("strategy", "uninterrupted", "killed")}
PP: dict[str, Any] = {"strategy": "pp", "processes": 2}
BIG: dict[str, Any] = {"sound": (), "more": "big"}
DROPPED = SMALL_LLAMA[:-1] + ", attention_dropout: 0.1}"
TIED = SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"
FAULTS, LAYERS = "faults.py:", "model.model.layers"
NOT_ALONE = (f"the forward pass of rank 1 differs first in the output of {LAYERS}.1",)
HUNG = ("rank 1 is stalled: step 2, micro-batch 1", FAULTS, "rank 0 is waiting for it")
MEAN = (f"{LAYERS}.0.input_layernorm.running_mean", "all-reduce")
EVALUATION = ("eval/loss", "add up", "validation_step", FAULTS)
DAILY = [  # a fault of each check, and a pipeline's
    Plant(f.gradients_divided_before_the_step, ("on_before_optimizer_step", FAULTS)),
    Plant(f.counter_in_python, ("no checkpoint holds num_calls",), **RESUMED),
    Plant(f.loss_divided_by_ranks, ("0.5 times as large", "training_step", FAULTS)),
    Plant(f.repeating_sampler, ("step 1 lacks 4 of the 8 samples", "GlobalOrder")),
    Plant(f.documents_leak, ("layers.0.self_attn", "forward", FAULTS), ()),
    Plant(f.mlp_of_rank, ("rank 1", f"{LAYERS}.1.mlp.act_fn")),
    Plant(f.layer_detached, ("layers.0.mlp.gate_proj.weight gets no gradient",), ()),
    Plant(f.layer_outside_of_fsdp, ("layers.1.mlp", "gradient"), strategy="fsdp2"),
    Plant(f.running_mean_by_rank, MEAN, ()),
    Plant(f.tied_gradient_not_summed, ("1 of 20", "model.embed_tokens.weight"), **PP, model=TIED),
    Plant(f.evaluation_is_a_mean_of_means, EVALUATION, **BIG),
    Plant(f.rank_killed, ("rank 1: killed", "device 1 has fallen off the bus")),
    Plant(f.hang, HUNG),
    Plant(f.schedule_starts_anew, ("the learning rate of step", "schedule"), **LOADED),
    Plant(f.data_start_anew, ("step 3 lacks", "GlobalOrder"), **LOADED),
]
FURTHER = [
    Plant(f.counter_in_python, ("holds num_calls",), (), **PP, more="resumed"),
    Plant(f.error_on_one_rank, ("rank 1: ValueError: no such shard", FAULTS)),
    Plant(f.loss_per_rank, ("training_step", FAULTS), **BIG),
    Plant(f.future_leaks, ("the input of model", "LanguageModule", FAULTS), ()),
    Plant(f.gradients_reduced_twice, ("1 of 21", "layers.1.input_layernorm.weight"), strategy="tp"),
    Plant(f.mlp_of_rank, (f"{LAYERS}.1.mlp.down_proj",), strategy="tp"),
    Plant(f.expert_gradients_doubled, ("experts.gate_up_proj",), strategy="fsdp2_ep", model=MOE),
    Plant(f.clipping_by_rank, ("configure_gradient_clipping", FAULTS), (), "fsdp2"),
    Plant(f.unseeded_parameter, ("model.model.norm.weight",)),
    Plant(f.weight_shifted_by_rank, ("mlp.up_proj.weight", "something other than the optimizer")),
    Plant(f.block_reads_what_another_stage_has_filled, NOT_ALONE, (), **PP),
    Plant(f.loss_per_rank, ("training_step", FAULTS), **PP, **BIG),
    Plant(f.parameter_without_optimizer, ("embed_tokens.weight gets gradients", FAULTS), ()),
    Plant(f.random_state_not_saved, ("another random state", "dropout"), model=DROPPED, **LOADED),
    Plant(f.optimizer_forgets, ("inspect the optimizer's state",), **LOADED),
    Plant(f.running_mean_not_saved, ("running_mean", "persistent"), **RESUMED),
    Plant(f.average_in_a_callback, ("no checkpoint holds Average.shadow",), **RESUMED),
]


def marked(plants: list[Plant], *marks: Any) -> list[Any]:
    def name(plant: Plant) -> str:
        return "-".join([plant.fault.__name__, plant.strategy] + [plant.more] * bool(plant.more))

    return [pytest.param(plant, id=name(plant), marks=marks) for plant in plants]


class Rehearsals:
    """Small configurations by what was asked of them, and the sound project's trainings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: dict[Any, Runs] = {}
        self._count = 0

    def sound(self, strategy: str, model: str, processes: int | None) -> Runs:
        key = (strategy, model, processes)
        if key not in self._sound:
            flags = [f"--config={CONFIGS}/quickstart.yaml", *flags_of(strategy)]
            flags += [f"--model.architecture={model}", "--data.prompts=[]"]
            flags += [f"--processes={processes}"] if processes else []
            own, rest = command.rehearse_flags().parse_known_args(flags)
            folder = self.folder / f"sound{len(self._sound)}"
            _, _, runs = command.make_small(own, rest, folder, OURS)
            runs.prepare()
            self._sound[key] = runs
        return self._sound[key]

    def broken(self, plant: Plant) -> Runs:
        """The trainings with the fault, and of the sound project those that it does not touch."""
        sound = self.sound(plant.strategy, plant.model, plant.processes)
        known = {name: getattr(sound, name) for name in plant.sound}
        self._count += 1
        small = copy.deepcopy(sound.small)
        folder = self.folder / f"{plant.fault.__name__}{self._count}"
        small.config["run"]["root"] = str(folder / "runs")
        if "killed" in known:
            shutil.copytree(known["killed"].run.parent, folder / "runs" / "killed")
        if plant.fault is f.hang:
            small.config["watchdog"] |= {"timeout_s": HANG_S, "start_timeout_s": HANG_S}
        return Runs(small, folder, OURS, plant.fault, known=known)


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    return Rehearsals(tmp_path_factory.mktemp("rehearsals"))


@pytest.mark.parametrize("plant", marked(DAILY, pytest.mark.slow) + marked(FURTHER, *NIGHTLY))
def test_what_is_planted_is_named(plant: Plant, rehearsals: Rehearsals) -> None:
    results = run_checks(rehearsals.broken(plant), plant.checks)
    first: Result | None = next((each for each in results if each.verdict == "FAIL"), None)
    assert first, f"it passes {len(plant.checks)} checks"
    missing = [name for name in plant.names if name not in first.sentence]
    assert not missing, f"{first.check}: {first.got}: {first.sentence}"


@pytest.mark.slow
def test_a_step_that_draws_labels_is_not_blamed_for_its_loss(rehearsals: Rehearsals) -> None:
    plant = Plant(f.labels_drawn, (), ())
    results = [*run_checks(rehearsals.broken(plant), plant.checks)]
    assert [result.check for result in results if result.verdict == "FAIL"] == []
    limits = [result.sentence for result in results if result.verdict == "limit"]
    assert any("training_step" in each and "draws random numbers" in each for each in limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"), tiers([("zero3", SMALL_LLAMA), ("fsdp2_tp_ep", MOE)], daily=())
)
def test_no_sound_module_is_accused(strategy: str, model: str, rehearsals: Any) -> None:
    sound = rehearsals.sound(strategy, model, None)
    assert "outputs and gradients of the first step agree" in trace(sound.one, sound.strategy)


def rehearse(folder: Path, *flags: str, **options: Any) -> int:
    try:
        main(["rehearse", *flags, f"--output={folder / 'out'}"], OURS, **options)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def config(*names: str) -> list[str]:
    return [f"--config={name if '/' in name else f'{CONFIGS}/{name}.yaml'}" for name in names]


CASES = "ddp cp fsdp2_tp_ep hsdp pp pp_ep pp_fsdp2 zero2_offload zero3".split()
CASES += ["fsdp2_tp null", "zero3 null", "zero3 nf4"]  # with adapters


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, daily=["ddp"]))
def test_the_default_project_passes(case: str, tmp_path: Path, capsys: Any) -> None:
    strategy, *quantize = case.split()
    files, flags = ["pretrain"], [*flags_of(strategy), "--nodes=8", "--devices=8"]
    if quantize:
        files.append("model/llama")
        flags += ["--model.adapter.rank=16", "--model.adapter.dropout=0.05"]
        flags.append(f"--model.adapter.quantize={quantize[0]}")
    code = rehearse(tmp_path, *config(*files), *flags)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "resume = uninterrupted" in printed
    assert "largest difference to the trained model's logits" in printed
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["ok"] and found["checks"][0]["got"] == "64 ranks"
    assert case != "ddp" or [check["verdict"] for check in found["checks"]] == ["pass"] * 13


def right_edits() -> None:
    """Dropout, frozen layers, an unused head, buffers, an auxiliary loss, another optimizer."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> Any:
        model: Any = build(self, data)
        blocks = model.model.layers
        blocks[0].requires_grad_(False)
        blocks[1].drop = nn.Dropout(0.1)
        blocks[1].mlp.register_forward_hook(lambda module, args, output: blocks[1].drop(output))
        model.reward_head = nn.Linear(model.config.hidden_size, 1)
        return model

    def loss(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        counted = labels.flatten() != -100
        return cross_entropy + 1e-3 * logits.flatten(0, 1).logsumexp(-1).square() * counted

    def configure_optimizers(self: Any) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        L.LightningModule.optimizer_step(self, *args, **kwargs)
        self.average.lerp_(self.model.model.norm.weight.detach(), 0.1)

    def change(self: Any) -> None:
        self.register_buffer("average", torch.ones_like(self.model.model.norm.weight))
        self.register_buffer("scale", torch.ones(3), persistent=False)

    after_configure_model(change)()
    for method in (build_model, loss, configure_optimizers, optimizer_step):
        setattr(LanguageModule, method.__name__, method)


@pytest.mark.slow
def test_right_edits_pass(tmp_path: Path, capsys: Any) -> None:
    tied = SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"
    flags = [f"--model.architecture={tied}", "--data.prompts=[]"]
    flags.append("--trainer.strategy=ddp_find_unused_parameters_true")
    code = rehearse(tmp_path, *config("quickstart"), *flags, prelude=right_edits)
    assert code == 0 and "all checks hold" in capsys.readouterr().out


def test_sizes_that_do_not_divide_fail_without_a_training(tmp_path: Path, capsys: Any) -> None:
    heads = "{model_type: llama, hidden_size: 768, num_attention_heads: 12}"
    flags = [f"--model.architecture={heads}", "--trainer.strategy.tp_size=8", "--only=sizes"]
    assert rehearse(tmp_path, *config("pretrain", "strategy/tp"), *flags, "--devices=8") == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and "12" in printed and "tp_size" in printed
    assert not list((tmp_path / "out").glob("*/rank0.log"))


def test_after_a_training_has_failed_no_other_check_runs(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("reading shard 7\n", encoding="utf-8")
    ends = {0: "RuntimeError: Connection closed by peer", 1: "killed: exit code -9"}

    def compare(runs: Any) -> str:
        raise RunFailed("strategy", RunRecord(tmp_path, ends))

    both = [Check("loss curve", "1e-5", compare), Check("norms", "1e-5", compare)]
    (failed,) = run_checks(cast(Runs, None), both)
    assert failed.verdict == "FAIL"
    sentence = "rank 1: killed: exit code -9; the last line of its log: reading shard 7"
    assert sentence in failed.cause

    crash, where = "Fatal Python error: Segmentation fault", f'File "{__file__}", line 7 in read'
    log.write_text(f"{crash}\n\n  {where}\n  File ...", encoding="utf-8")
    assert f"{crash}, {where}" in RunRecord(tmp_path, ends).error


def test_noise_is_equal_and_larger_differences_are_named() -> None:
    def record(noise: float, large: float) -> Any:
        tensors = {"noise": torch.full((3,), noise), "large": torch.full((3,), large)}
        return SimpleNamespace(tensors=lambda _: tensors)

    assert gradients(record(1e-9, 1.0), record(-2e-9, 1.0)) == {}, "noise"
    different = gradients(record(1e-9, 1.0), record(1e-9, 1.001))
    assert different == {"large": "max |difference| 1.0e-03"}
    assert relative_difference({1: 2.0, 2: 2.0}, {1: 2.0, 2: 2.0})[0] == 0
    for other in ({1: 2.0, 2: 2.0}, {1: float("nan")}, {}):
        assert relative_difference({1: 2.0}, other)[0] == float("inf")


SINGLE: Any = {"num_attention_heads": 8, "num_key_value_heads": 1}
SECOND: Any = {"moe_layers": [*range(1, 48, 2)]}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "num_hidden_layers": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EVERY_SECOND = {"num_hidden_layers": 3, "moe_layers": [1, 2], "no_rope_layers": [1, 1, 0]}
ARCHITECTURES: list[Any] = [
    ("deepseek_v3", {}, ROUTED),
    ("mixtral", {}, {"num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("gemma3_text", {}, SLIDING),
    ("gpt2", {}, {"n_layer": 2, "n_embd": 32, "n_head": 2, "tie_word_embeddings": True}),
    ("llama4_text", SECOND, EVERY_SECOND),  # layers 0, 1 and 3
    ("llama", SINGLE, {"num_key_value_heads": 1}),  # tensor parallelism cannot divide it
]


@pytest.mark.parametrize(("model_type", "given", "kept"), ARCHITECTURES)
def test_a_small_model_has_the_structure(model_type: str, given: Any, kept: dict[str, Any]) -> None:
    small = shrink_model.shrink_architecture(AutoConfig.for_model(model_type, **given), seq_len=32)
    assert {name: small[name] for name in kept} == kept
    if not given:
        rebuilt = AutoConfig.for_model(**small)
        assert shrink_model.shrink_architecture(rebuilt, seq_len=32) == small, "as small as it gets"


NAMES = ("fsdp_size", "dp_replicate_size", "tp_size", "ep_size")
MESHES: list[Any] = [  # fsdp, replicas, tp, ep; pp: what it becomes, and its processes
    (("auto", 1, 8, 8), 1, ("auto", 1, 2, 2), 4),
    ((8, "auto", 1, 1), 1, (2, "auto", 1, 1), 4),
    ((8, 4, 2, 1), 1, (2, 1, 2, 1), 4),
    ((1, 1, 1, 1), 8, (1, 1, 1, 1), 2),
    ((8, 1, 2, 2), 4, (1, 1, 2, 2), 4),
    ((8, "auto", 8, 1), 2, (1, 1, 2, 1), 4),
]


@pytest.mark.parametrize(("sizes", "pp", "expected", "processes"), MESHES)
def test_a_mesh_shrinks_to_two_by_two(sizes: Any, pp: int, expected: Any, processes: int) -> None:
    given = dict(zip(NAMES, sizes, strict=True))
    small = spec_of(MeshStrategy(**given, pp_size=pp)).reduced()
    assert tuple(small.arguments[name] for name in NAMES) == expected
    assert small.arguments["pp_size"] == min(2, pp), "a pipeline stays one, of 2 ranks"
    dropped = [name for name in NAMES[:2] if small.arguments[name] == 1 != given[name]]
    assert len(small.notes) == len(dropped) and small.processes == processes


def test_data_and_checkpoints_shrink_and_nothing_given_is_touched(tmp_path: Path) -> None:
    saves = {"dirpath": "/scratch/pretrain", "every_n_steps": 1000, "keep": 2, "asynchronous": True}
    sizes = {"fsdp_size": 8, "tp_size": 8, "ep_size": 8}
    data = {"seq_len": 2048, "global_batch_size": 256, "micro_batch_size": 4}
    given: Any = {"run": {}, "model": {}, "data": data, "last_checkpoint": saves}
    given["trainer"] = {"strategy": {"class_path": "MeshStrategy", "init_args": sizes}}
    small = shrink(given, None, tmp_path)
    assert (small.processes, small.data_parallel) == (4, 2)
    assert small.config["data"]["global_batch_size"] == 8  # 2 sequences x 2 ranks x 2 accumulated
    saves = {"dirpath": "{run}/checkpoints", "every_n_steps": 2, "keep": 6, "asynchronous": False}
    assert small.config["last_checkpoint"] == saves, "nothing goes into the production run's folder"
    assert (data["seq_len"], sizes["tp_size"]) == (2048, 8), "what was given is not touched"
