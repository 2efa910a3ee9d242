"""Layers that a strategy cannot train are refused by name; hooks that change weights are found."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from dist_template.errors import InputError
from dist_template.layout import refuse_lazy, refuse_mixed, refuse_unshardable, total_norm
from dist_template.parallel.configured import Configured, Hardware
from dist_template.parallel.own_code import code_of
from dist_template.parallel.zero.spec import ZeroSpec


class Holder(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (nn.Parameter(torch.tensor(1.0)), "part of Holder is a scalar parameter"),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), "part of Holder is a complex"),
        (nn.Embedding(3, 2, sparse=True), "part of Holder has sparse gradients, which FSDP2"),
        (nn.EmbeddingBag(3, 2, sparse=True), "part of Holder has sparse gradients"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(part: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        refuse_unshardable(Holder(part=part), "FSDP2")
    refuse_unshardable(Holder(part=nn.Embedding(3, 2), other=nn.Linear(2, 2)), "FSDP2")


def test_the_norm_of_sparse_gradients_adds_rows_that_come_twice() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    assert table.weight.grad is not None
    dense = table.weight.grad.to_dense()
    torch.testing.assert_close(
        total_norm([table.weight.grad, torch.ones(2)]) ** 2, (dense**2).sum() + 2
    )


def test_a_lazy_layer_is_refused_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(InputError, match=r"0\.weight of Sequential is of a lazy layer"):
        refuse_lazy(model)
    with pytest.raises(InputError, match=r"0\.weight of Sequential is of a lazy layer"):
        refuse_unshardable(model, "FSDP2")
    model(torch.ones(2, 3))
    refuse_lazy(model)


def test_dtypes_may_differ_between_units_of_fsdp_but_not_in_one() -> None:
    model = Holder(one=nn.Linear(2, 2), two=nn.Linear(2, 2).double())
    with pytest.raises(InputError, match=r"one\.weight of Holder is of torch\.float32 and two"):
        refuse_mixed(model, lambda each: each is model)
    refuse_mixed(model, lambda each: each in (model, model.two))
    model.two.requires_grad_(False)
    refuse_mixed(model, lambda each: each is model)
    with pytest.raises(InputError, match="part of Holder is a parameter without elements"):
        refuse_mixed(Holder(part=nn.Parameter(torch.zeros(0, 3))), lambda _: True)


class Clamps(L.LightningModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.limit()

    def limit(self) -> None:
        for weight in self.parameters():
            weight.data.clamp_(-1, 1)


class OnlyAtFirst(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()


class GivesItselfAway(OnlyAtFirst):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(self)


def test_code_that_may_change_weights_in_training_is_found() -> None:
    found = {kind: code_of(kind) for kind in (Clamps, OnlyAtFirst, GivesItselfAway)}
    may = {kind: code.may_change_weights() for kind, code in found.items() if code}
    assert may == {Clamps: True, OnlyAtFirst: False, GivesItselfAway: True}
    named = {kind: code.changes_weights_in() for kind, code in found.items() if code}
    assert named == {Clamps: "limit", OnlyAtFirst: "", GivesItselfAway: ""}


class ClampsFromOutside(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        for weight in pl_module.parameters():
            weight.data.clamp_(-1, 1)


class LogsNorms(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        print(sum(weight.grad.norm() for weight in pl_module.parameters()))


class BringsCallbacks(OnlyAtFirst):
    def configure_callbacks(self) -> list[Any]:
        return [ClampsFromOutside(), LogsNorms()]


def refusals(stage: int, module: L.LightningModule, *callbacks: L.Callback) -> list[str]:
    trainer = {"max_steps": 10, "callbacks": [*callbacks]}
    setup = Configured(Hardware("cpu", 2), trainer, module, None, None, trains=True)
    return [*ZeroSpec.of({"stage": stage}).refusals(setup)]


@pytest.mark.parametrize(
    ("module", "callbacks", "what"),
    [
        (Clamps(), [], "limit of Clamps"),
        (OnlyAtFirst(), [ClampsFromOutside()], "on_train_batch_end of ClampsFromOutside"),
        (BringsCallbacks(), [], "on_train_batch_end of ClampsFromOutside"),
    ],
)
def test_weights_that_a_hook_changes_are_refused_under_zero_3(
    module: Any, callbacks: list[Any], what: str
) -> None:
    sentences = [each for each in refusals(3, module, *callbacks) if "in place" in each]
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{what} changes tensors in place and mentions weights")
    assert not [each for each in refusals(2, module, *callbacks) if "in place" in each]


def test_gradients_that_callbacks_of_the_module_read_are_refused_under_zero() -> None:
    (sentence,) = [each for each in refusals(2, BringsCallbacks()) if "gradients" in each]
    assert sentence.startswith("on_after_backward of LogsNorms reads gradients")
