"""Steps that a LightningModule takes by itself (manual optimization) on parameters that FSDP2
shards.

FSDP2 expects of a step one forward pass of the outermost unit, then one backward pass. A GAN's step
has two of each, with an optimizer's step in between. So the units are not gathered by
`training_step` as a whole:

1. A unit is gathered when one of its layers runs, or a parameter of its own is read.
2. `manual_backward` passes the loss through an empty forward pass of the outermost unit, after
   which FSDP2 reduces the gradients of all units at the backward pass's end. Then, and after each
   step of an optimizer, every unit is sharded again.

Between passes the module so has shards, as outside of a step: what it does there to
`self.parameters()` and their gradients (clamping, averaging, clipping) happens to what is
trained."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ...compat.torch import tree_leaves

PASS = "pass_on_loss"  # a method of the outermost unit while it is registered with FSDP2


class ManualSteps:
    """The steps of a module whose outermost FSDP unit is `root`.

    Args:
        root: The LightningModule, or the network that it has placed."""

    def __init__(self, root: nn.Module) -> None:
        self.root: Any = root
        self.units: list[Any] = [
            unit for unit in root.modules() if isinstance(unit, fsdp.FSDPModule)
        ]
        self.shards: dict[str, nn.Parameter] = {}  # by name, from the first step on
        self._loss: Tensor | None = None
        self._is_initialized = False
        self._is_open = False  # whether the module's own code runs in its step
        self._read: set[nn.Module] = set()  # of which a parameter was read since the last release
        self._pass_on_loss = _as_forward(root, lambda: self._loss)
        for layer in _layers_of(root):
            if layer is root or isinstance(layer, nn.ParameterList | nn.ParameterDict):
                _gather_at_read(layer, self)
            else:
                layer.register_forward_pre_hook(self._before_layer)
        # Each backward pass ends with the outermost unit, also `autograd.grad` of a part (for a
        # loss's weight), after which the module's step continues.
        self.root.set_reshard_after_backward(False, recurse=False)
        self.inner = [unit for unit in self.units if unit is not root]
        for unit in self.inner:
            unit.register_forward_hook(self._after_unit)

    # ---- the module's step -----------------------------------------------------------------------

    @contextmanager
    def step(self) -> Generator[None]:
        """Surrounds a `training_step`."""
        if not self._is_initialized:  # torch finds the outermost unit by the first forward pass
            self._is_initialized = True
            self._pass_on_loss()
            self._release()
            self.shards = dict(self.root.named_parameters())
        self._release()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._release()

    def backward(self, loss: Tensor, run: Callable[[Tensor], object]) -> None:
        """Backpropagates `loss` () by `run`. Gradients of all ranks are on the shards then."""
        for parameter, shard in self._gathered():  # the module may have frozen some meanwhile
            if parameter.requires_grad != shard.requires_grad:
                parameter.requires_grad_(shard.requires_grad)
        self._loss = loss
        try:
            run(self._pass_on_loss())
        finally:
            self._loss = None
        self._release()

    def after_step(self, optimizer: Optimizer) -> None:
        """Lets the next forward pass read the new weights, and autograd refuse a backward pass
        through the old ones."""
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter, shard in self._gathered():
            if id(shard) in stepped:
                increment_version(parameter)
        self._release()

    # ---- gathering -------------------------------------------------------------------------------

    def gather(self, owner: nn.Module) -> None:
        """Gathers the outermost unit, of which `owner` has a parameter that is read."""
        if not self._is_open:
            return  # torch itself reads it, or a hook of the module that gets the shard
        self._read.add(owner)
        self._is_open = False
        try:
            self.root.unshard()
        finally:
            self._is_open = True

    def _before_layer(self, layer: nn.Module, args: object) -> None:
        self.root.unshard()

    def _after_unit(self, unit: nn.Module, args: object, output: object) -> None:
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._at_backward)

    def _at_backward(self, gradient: Tensor) -> None:
        """A backward pass that is differentiated itself (a gradient penalty) keeps the parameters
        that it uses: FSDP2 would free them, and no hook gathers them in the second pass."""
        if torch.is_grad_enabled():
            self._set_frees(False)

    def _set_frees(self, frees: bool) -> None:
        for unit in self.inner:
            unit.set_reshard_after_backward(frees, recurse=False)
            unit.set_reshard_after_forward(frees, recurse=False)

    def _release(self) -> None:
        """Shards every unit."""
        for owner in self._read:
            self._write_back(owner)
        self._read.clear()
        self._set_frees(True)
        for unit in self.units:
            unit.reshard()

    def _write_back(self, owner: nn.Module) -> None:
        """Copies to the shards what the module has changed in gathered parameters of `owner`
        (`self.scale.data.clamp_(0, 1)`). In mixed precision they are rounded copies."""
        for name, parameter in owner.named_parameters(recurse=False):
            shard = self.shards[self._name_of(owner, name)]
            if parameter is shard:
                continue
            assert isinstance(shard, DTensor)
            mesh = shard.device_mesh
            full = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
            with torch.no_grad():
                part = full.redistribute(placements=shard.placements).to_local()
                local = shard.to_local()
                part = part.to(local.device)
                local.copy_(torch.where(part == local.to(part.dtype), local, part))

    def _name_of(self, owner: nn.Module, name: str) -> str:
        for prefix, module in self.root.named_modules():
            if module is owner:
                return f"{prefix}.{name}" if prefix else name
        raise LookupError(f"{name} has no owner in {type(self.root).__name__}")

    def _gathered(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yields each parameter that is gathered now, and its shard, which optimizers have."""
        for name, parameter in self.root.named_parameters():
            shard = self.shards[name]
            if parameter is not shard:
                yield parameter, shard


def _layers_of(unit: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that have parameters of `unit`, without those of units inside it."""
    if list(unit.parameters(recurse=False)):
        yield unit
    for child in unit.children():
        if not isinstance(child, fsdp.FSDPModule):
            yield from _layers_of(child)


def _as_forward(unit: nn.Module, function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `function` as a forward pass of an FSDP unit. It takes no tensors: FSDP2 would reduce
    the unit's gradients when the backward pass reaches them."""
    setattr(unit, PASS, function)
    fsdp.register_fsdp_forward_method(unit, PASS)
    registered = getattr(unit, PASS)
    delattr(unit, PASS)
    return registered


def _gather_at_read(owner: nn.Module, steps: ManualSteps) -> None:
    """Lets reading a parameter of `owner` itself gather its unit: no layer runs that would."""
    kind = type(owner)

    class Gathering(kind):  # ty: ignore[unsupported-base]
        def __getattr__(self, name: str) -> Any:  # Python calls it for parameters and submodules
            if name in vars(self).get("_parameters", ()):
                steps.gather(self)
            return super().__getattr__(name)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Gathering, name, getattr(kind, name))
    owner.__class__ = Gathering
