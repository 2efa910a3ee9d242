"""Functions for a project's tests: all checks of a project as one test, and what they are made of.
Public interface.

PROJECT = this_project(__file__)
@project_checks(PROJECT)
def test_project(check, tmp_path): check(tmp_path)

module, data = build(PROJECT, "--config=configs/quickstart.yaml", "--data.seq_len=64")
loss = module.training_step(batches(data, 1)[0], 0)"""

from __future__ import annotations

import ast
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from .cli.config_file import read as read_keys
from .cli.fit import WithoutTrainer
from .cli.limits import Machine, violations
from .project import Project
from .text.datamodule import PackedText
from .wings.rehearse.checks import run_checks
from .wings.rehearse.command import all_checks, make_small, rehearse_flags
from .wings.rehearse.runs import Runs

if TYPE_CHECKING:
    import pytest

__all__ = [
    "batches",
    "build",
    "check_config",
    "first_steps",
    "project_checks",
    "quick_flags",
    "rehearse",
    "this_project",
]

OF_OTHER_VERBS = ("evaluate", "sweep")  # configuration files and folders that `fit` does not read
CLUSTER = "cluster"  # is given after a configuration of what is trained
SMALL = (
    "--data.seq_len=64",
    "--data.global_batch_size=4",
    "--data.micro_batch_size=2",
    "--data.num_workers=0",
)


def this_project(file: str) -> Project:
    """Returns the project of the nearest folder above `file` that has a package with a
    `__main__.py`, with the classes that it gives to `main`; raises FileNotFoundError without
    one."""
    for folder in Path(file).absolute().parents:
        if packages := sorted(folder.glob("*/__main__.py")):
            return Project(packages[0].parent.name, **_classes_of(packages[0]))
    raise FileNotFoundError(f"no folder above {file} has a package with a __main__.py")


def _classes_of(file: Path) -> dict[str, str]:
    """Returns the arguments `module` and `data` of the call of `main` in a __main__.py, as far as
    they are written there as texts."""
    found = {}
    for call in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "main":
            for keyword in call.keywords:
                if keyword.arg in ("module", "data") and isinstance(keyword.value, ast.Constant):
                    found[keyword.arg] = str(keyword.value.value)
    return found


def is_of_texts(project: Project) -> bool:
    """Returns whether a project trains a language model of this library on texts: others have no
    tokens, rows and labels to check."""
    module, data = project.class_of(project.module), project.class_of(project.data)
    return bool(getattr(module, "counts_tokens", False)) and issubclass(data, PackedText)


def quick_flags(project: Project, name: str = "quickstart") -> list[str]:
    """Returns the flags of a training of a few steps on this CPU: those of configs/<name>.yaml, if
    the project's classes have its keys. That of a new project is a language model's."""
    path = project.folder.parent / "configs" / f"{name}.yaml"
    if path.is_file() and not foreign_keys(project, path):
        return [f"--config={path}"]
    return ["--trainer.accelerator=cpu", "--trainer.devices=1"]


def foreign_keys(project: Project, path: Path) -> list[str]:
    """Returns the keys of a configuration file that the project's module or data has not."""
    content, found = read_keys(str(path)), []
    for section, given in (("model", project.module), ("data", project.data)):
        named = inspect.signature(project.class_of(given).__init__).parameters.values()
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named)
        keys = content.get(section)
        if isinstance(keys, dict) and not takes_any:
            names = {each.name for each in named}
            found += [f"{section}.{key}" for key in keys if key.rstrip("+") not in names]
    return found


def check_config(project: Project, *flags: str, gpus: int = 8) -> list[str]:
    """Returns a sentence for each thing in a configuration that cannot work on its machine: the
    configured devices and nodes; where it says auto, one node with `gpus`. Raises InputError or
    SystemExit if a file or value is wrong."""
    cli = WithoutTrainer.of(["fit", *flags], project)
    trainer = vars(cli.config_init.trainer)
    machine = Machine.described(trainer, default=gpus)
    return violations(machine, trainer, cli.model, cli.datamodule)


