"""`rehearse` fails on planted faults and names them, and passes on correct edits.

The first failing check, which a user reads first, must name the planted fault. Trainings that a
fault does not affect run once, in the unmodified project.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from dist_template.wings.rehearse import command
from dist_template.wings.rehearse.checks import CHECKS, Check, run_checks
from dist_template.wings.rehearse.compare import trace
from tests.support import edits
from tests.support import faults as f
from tests.support.runs import CONFIGS, OURS
from tests.support.strategies import flags_of
from tests.support.tiers import NIGHTLY, tiers
from tests.support.wings import Result, Runs
from tests.support.wings import rehearse_main as main

LLAMA = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
LLAMA += " num_attention_heads: 4, num_key_value_heads: 4}"
MOE = "{model_type: deepseek_v3, num_hidden_layers: 2, first_k_dense_replace: 1,"
MOE += " n_group: 1, topk_group: 1}"
MORE = {  # checks that need trainings of their own
    "accumulation = one big batch": "big",
    "kill and resume = uninterrupted": "resumed",
    "checkpoint -> exported model": "never",
}
HANG_S = 10.0  # without progress, for the two faults that hang; the others have a minute


@dataclass(frozen=True)
class Plant:
    """A fault, and what the first failing check must say.

    Args:
        names: Parts of the sentence: what is planted, as a module, a parameter or file:line.
        in_one: Whether it changes the training of one process too.
        processes: None: what the strategy needs.
        more: One of `MORE`'s values: also run that check. For resumed, run no other.
    """

    fault: FunctionType
    names: tuple[str, ...]
    in_one: bool = False
    strategy: str = "ddp"
    model: str = LLAMA
    processes: int | None = None
    more: str = ""

    @property
    def checks(self) -> list[Check]:
        always = [check for check in CHECKS if check.name not in MORE]
        more = [check for check in CHECKS if MORE.get(check.name) == self.more]
        return more if self.more == "resumed" else always + more


RESUMED: dict[str, Any] = {"processes": 1, "more": "resumed"}
PP: dict[str, Any] = {"strategy": "pp", "processes": 2}
BIG: dict[str, Any] = {"in_one": True, "more": "big"}
DROPPED = LLAMA[:-1] + ", attention_dropout: 0.1}"
TIED = LLAMA[:-1] + ", tie_word_embeddings: true}"
FAULTS, LAYERS = "faults.py:", "model.model.layers"
NOT_ALONE = (f"the forward pass of rank 1 differs first in the output of {LAYERS}.1",)
HUNG = ("rank 1 is stalled: step 2, micro-batch 1", FAULTS, "rank 0 is waiting for it")
MEAN = (f"{LAYERS}.0.input_layernorm.running_mean", "all-reduce")
PLANTS = [
    Plant(f.loss_per_rank, ("training_step", FAULTS), **BIG),
    Plant(f.loss_divided_by_ranks, ("0.5 times as large", "training_step", FAULTS)),
    Plant(f.repeating_sampler, ("step 1 lacks 4 of the 8 samples", "GlobalOrder")),
    Plant(f.documents_leak, ("layers.0.self_attn", "forward", FAULTS), True),
    Plant(f.future_leaks, ("the input of model", "LanguageModule", FAULTS), True),
    Plant(f.mlp_of_rank, ("rank 1", f"{LAYERS}.1.mlp.act_fn", "Scaled", FAULTS)),
    Plant(f.router_of_rank, ("rank 1", "layers.1.mlp.gate"), model=MOE),
    Plant(f.layer_detached, ("layers.0.mlp.gate_proj.weight gets no gradient",), True),
    Plant(f.layer_outside_of_fsdp, ("layers.1.mlp", "gradient"), strategy="fsdp2"),
    Plant(f.layer_outside_of_the_tensor_parallel_plan, ("mat1 and mat2",), strategy="tp"),
    Plant(f.gradients_reduced_twice, ("1 of 21", "layers.1.input_layernorm.weight"), strategy="tp"),
    Plant(
        f.expert_gradients_doubled, ("1.mlp.experts.gate_up_proj",), strategy="fsdp2_ep", model=MOE
    ),
    Plant(f.gradients_divided_before_the_step, ("on_before_optimizer_step", FAULTS)),
    Plant(f.callback_divides_gradients, ("HalveGradients.on_after_backward", FAULTS)),
    Plant(f.clipping_by_rank, ("configure_gradient_clipping", FAULTS), True, "fsdp2"),
    Plant(f.unseeded_parameter, ("model.model.norm.weight",)),
    Plant(f.buffer_by_rank, ("temperature", "before the first step"), strategy="fsdp2"),
    Plant(f.running_mean_by_rank, MEAN, True),
    Plant(
        f.noise_on_a_weight, ("layers.1.mlp.up_proj.weight", "something other than the optimizer")
    ),
    Plant(f.block_reads_what_another_stage_has_filled, NOT_ALONE, True, **PP),
    Plant(f.loss_per_rank, ("training_step", FAULTS), **PP, **BIG),
    Plant(f.tied_gradient_not_summed, ("1 of 20", "model.embed_tokens.weight"), **PP, model=TIED),
    Plant(f.last_stage_halves_gradients, ("on_before_optimizer_step", FAULTS), **PP),
    Plant(f.last_stage_counts_in_python, ("holds num_losses",), **PP, more="resumed"),
    Plant(
        f.evaluation_is_a_mean_of_means, ("eval/loss", "add up", "validation_step", FAULTS), **BIG
    ),
    Plant(f.parameter_without_optimizer, ("embed_tokens.weight gets gradients", FAULTS), True),
    Plant(f.tokens_by_process, ("their tokens differ", "transform", FAULTS), True),
    Plant(f.rank_killed, ("rank 1: killed", "device 1 has fallen off the bus")),
    Plant(f.crash_in_c, ("rank 1", "Segmentation fault", "read_address_zero")),
    Plant(f.error_on_one_rank, ("rank 1: ValueError: no such shard", FAULTS)),
    Plant(f.hang, HUNG),
    Plant(f.collective_on_one_rank, ("rank 1",)),
    Plant(f.random_state_not_saved, ("another random state", "dropout"), model=DROPPED, **RESUMED),
    Plant(f.counter_in_python, ("no checkpoint holds num_calls",), **RESUMED),
    Plant(f.optimizer_forgets, ("ForgetfulAdamW", FAULTS), **RESUMED),
    Plant(f.schedule_starts_anew, ("the learning rate of step", "schedule"), **RESUMED),
    Plant(f.data_start_anew, ("step 3 lacks", "GlobalOrder"), **RESUMED),
    Plant(f.average_in_a_buffer, ("average", "persistent"), **RESUMED),
    Plant(f.average_in_a_callback, ("no checkpoint holds Average.shadow",), **RESUMED),
]
QUICK = "gradients_divided_before_the_step counter_in_python".split()
DAILY = """loss_divided_by_ranks repeating_sampler documents_leak mlp_of_rank layer_detached hang
    layer_outside_of_fsdp running_mean_by_rank evaluation_is_a_mean_of_means rank_killed
    tied_gradient_not_summed last_stage_counts_in_python schedule_starts_anew
    data_start_anew""".split()  # a fault of each check, and a pipeline's


def marked(plant: Plant) -> Any:
    name = plant.fault.__name__
    marks = () if name in QUICK else pytest.mark.slow if name in DAILY else NIGHTLY
    return pytest.param(plant, id=name + f"-{plant.more}" * bool(plant.more), marks=marks)


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
        self._count += 1
        small = copy.deepcopy(sound.small)
        folder = self.folder / f"{plant.fault.__name__}{self._count}"
        small.config["run"]["root"] = str(folder / "runs")
        known = {} if plant.in_one else {"one": sound.one}
        if plant.fault in (f.hang, f.collective_on_one_rank):
            small.config["watchdog"] |= {"timeout_s": HANG_S, "start_timeout_s": HANG_S}
        return Runs(small, folder, OURS, plant.fault, known=known)


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    return Rehearsals(tmp_path_factory.mktemp("rehearsals"))


@pytest.mark.parametrize("plant", [marked(plant) for plant in PLANTS])
def test_what_is_planted_is_named(plant: Plant, rehearsals: Rehearsals) -> None:
    results = run_checks(rehearsals.broken(plant), plant.checks)
    first: Result | None = next((each for each in results if each.verdict == "FAIL"), None)
    assert first, f"it passes {len(plant.checks)} checks"
    missing = [name for name in plant.names if name not in first.sentence]
    assert not missing, f"{first.check}: {first.got}: {first.sentence}"


def test_a_step_that_draws_labels_is_not_blamed_for_its_loss(rehearsals: Rehearsals) -> None:
    plant = Plant(f.labels_drawn, (), True)
    results = [*run_checks(rehearsals.broken(plant), plant.checks)]
    assert [result.check for result in results if result.verdict == "FAIL"] == []
    limits = [result.sentence for result in results if result.verdict == "limit"]
    assert any("training_step" in each and "draws random numbers" in each for each in limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"), tiers([("zero3", LLAMA), ("fsdp2_tp_ep", MOE)], daily=())
)
def test_no_sound_module_is_accused(strategy: str, model: str, rehearsals: Any) -> None:
    sound = rehearsals.sound(strategy, model, None)
    assert "outputs and gradients of the first step agree" in trace(sound.one, sound.strategy)


FSDP2 = "--config=strategy/fsdp2"
UNUSED = "--trainer.strategy=ddp_find_unused_parameters_true"
RIGHT = [(edits.edits_of_the_module, UNUSED, TIED), (edits.plain_module, FSDP2, LLAMA)]


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "strategy", "model"), tiers(RIGHT, daily=RIGHT[:1]))
def test_right_edits_pass(
    edit: Any, strategy: str, model: str, tmp_path: Path, capsys: Any
) -> None:
    flags = [f"--config={CONFIGS}/quickstart.yaml", strategy, f"--model.architecture={model}"]
    flags += ["--data.prompts=[]", f"--output={tmp_path / 'out'}"]
    try:
        main(["rehearse", *flags], OURS, prelude=edit)
    except SystemExit as stopped:
        assert not stopped.code, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "all checks hold" in printed, printed
