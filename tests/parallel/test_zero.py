"""DeepSpeed's configuration, and an optimizer step under every strategy: hooks, Muon."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler
from trainer_dev.module import LanguageModule

from dist_template import InputError, Project
from dist_template.cli.limits import Machine
from dist_template.cli.limits.machine import Setup
from dist_template.model.owners import Owners
from dist_template.parallel.zero import json as deepspeed_config
from dist_template.strategies import ZeroStrategy
from tests.support import parity
from tests.support.adapters import TARGETS, flags, with_random_b
from tests.support.classifier import Images, PlainClassifier
from tests.support.parity import PROCESSES, PauseAfter, Trainings
from tests.support.runs import Workers, logged, newest, refused, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

ZERO = "--trainer.strategy=dist_template.parallel.zero.ZeroStrategy"
EVERY_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
    },
}


def settings(accelerator: str = "cuda", precision: str = "bf16-mixed") -> Any:
    """16 processes with 4 sequences each, accumulated 4 times."""
    data = SimpleNamespace(micro_batch_size=4, global_batch_size=256)
    machine = Machine(accelerator, 16, precision=precision)
    return Setup(machine, {"gradient_clip_val": 1.0}, SimpleNamespace(), data, None, trains=True)  # ty: ignore[invalid-argument-type]


def resolved(given: Any, used: Any) -> Any:
    return deepspeed_config.resolve(deepspeed_config.read(given), used)


def test_every_auto_of_a_hugging_face_file_is_filled_in() -> None:
    filled = resolved(EVERY_AUTO, settings())
    assert "auto" not in json.dumps(filled)
    found = [filled[key] for key in EVERY_AUTO if key.startswith(("train", "gradient"))]
    assert found == [256, 4, 4, 1.0]
    assert filled["bf16"]["enabled"] is True
    assert filled["fp16"] == {"enabled": False, "loss_scale": 0}
    assert not {"optimizer", "scheduler"} & set(filled), "module.py builds them"
    zero = filled["zero_optimization"]
    assert zero.keys() == {"stage", "offload_optimizer"}, "buckets have DeepSpeed's defaults"
    assert zero["offload_optimizer"]["pin_memory"] is True
    on_cpu = resolved(EVERY_AUTO, settings(accelerator="cpu", precision="32-true"))
    assert on_cpu["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert on_cpu["bf16"]["enabled"] is False


CONFLICTS: list[tuple[dict[str, Any], str]] = [  # test_limits.py has more
    ({"train_batch_size": 64}, "train_batch_size 64, and trainer and data 256"),
    ({"gradient_accumulation_steps": 1}, "_steps 1, and trainer and data 4"),
    ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, and trainer and data 1.0"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16.*and data .bfloat16"),
    ({"optimizer": {"type": "Lion"}}, "optimizer.type is .Lion.*model.optim sets"),
    (
        {"scheduler": {"type": "WarmupDecayLR"}},
        "scheduler.type is .WarmupDecayLR.*model.optim sets",
    ),
]


@pytest.mark.parametrize(("change", "words"), CONFLICTS, ids=[words for _, words in CONFLICTS])
def test_a_conflict_names_both_places(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved({"zero_optimization": {"stage": 2}} | change, settings())


def test_a_file_that_cannot_be_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{'stage': 2}")
    (tmp_path / "list.json").write_text("[]")
    for wrong, sentence in (
        (str(tmp_path / "broken.json"), "cannot read .*broken.json': Expecting property name"),
        (str(tmp_path / "list.json"), "wants an object"),
        ({"zero_optimisation": {"stage": 2}}, "no zero_optimization.stage"),
    ):
        with pytest.raises(InputError, match=sentence):
            ZeroStrategy(config=wrong)


@pytest.mark.slow
def test_one_process_leaves_nothing_behind(flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "extensions").mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    linear = torch.nn.functional.linear

    def clips(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("DeepSpeed clips, and the module does not")

    monkeypatch.setattr(LanguageModule, "configure_gradient_clipping", clips)
    for stage in (3, 2):
        more = [ZERO, f"--trainer.strategy.stage={stage}", "--trainer.max_steps=2"]
        assert run("fit", *flags, *more) == 0
        assert torch.nn.functional.linear is linear, "ZeRO-3 puts another function in its place"
    assert not any((tmp_path / "extensions").iterdir())


def test_nvme_refuses_asynchronous_checkpoints(flags: Any, capfd: Any, tmp_path: Path) -> None:
    flags += [*flags_of("zero3_nvme"), f"--trainer.strategy.init_args.nvme_path={tmp_path}"]
    error = refused("fit", [*flags, "--last_checkpoint.asynchronous=true"], capfd)
    assert "last_checkpoint.asynchronous true does not work with state on NVMe" in error


HOOKS = ("optimizer_step", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad")
STEPS = 8


class Student(PlainClassifier):
    """Keeps an average of its weights, updated where Lightning's documentation says: once in each
    step. Logs the sum of the average's squares, and how often each of `HOOKS` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = dict.fromkeys(HOOKS, 0)
        self.teacher: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log_dict({name: float(count) for name, count in self.calls.items()})
        self.log("teacher", sum(float(each.square().sum()) for each in self.teacher))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.calls["optimizer_step"] += 1
        with torch.no_grad(), gathered(list(self.parameters())):
            weights = [parameter.detach().clone() for parameter in self.parameters()]
        self.teacher = self.teacher or weights
        pairs = zip(self.teacher, weights, strict=True)
        self.teacher = [0.5 * old + 0.5 * new for old, new in pairs]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls["on_before_zero_grad"] += 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls["optimizer_zero_grad"] += 1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class OwnOrder(DataLoader):
    """A user's own class: an epoch's last step may have fewer micro-batches than the others."""