def build(project: Project, *flags: str) -> tuple[Any, Any]:
    """Returns the project's module with its network built on this CPU, in training mode, and its
    prepared data; raises InputError if the configuration or the data are wrong."""
    cli = WithoutTrainer.of(["fit", *flags], project)
    module, data = cli.model, cli.datamodule
    torch.manual_seed(0)
    trainer: Any = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with redirect_stdout(StringIO()):
        getattr(data, "prepare", data.prepare_data)()
    trainer.training = True
    trainer.datamodule, data.trainer, module.trainer = data, trainer, trainer
    trainer.strategy.connect(module)
    data.setup("fit")
    module.configure_model()
    return module, data


def batches(data: Any, num: int, after: int = 0) -> list[dict[str, Tensor]]:
    """Returns `num` micro-batches of `build`'s data as `training_step` gets them, the first ones
    or, as after a resume, those that follow `after` global batches."""
    data.load_state_dict(data.state_dict() | {"consumed_samples": after * data.global_batch_size})
    for callback in data.trainer.callbacks:
        if hasattr(callback, "as_state"):  # the counter of samples
            callback.on_train_start(data.trainer, None)
    found: list[dict[str, Tensor]] = []
    for batch in islice(data.train_dataloader(), num):
        found.append(data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0))
    return found


def first_steps(project: Project, *flags: str, folder: Path) -> dict[int, float]:
    """Trains six steps of a configuration made small, on one process; returns {step: loss}. Raises
    InputError if it cannot be read or made small, and RunFailed if training fails."""
    return _small(project, flags, folder).one.loss


def rehearse(project: Project, *flags: str, folder: Path, only: str = "") -> dict[str, str]:
    """Runs the checks of the verb `rehearse` with `only` in their name; returns those that failed,
    with the cause; with --gpu on fake GPUs too. Raises InputError if the configuration cannot be
    read or made small."""
    runs, failed = _small(project, flags, folder), {}
    for result in run_checks(
        runs, [check for check in all_checks("--gpu" in flags) if only in check.name]
    ):
        if result.verdict == "FAIL":
            failed[result.check] = f"{result.got}: {result.sentence}"
    return failed


def _small(project: Project, flags: tuple[str, ...], folder: Path) -> Runs:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    options, rest = rehearse_flags().parse_known_args(flags)
    _, _, runs = make_small(options, rest, folder, project)
    runs.prepare()
    return runs


def project_checks(
    project: Project,
    *,
    base: str = "pretrain",
    quick: str = "quickstart",
    strategies: Sequence[str] = ("fsdp2", "zero3"),
    small: Sequence[str] = SMALL,
    skip: Mapping[str, str] | None = None,
    gpu: bool = False,
) -> pytest.MarkDecorator:
    """Returns a decorator of pytest: its test runs once for each check, as the argument `check`,
    which is called with an empty folder and raises AssertionError with a sentence.

    `base`: the configuration to which files in folders of configs/ are added, and with which
    `strategies` train; their checks have the marker `slow`. `quick`: the configuration of other
    trainings, and, with flags `small`, of model and data. `skip`: checks that the project does not
    pass, with the reason; ValueError for other names. `gpu`: with `strategies` on fake GPUs too."""
    import pytest

    kind = _Checks if is_of_texts(project) else _OfAnyModule
    quick_checks, marks = kind(project, base, quick, tuple(small)), {}
    checks = dict(quick_checks.all())
    for strategy in strategies:
        name = f"a_sharded_strategy_passes_every_check-{strategy}"
        checks[name], marks[name] = (
            partial(quick_checks.rehearsed, base, strategy, "", gpu=gpu),
            [pytest.mark.slow],
        )
    for name, reason in (skip or {}).items():
        if name not in checks:
            raise ValueError(f"skip names {name!r}, which is no check of: {', '.join(checks)}")
        marks[name] = [*marks.get(name, []), pytest.mark.skip(reason=reason)]
    each = [
        pytest.param(check, id=name, marks=marks.get(name, ())) for name, check in checks.items()
    ]
    return pytest.mark.parametrize("check", each)


