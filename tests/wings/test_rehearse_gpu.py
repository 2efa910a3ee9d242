"""`rehearse --gpu` names planted faults by file and line, and accuses no sound module."""

import copy
import inspect
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_cuda
from dist_template.project import Project
from dist_template.wings.rehearse import command
from dist_template.wings.rehearse.checks import run_checks
from dist_template.wings.rehearse.runs import Runs
from tests.support import gpu_faults as g
from tests.support.classifier import PLAIN
from tests.support.parity import MODELS
from tests.support.runs import CONFIGS, OURS, refused
from tests.support.strategies import flags_of
from tests.support.tiers import NIGHTLY

CANNOT = fake_cuda.refusal()
NEEDS_COMPILER = pytest.mark.skipif(bool(CANNOT), reason=CANNOT or "-")
LLAMA, DEEPSEEK = MODELS["llama"], ""  # "": the project's own
QWEN3_MOE = "{model_type: qwen3_moe, num_hidden_layers: 2, num_experts: 4, num_experts_per_tok: 2}"
OF_A_STEP = ("it trains", "no plain step waits", "copies and groups")
FAULTS: dict[str, Callable] = {
    name: each
    for name, each in vars(g).items()
    if getattr(each, "__module__", "") == g.__name__ and "# fault\n" in inspect.getsource(each)
}
UNDER_FSDP2 = ("norm_of_gradients_read", "gathered_objects", "cpu", "masked_select", "nonzero")
OF_IMAGES = ("loader_without_pinned_memory", "loader_with_pinned_memory")
DAILY = (
    "host_tensor_in_forward",
    "reduction_of_a_transposed_tensor",
    "item_in_training_step",
    "batch_not_pinned",
    "loss_read_at_log_steps",
)
SOUND: dict[str, Callable] = {
    each.__name__: each
    for each in (
        g.loss_read_at_log_steps,
        g.loss_summed_on_the_device,
        g.metrics_read_after_validation,
        g.registered_buffers,
        g.generator_of_the_device,
        g.made_on_the_device,
        g.masked_by_where,
        g.metric_of_the_module,
        g.logged_tensors,
        g.copied_in_the_background,
        g.function_of_its_own,
        g.labels_masked_by_the_loader,
        g.host_scalar_as_a_factor,
        g.reduction_of_a_channels_last_tensor,
        g.loader_with_pinned_memory,
    )
}


class Rehearsals:
    """Small configurations, each made once, and what a project does with a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._small = cache(self._make_small)

    def _make_small(self, project: Project, strategy: str, model: str) -> Any:
        if project is PLAIN:
            flags = ["--data.num_train=40", "--data.batch_size=2"]
            flags += ["--trainer.devices=2", "--best_checkpoint.monitor=val_loss"]
        else:
            flags = [f"--config={CONFIGS}/quickstart.yaml", "--data.prompts=[the]"]
            flags += [f"--model.architecture={model}"] if model else []
        options, rest = command.rehearse_flags().parse_known_args([*flags, *flags_of(strategy)])
        folder = self.folder / "-".join((project.package, strategy, str(len(model))))
        _, _, runs = command.make_small(options, rest, folder, project)
        runs.prepare()
        return runs.small

    def failures(
        self, plant: Callable[[], None], *checks: str, strategy: str = "ddp", model: str = LLAMA
    ) -> list[str]:
        """Returns sentences of the checks that fail; all on GPUs are run if none is named."""
        name: str = plant.__name__  # ty: ignore[missing-attribute]
        project = PLAIN if name in OF_IMAGES else OURS
        small = copy.deepcopy(self._small(project, strategy, model))
        folder = self.folder / f"{name}-{strategy}-{len(model)}"
        small.config["run"]["root"] = str(folder / "runs")
        wanted = [f"gpu: {check}" for check in checks]
        every = [check for check in command.all_checks(True) if check.name.startswith("gpu: ")]
        chosen = [check for check in every if check.name in wanted or not wanted]
        results = run_checks(Runs(small, folder, project, plant), chosen)
        failed = [result for result in results if result.verdict == "FAIL"]
        return [f"{each.check}: {each.got}: {each.sentence}" for each in failed]


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    return Rehearsals(tmp_path_factory.mktemp("rehearsals"))


def tiered(names: Any) -> list[Any]:
    marks: dict[bool, Any] = {True: [pytest.mark.slow], False: NIGHTLY}
    return [pytest.param(name, marks=marks[name in DAILY]) for name in names]


@NEEDS_COMPILER
@pytest.mark.parametrize("name", tiered(FAULTS))
def test_a_fault_is_named_by_its_line(name: str, rehearsals: Rehearsals) -> None:
    strategy = "fsdp2" if name in UNDER_FSDP2 else "ddp"
    failed = rehearsals.failures(FAULTS[name], *OF_A_STEP, strategy=strategy)
    assert any(g.place(FAULTS[name]) in sentence for sentence in failed), failed


@NEEDS_COMPILER
@pytest.mark.parametrize("name", tiered(SOUND))
def test_a_sound_module_is_not_accused(name: str, rehearsals: Rehearsals) -> None:
    assert rehearsals.failures(SOUND[name]) == []


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK, QWEN3_MOE], ids=["llama", "own", "qwen3_moe"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_an_unchanged_project_is_not_accused(
    strategy: str, model: str, rehearsals: Rehearsals
) -> None:
    assert rehearsals.failures(g.nothing, strategy=strategy, model=model) == []


@NEEDS_COMPILER
@pytest.mark.slow
def test_experts_over_all_ranks_predict(rehearsals: Rehearsals) -> None:
    """FSDP2 copies their one shard, which fails in torch.inference_mode (a CPU takes no_grad)."""
    assert rehearsals.failures(g.nothing, strategy="fsdp2_ep", model=DEEPSEEK) == []


def test_a_machine_on_which_it_cannot_work_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--config={CONFIGS}/quickstart.yaml", "--gpu", f"--output={tmp_path}/out"]
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    assert "verified with torch 2.13.0; this is 2.99.1" in refused("rehearse", flags, capfd)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("g++") is None
    assert "install g++ and Python's headers" in refused("rehearse", flags, capfd)