class OwnOrderImages(Images):
    def train_dataloader(self) -> DataLoader:
        return OwnOrder(self.train, self.batch_size, sampler=DistributedSampler(self.train))


def gathered(parameters: list[Any]) -> Any:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def values(folder: Path, strategy: str, *more: str) -> dict[str, dict[int, float]]:
    """10 micro-batches on a rank in steps of 4: an epoch's third step has 2."""
    given = [
        "fit",
        f"--run.root={folder / 'runs'}",
        "--run.report=false",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        f"--trainer.max_steps={STEPS}",
        "--trainer.log_every_n_steps=1",
        "--trainer.accumulate_grad_batches=4",
        "--data.batch_size=2",
        "--data.num_train=40",
        f"--run.name={strategy}",
        "--best_checkpoint.monitor=val_loss",
        *flags_of(strategy),
        *more,
    ]
    here = ".test_zero"
    project = Project("tests.parallel", f"{here}:Student", f"{here}:OwnOrderImages")
    record = Workers(2, project).run(given, folder / strategy).check()
    names = (*HOOKS, "teacher", "train/loss", "val_loss")
    return {name: logged(record.run, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("profiler", tiers(["null", "simple"], daily=["null"]))
def test_hooks_and_averages_of_a_step_are_those_of_ddp(tmp_path: Path, profiler: str) -> None:
    """With a profiler, Lightning's own loop runs."""
    expected = values(tmp_path, "ddp", flag := f"--trainer.profiler={profiler}")
    assert [*expected["optimizer_step"].values()] == [*range(STEPS)], "none before the first"
    assert expected["teacher"][STEPS] > 0
    for strategy in ("zero1", "zero2", "zero3"):
        got = values(tmp_path, strategy, flag)
        for name, series in expected.items():
            assert got[name] == pytest.approx(series, rel=1e-5), f"{strategy}: {name}"


MUON = "--model.optim.optimizer=muon"
MESHES = [name for name in PROCESSES if not name.startswith("zero")]
CASES = [("deepseek_v3", name) for name in MESHES]
CASES += [("llama", name) for name in ("fsdp2", "fsdp2_tp", "pp")] + [("mtp", "pp")]
DAILY = [("deepseek_v3", name) for name in ("ddp", "fsdp2_tp_ep")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), tiers(CASES, DAILY))
def test_a_strategy_trains_by_muon_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    parity.assert_trains_alike(train(model, strategy, MUON), train(model, "one", MUON))


@pytest.mark.slow
@pytest.mark.parametrize("strategies", tiers(["one tp fsdp2_ep pp ddp", "ddp fsdp2 one"], []))
def test_a_training_by_muon_continues_from_strategy_to_strategy(
    train: Trainings, strategies: str
) -> None:
    """A leg has the losses of the uninterrupted training, to the bit if it is the same strategy."""
    whole, checkpoint, legs = train("deepseek_v3", "one", MUON).loss, [MUON], strategies.split()
    for step, strategy in enumerate(legs, start=1):
        pause = [PauseAfter(step)] if step < len(legs) else []
        leg = train.run("fit", "deepseek_v3", strategy, *checkpoint, callbacks=pause)
        expected = {at: whole[at] for at in leg.loss}
        assert step in expected and leg.loss == pytest.approx(expected, rel=1e-5), strategy
        checkpoint = [MUON, f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "ddp", "pp_ep"], ["fsdp2"]))
def test_a_training_by_muon_resumes_exactly(train: Trainings, strategy: str) -> None:
    whole = train("deepseek_v3", strategy, MUON)
    paused = train.run("fit", "deepseek_v3", strategy, MUON, callbacks=[PauseAfter(3)])
    resumed = [MUON, f"--ckpt_path={newest(paused.run)}"]
    later = train.run("fit", "deepseek_v3", strategy, *resumed)
    assert later.loss == {step: loss for step, loss in whole.loss.items() if step > 3}
    parity.assert_close(later.end, whole.end, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2_tp"], []))
def test_adapters_train_by_muon_as_one_process(train: Trainings, strategy: str) -> None:
    keys = [*flags(TARGETS["llama"]), "--model.optim.warmup=2", "--trainer.precision=32-true", MUON]
    one, many = (train("llama", n, *keys, prelude=with_random_b) for n in ("one", strategy))
    parity.assert_trains_alike(many, one)


def test_owners_have_equal_work() -> None:
    """By rows x columns x the smaller of both, over the ranks that share a matrix."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh, owned = init_device_mesh("cpu", (4,)), []
        for shape in [(64, 32), (32, 64), (32, 32), (32, 32)] * 8 + [(8, 128)]:
            full = torch.zeros(shape, requires_grad=False)
            owned.append(nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])))
        owners = Owners()
        seen: list[int] = []

        def compute(matrix: torch.Tensor) -> torch.Tensor:
            seen.append(matrix.numel() * min(matrix.shape))
            return matrix

        for _ in owners.run(owned, lambda parameter: parameter.to_local().clone(), compute):
            pass
        total = sum(math.prod(p.shape) * min(p.shape) for p in owned)
        assert sum(seen) == pytest.approx(total / 4, rel=0.15)
    finally:
        dist.destroy_process_group()
