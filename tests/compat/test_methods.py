"""Methods of other libraries' objects that one instance has in its own form."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from dist_template.compat import wrap_method
from dist_template.compat.lightning import set_configure_model


def test_a_wrapped_forward_runs_inside_of_the_hooks_of_its_instance_alone() -> None:
    layer, other, seen = nn.Linear(2, 2), nn.Linear(2, 2), list[str]()

    def doubled(forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        seen.append("forward")
        return 2 * forward(*args)

    layer.register_forward_pre_hook(lambda *_: seen.append("hook"))
    expected = 2 * layer(torch.ones(2))
    wrap_method(layer, "forward", doubled)
    seen.clear()
    torch.testing.assert_close(layer(torch.ones(2)), expected)
    other(torch.ones(2))
    assert seen == ["hook", "forward"] and layer.forward.__name__ == "forward"


def test_lightning_sees_a_hook_that_is_set_and_not_one_that_is_wrapped() -> None:
    module = L.LightningModule()
    wrap_method(module, "configure_model", lambda configure: configure())
    assert not is_overridden("configure_model", module), (
        "wrap_method can set the hook now: remove set_configure_model"
    )
    set_configure_model(module, lambda: None)
    assert is_overridden("configure_model", module)
    set_configure_model(module, None)
    assert not is_overridden("configure_model", module) and "configure_model" not in vars(module)
