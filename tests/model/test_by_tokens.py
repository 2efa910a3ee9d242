"""Values by consumed tokens: phases, batch sizes, sentences for wrong ones."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn

from dist_template import InputError, OptimConfig
from dist_template.by_tokens import Phase, batch_at, check_phases, divisor_of, value_at
from dist_template.model.any_module import value_now
from dist_template.text import PackedText
from tests.support.library import optim

T = 10**12
# arXiv:2412.19437, section 4.2, with a step of 256 sequences
BATCH = [Phase(3072, 0), Phase(15360, 0.469 * T, "linear", 256), Phase(15360)]
RATE = [
    Phase(2.2e-4, 10 * T), Phase(2.2e-5, 14.3 * T, "cosine"), Phase(2.2e-5, 14.633 * T),
    Phase(7.3e-6),
]  # fmt: skip


def test_the_schedules_of_deepseek_v3() -> None:
    expected = {0: 2.2e-4, 9.99: 2.2e-4, 12.15: 1.21e-4, 14.3: 2.2e-5, 14.6: 2.2e-5, 14.7: 7.3e-6}
    for tokens, rate in expected.items():
        assert value_at(RATE, tokens * T) == pytest.approx(rate, rel=1e-9), tokens
    sizes = [batch_at(BATCH, share * 0.469 * T) for share in (0, 0.021, 0.5, 0.999, 1, 9)]
    assert sizes == [3072, 3328, 9216, 15104, 15360, 15360]
    assert str(Phase(4, 8, "linear")) == "value 4 until 8 shape linear"
    assert (divisor_of(BATCH), divisor_of(BATCH[::2]), divisor_of(48)) == (256, 3072, 48)


WRONG = {
    "the last, which must have none": [Phase(1, 5)],
    "but the last": [Phase(1), Phase(2)],
    "grow from phase to phase": [Phase(1, 5), Phase(2, 5), Phase(3)],
    "0 or more": [Phase(1, -1), Phase(2)],
    "must be constant": [Phase(1, 5, "linear"), Phase(2)],
    "`value` must be 0 or more": [Phase(4, 5), Phase(-8)],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_phases_are_refused(sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^a\.key has phases until .*{sentence}"):
        check_phases("a.key", WRONG[sentence])


class Data:
    """Two samples of 10 tokens in each step."""

    seq_len, step_samples, consumed_samples = 10, 0, 0
    global_batch_size: Any = 2

    def rates(self, config: OptimConfig, num_steps: int, state: Any = None) -> list[float]:
        optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
        scheduler = optim.build_schedule(optimizer, config, num_steps, data=self)["scheduler"]
        self.found, self.scheduler = [], scheduler
        if state:
            scheduler.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = state["_last_lr"][0]
        for _ in range(num_steps):
            self.found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            self.consumed_samples += 2
            scheduler.step()
        return self.found


LR: Any = [Phase(0.4, 100), Phase(0.2, 120), Phase(0.1)]


def test_phases_of_the_learning_rate_are_multiplied_by_the_warm_up_and_resume() -> None:
    data, config = Data(), OptimConfig(learning_rate=LR, warmup=3)
    assert data.rates(config, 8) == pytest.approx([0, 0.4 / 3, 0.8 / 3, 0.4, 0.4, 0.2, 0.1, 0.1])
    data, other = Data(), OptimConfig(learning_rate=[Phase(0.4, 160), Phase(0.8)], warmup=3)
    first = data.rates(config, 4)
    state = data.scheduler.state_dict()
    assert first + data.rates(config, 4, state) == pytest.approx(Data().rates(config, 8))
    data.consumed_samples = 8
    changed = data.rates(other, 6, state)
    assert changed == pytest.approx([0.4, 0.4, 0.4, 0.4, 0.8, 0.8]), "the peak is the present one"
    number = OptimConfig(learning_rate=0.3, schedule="constant", warmup=0)
    assert data.rates(number, 3, state) == pytest.approx([0.4, 0.3, 0.3]), "and so is a number"


def test_what_does_not_work_with_phases_is_refused() -> None:
    config, data = OptimConfig(learning_rate=LR), Data()
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config)
    with pytest.raises(InputError, match="is 0 in each phase"):
        OptimConfig(learning_rate=[Phase(0)])
    with pytest.raises(InputError, match="BoringDataModule, which does not count tokens"):
        optim.build_schedule(optimizer, config, 10, data=BoringDataModule())
    module: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=BoringDataModule()))
    with pytest.raises(
        InputError, match=r"^a\.key has phases, and BoringDataModule does not count"
    ):
        value_now(module, "a.key", LR)
    config.lr_scheduler_class = {
        "class_path": "torch.optim.lr_scheduler.ConstantLR",
        "init_args": {},
    }
    with pytest.raises(InputError, match="do not work with --lr_scheduler"):
        optim.build_schedule(optimizer, config, 10, data=data)
    data.global_batch_size, config = [Phase(2)], OptimConfig()
    plateau = "lightning.pytorch.cli.ReduceLROnPlateau"
    config.lr_scheduler_class = {"class_path": plateau, "init_args": {"monitor": "eval/loss"}}
    with pytest.raises(InputError, match="ReduceLROnPlateau does not work with phases"):
        optim.build_schedule(optimizer, config, 10, data=data)


@pytest.mark.parametrize(("batch", "sentence"), [([Phase(8)], "no epochs"), (8, "multiple of 4")])
def test_an_epoch_ends_with_a_step(batch: Any, sentence: str) -> None:
    data: Any = PackedText(global_batch_size=batch, micro_batch_size=2)
    options: Any = {"max_steps": 3, "limit_train_batches": 3, "fast_dev_run": False}
    data.trainer = SimpleNamespace(**options)
    with pytest.raises(InputError, match=sentence):
        data.check(1)
