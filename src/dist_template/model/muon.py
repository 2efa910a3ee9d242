"""Muon for matrices, AdamW for every other parameter, as one optimizer. Loaded only where it is
chosen.

Muon (Jordan, https://kellerjordan.github.io/posts/muon) orthogonalizes the momentum of a matrix by
a Newton-Schulz iteration. With an update scale of 0.2 sqrt(max(rows, columns)) its updates are as
large as AdamW's, so that both share a learning rate and a decay (Moonlight, arXiv:2502.16982,
section 2.2). The arithmetic is `torch.optim.Muon`'s (2.13), which accepts only 2-D parameters, has
AdamW in no group, and would orthogonalize each rank's shard by itself."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch import orthogonalized, update_scale
from ..layout import local_shard
from .optim import mixed
from .owners import Owners

SCALE = "match_rms_adamw"  # torch's name of Moonlight's; `original` is Keller Jordan's


class MuonWithAdamW(torch.optim.AdamW):
    """Updates `of_muon` by Muon and the other groups by AdamW; the state of a matrix is
    `momentum_buffer`.

    Args:
        others: AdamW's parameter groups.
        of_muon: Matrices and stacks of matrices, of any layout.
        options: Arguments of `torch.optim.Muon`; without `adjust_lr_fn`, Moonlight's scale.
        group: The ranks that have the same parameters. None: all.
        adamw: Arguments of `torch.optim.AdamW`.

    Raises ValueError or TypeError where torch's classes do."""

    def __init__(
        self,
        others: Iterable[dict[str, Any]],
        of_muon: list[nn.Parameter],
        options: dict[str, Any],
        group: dist.ProcessGroup | None = None,
        **adamw: Any,
    ) -> None:
        checked = torch.optim.Muon([torch.zeros(1, 1)], **options).defaults
        if checked["adjust_lr_fn"] is None:
            checked["adjust_lr_fn"] = SCALE
        super().__init__([{"params": of_muon, **checked}, *others], **adamw)
        self._owners = Owners(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's reads a count of steps for each matrix
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Runs `closure`, then one step of both. Collective over the group: one owner
        orthogonalizes each matrix."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        self.param_groups = groups[1:]
        try:
            mixed(torch.optim.AdamW).step(self)
        finally:
            self.param_groups = groups
        self._step_matrices(groups[0])
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        # (): where it is 1, nothing may change, as in torch's fused kernels.
        skipped: Tensor | None = getattr(self, "found_inf", None)
        decay = 1 - group["lr"] * group["weight_decay"]

        def direction(parameter: Any) -> Tensor:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum, gradient = local_shard(state["momentum_buffer"]), local_shard(parameter.grad)
            if skipped is not None:
                gradient = torch.where(skipped > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - group["momentum"])
            chosen = momentum
            if group["nesterov"]:
                chosen = gradient.lerp(momentum, group["momentum"])
            # The type in which a matrix is sent and orthogonalized.
            dtype = torch.float32 if chosen.is_cpu else torch.bfloat16
            return chosen.to(dtype, copy=True)

        def orthogonalize(full: Tensor) -> Tensor:
            return orthogonalized(full, group["ns_coefficients"], group["ns_steps"], group["eps"])

        for parameter, update in self._owners.run(trained, direction, orthogonalize):
            shard = local_shard(parameter)
            keep: float | Tensor = decay
            if skipped is not None:
                update = torch.where(skipped > 0, 0.0, update)
                keep = torch.where(skipped > 0, 1.0, decay)
            shard.mul_(keep)
            scale = update_scale(parameter.shape, group["adjust_lr_fn"])
            shard.add_(update, alpha=-group["lr"] * scale)
