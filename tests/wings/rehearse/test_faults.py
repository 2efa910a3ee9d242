"""`rehearse` fails on planted faults, names them in its first failure, accuses no sound module.

Trainings that a fault does not affect run once, in the unmodified project."""

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from dist_template.wings.rehearse import command
from dist_template.wings.rehearse.checks import CHECKS, Check, run_checks
from dist_template.wings.rehearse.compare import trace
from tests.support import faults as f
from tests.support.runs import CONFIGS, OURS, SMALL_LLAMA
from tests.support.strategies import flags_of
from tests.support.tiers import NIGHTLY, tiers
from tests.support.wings import Result, Runs

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