@dataclass(frozen=True)
class _Checks:
    """The checks of a project: methods, whose last argument is an empty folder."""

    project: Project
    base: str
    quick: str
    small: tuple[str, ...]

    def of_files(self) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """Yields a check for each configuration file of the project."""
        for name in self.names():
            if "/" in name or name == CLUSTER:
                yield f"a_configuration_can_be_added-{name}", partial(self.can_be_added, name)
            else:
                yield f"a_main_configuration_can_run-{name}", partial(self.can_run, name)

    def all(self) -> Iterator[tuple[str, Callable[[Path], None]]]:
        yield from self.of_files()
        for name in dict.fromkeys((self.quick, self.base)):
            yield f"the_first_steps_run-{name}", partial(self.first_steps_run, name)
        yield "the_initial_loss_is_that_of_a_uniform_guess", self.initial_loss
        yield "every_trainable_parameter_gets_a_gradient", self.gradients
        yield "one_batch_can_be_overfitted", self.overfits
        yield "rows_decode_to_text_of_the_source", self.rows
        yield "labels_are_the_next_tokens", self.labels
        yield "a_loss_is_divided_by_the_labels_that_count", self.counted_labels
        yield "a_resumed_run_sees_the_next_batch", self.resume
        for only in ("one process", "one big batch"):
            yield (
                f"two_ranks_train_as-{only.replace(' ', '_')}",
                partial(self.rehearsed, self.quick, "ddp", only),
            )

    def names(self) -> list[str]:
        configs = self.project.folder.parent / "configs"
        found = sorted(
            path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml")
        )
        return [name for name in found if name.split("/")[0] not in OF_OTHER_VERBS]

    def config(self, name: str) -> str:
        path = self.project.folder.parent / "configs" / f"{name}.yaml"
        return f"--config={path if path.is_file() else name}"  # the library's

    def built(self, folder: Path, *flags: str) -> tuple[Any, Any]:
        """Builds the module and its data; the cache is beside `folder`, for the checks that
        follow."""
        cache = f"--data.cache_dir={folder.parent}/cache"
        return build(self.project, self.config(self.quick), *self.small, cache, *flags)

    def can_run(self, name: str, folder: Path) -> None:
        found = check_config(self.project, self.config(name), gpus=4)
        assert found == [], (
            f"configs/{name}.yaml cannot run on a node with 4 GPUs: {'; '.join(found)}"
        )

    def can_be_added(self, name: str, folder: Path) -> None:
        machine = ("--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.num_nodes=2")
        flags = (*machine, "--model.optim.warmup=0")  # a preset may end before a warm-up would
        found = check_config(self.project, self.config(self.base), *flags, self.config(name))
        assert found == [], (
            f"configs/{name}.yaml after {self.base}.yaml on two nodes with 8 GPUs:"
            f" {'; '.join(found)}"
        )

    def first_steps_run(self, name: str, folder: Path) -> None:
        losses = first_steps(self.project, self.config(name), folder=folder)
        assert sum(map(math.isfinite, losses.values())) == 6, (
            f"not 6 steps with a finite loss: {losses}"
        )

    def initial_loss(self, folder: Path) -> None:
        module, data = self.built(folder)
        loss, expected = (
            module.training_step(batches(data, 1)[0], 0).item(),
            math.log(data.vocab_size),
        )
        why = "far above, initialization is too wide; below, labels leak into the input"
        assert abs(loss / expected - 1) <= 0.05, (
            f"it is {loss:.3f}, a uniform guess has {expected:.3f}: {why}"
        )

    def gradients(self, folder: Path) -> None:
        module, data = self.built(folder)
        module.training_step(batches(data, 1)[0], 0).backward()
        missing = [
            name for name, p in module.named_parameters() if p.requires_grad and p.grad is None
        ]
        assert missing == [], f"{len(missing)} trainable parameters get no gradient: {missing}"

    def overfits(self, folder: Path) -> None:
        module, data = self.built(folder)
        batch, losses = batches(data, 1)[0], []
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        for _ in range(40):
            losses.append(module.training_step(batch, 0))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.5 * losses[0], (
            f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in 40 steps"
        )

    def rows(self, folder: Path) -> None:
        data = self.built(folder)[1]
        text = data.text_tokenizer.decode(
            batches(data, 1)[0]["input_ids"][0].tolist(), skip_special_tokens=True
        )[:40]
        assert any(text in each for _, each in data.source.documents()), (
            f"no document has a row's text: {text!r}"
        )

    def labels(self, folder: Path) -> None:
        batch = batches(self.built(folder)[1], 1)[0]
        counted = batch["labels"][:, :-1] != -100
        wrong = (batch["labels"][:, :-1] != batch["input_ids"][:, 1:])[counted].sum().item()
        assert counted.any(), "no label counts"
        assert not wrong, f"{wrong} of {counted.sum().item()} labels are not the next token"

    def counted_labels(self, folder: Path) -> None:
        pair = batches(self.built(folder)[1], 2)  # the two micro-batches of a global batch
        counted = sum((batch["labels"] != -100).sum().item() for batch in pair)
        divisors = [batch["tokens_per_micro_batch"].item() for batch in pair]
        assert divisors == [counted / 2] * 2, (
            f"{counted} labels count in two micro-batches, divided by {divisors}"
        )

    def resume(self, folder: Path) -> None:
        data = self.built(folder)[1]
        uninterrupted = batches(data, 6)[4:]  # two global batches are four micro-batches
        for expected, got in zip(uninterrupted, batches(data, 2, after=2), strict=True):
            assert torch.equal(expected["input_ids"], got["input_ids"]), (
                "after two global batches come other rows"
            )

    def rehearsed(
        self, name: str, strategy: str, only: str, folder: Path, gpu: bool = False
    ) -> None:
        configs = (self.config(name), self.config(f"strategy/{strategy}"), *["--gpu"] * gpu)
        failed = rehearse(self.project, *configs, folder=folder, only=only)
        assert failed == {}, f"configs/{name}.yaml under {strategy}: {failed}"


class _OfAnyModule(_Checks):
    """The checks of a project whose module is no language model: they train what is there."""

    def all(self) -> Iterator[tuple[str, Callable[[Path], None]]]:
        yield from self.of_files()
        yield "the_first_steps_run", self.few_steps
        yield "one_batch_can_be_overfitted", self.overfits
        yield "two_ranks_train_as_one_process", partial(self.rehearsed, self.quick, "ddp", "")

    def flags(self) -> list[str]:
        return quick_flags(self.project, self.quick)

    def can_run(self, name: str, folder: Path) -> None:
        path = self.project.folder.parent / "configs" / f"{name}.yaml"
        unknown = foreign_keys(self.project, path)
        assert unknown == [], (
            f"configs/{name}.yaml sets {', '.join(unknown[:3])}, and the classes of this project"
            " have no such argument: a new project's configurations are a language model's; write"
            " your own keys, or delete the file"
        )
        super().can_run(name, folder)

    def can_be_added(self, name: str, folder: Path) -> None:
        machine = ("--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.num_nodes=2")
        found = check_config(self.project, *machine, self.config(name))
        assert found == [], f"configs/{name}.yaml on two nodes with 8 GPUs: {'; '.join(found)}"

    def few_steps(self, folder: Path) -> None:
        losses = first_steps(self.project, *self.flags(), folder=folder)
        assert losses and all(map(math.isfinite, losses.values())), (
            f"the first steps have no finite loss: {losses}"
        )

    def overfits(self, folder: Path) -> None:
        """Trains on one batch, by the module's own optimizer and schedule."""
        runs = _small(self.project, tuple(self.flags()), folder)
        if runs.small.is_manual:  # losses of several optimizers, as a GAN's, need not fall
            return
        config = runs.small.on_one_process()
        config["trainer"] |= {
            "max_steps": 40,
            "overfit_batches": 1,
            "limit_val_batches": 0,
            "val_check_interval": 1,
        }
        config["trainer"]["accumulate_grad_batches"] = 1
        losses = [*runs.trained("overfitted", config).loss.values()]
        first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
        assert last < first, (
            f"the loss of one batch went from {first:.4g} to {last:.4g} in {len(losses)} steps:"
            " the learning rate, or the loss, is wrong"
        )

    def rehearsed(
        self, name: str, strategy: str, only: str, folder: Path, gpu: bool = False
    ) -> None:
        flags = (*self.flags(), self.config(f"strategy/{strategy}"), *["--gpu"] * gpu)
        failed = rehearse(self.project, *flags, folder=folder, only=only)
        assert failed == {}, f"under {strategy}: {failed}"
