"""Faults that `rehearse --gpu` must name, and sound edits on which it must raise no alarm.

As in faults.py, each function changes this process's package. `# fault` marks the line to name."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule

from tests.support.classifier import Images, PlainClassifier
from tests.support.faults import Batch, after_configure_model, replaces


def place(fault: Callable) -> str:
    """Returns file:line of the comment `# fault` in a function of this file."""
    lines, first = inspect.getsourcelines(fault)
    (number,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# fault"))
    return f"gpu_faults.py:{number}"


def in_callback(hook: str) -> Callable[[Callable], Callable[[], None]]:
    """Makes a fault of a function: it is the method `hook` of a callback of the module."""

    def decorate(new: Callable) -> Callable[[], None]:
        @wraps(new)
        def plant() -> None:
            owner = type("UsersCallback", (Callback,), {hook: new})
            LanguageModule.configure_callbacks = lambda self: [owner()]

        return plant

    return decorate


def of_loss(use: Callable[[Any, Tensor, Batch], Any]) -> Callable[[], None]:
    """Makes a fault of a function that gets the module, the loss and the batch of each step; what
    it returns, if anything, is the loss."""

    def training_step(step: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        changed = use(self, loss, batch)
        return loss if changed is None else changed

    return wraps(use)(replaces("training_step")(training_step))


def ends_log_step(trainer: Any, step: int) -> bool:
    return not trainer.fit_loop._should_accumulate() and step % trainer.log_every_n_steps == 0


# ---- what a GPU refuses --------------------------------------------------------------------------


@replaces("forward")
def host_tensor_in_forward(forward: Any, self: Any, batch: Batch) -> Tensor:
    logits = forward(self, batch)
    return logits + torch.zeros(logits.shape[-1])  # fault


def buffer_not_registered() -> None:
    """An attribute stays on the host when the module moves."""

    def setup(_: Any, self: Any, stage: str) -> None:
        self.scale = torch.ones(1)

    def forward(forward: Any, self: Any, batch: Batch) -> Tensor:
        return forward(self, batch) * self.scale  # fault

    replaces("setup")(setup)()
    replaces("forward")(forward)()


@of_loss
def generator_of_the_host(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    draw = torch.Generator().manual_seed(self.global_step)
    noise = torch.rand(batch["labels"].shape, device=self.device, generator=draw)  # fault
    return loss + 1e-3 * noise.mean()


@of_loss
def reduction_of_a_host_tensor(self: Any, loss: Tensor, batch: Batch) -> None:
    dist.all_reduce(torch.tensor(len(batch["labels"])))  # fault


def metric_on_the_host() -> None:
    """A metric of torchmetrics in a callback, which nothing moves."""
    mean = MeanMetric(nan_strategy="disable")

    def update(self: Any, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        mean.update(outputs["loss"].detach())  # fault

    in_callback("on_train_batch_end")(update)()


@of_loss
def reduction_of_a_transposed_tensor(self: Any, loss: Tensor, batch: Batch) -> None:
    """It is dense, and NCCL refuses it: its memory is in another order."""
    dist.all_reduce(torch.zeros(2, 3, device=self.device).T)  # fault


@of_loss
def numpy_of_a_device_tensor(self: Any, loss: Tensor, batch: Batch) -> None:
    self.seen = loss.detach().numpy()  # fault


@of_loss
def first_device_hard_coded(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    """Right on rank 0 alone."""
    return loss * torch.ones(1, device="cuda:0").squeeze()  # fault


@replaces("forward")
def index_on_the_host(forward: Any, self: Any, batch: Batch) -> Tensor:
    """A device's tensor cannot be an index into a table of the host."""
    table = torch.arange(2**15)
    return forward(self, batch | {"input_ids": table[batch["input_ids"]].to(self.device)})  # fault


# ---- what waits for the GPU ----------------------------------------------------------------------


@of_loss
def item_in_training_step(self: Any, loss: Tensor, batch: Batch) -> None:
    self.last = loss.item()  # fault


@in_callback("on_train_batch_end")
def float_in_a_callback(
    self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
) -> None:
    self.last = float(outputs["loss"])  # fault


@in_callback("on_train_batch_end")
def metric_read_in_every_batch(
    self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
) -> None:
    pl_module.log("mine", outputs["loss"])
    self.last = trainer.callback_metrics["mine"].item()  # fault


@replaces("on_before_optimizer_step")
def norm_of_gradients_read(_: Any, self: Any, optimizer: Any) -> None:
    gradients = [p.grad for p in self.parameters() if p.grad is not None]
    norms = [each.norm() for each in gradients]
    local = [getattr(each, "_local_tensor", each) for each in norms]
    self.norm = torch.stack(local).norm().item()  # fault


@of_loss
def nonzero(self: Any, loss: Tensor, batch: Batch) -> None:
    self.places = (batch["labels"] != -100).nonzero()  # fault


@replaces("forward")
def boolean_index(forward: Any, self: Any, batch: Batch) -> Tensor:
    logits = forward(self, batch)
    self.counted = logits[batch["labels"] != -100]  # fault
    return logits


@of_loss
def masked_select(self: Any, loss: Tensor, batch: Batch) -> None:
    labels = batch["labels"]
    self.largest = labels.masked_select(labels != -100)  # fault


@of_loss
def condition_on_the_loss(self: Any, loss: Tensor, batch: Batch) -> Tensor | None:
    if loss > 10:  # fault
        return loss / loss.detach()
    return None


@of_loss
def tolist(self: Any, loss: Tensor, batch: Batch) -> None:
    self.firsts = batch["input_ids"][:, 0].tolist()  # fault


@of_loss
def cpu(self: Any, loss: Tensor, batch: Batch) -> None:
    self.kept = [*getattr(self, "kept", []), loss.detach().cpu()]  # fault


@of_loss
def printed_tensor(self: Any, loss: Tensor, batch: Batch) -> None:
    print("loss", loss)  # fault


@of_loss
def tensor_of_a_list(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    weights = torch.tensor([0.5, 0.5], device=self.device)  # fault
    return loss * weights.sum()


@of_loss
def synchronize(self: Any, loss: Tensor, batch: Batch) -> None:
    torch.cuda.synchronize()  # fault


@of_loss
def barrier(self: Any, loss: Tensor, batch: Batch) -> None:
    dist.barrier()  # fault


@of_loss
def gathered_objects(self: Any, loss: Tensor, batch: Batch) -> None:
    losses: list[Any] = [None] * self.trainer.world_size
    dist.all_gather_object(losses, loss.detach())  # fault


@after_configure_model
def metric_that_checks_its_input(self: Any) -> None:
    """The default of torchmetrics reads the labels that occur."""
    self.accuracy = MulticlassAccuracy(2, average="micro")

    def update(module: Any, args: Any, logits: Tensor) -> None:
        self.accuracy.update((logits[..., 0] > 0).long(), (logits[..., 1] > 0).long())  # fault

    self.model.get_output_embeddings().register_forward_hook(update)


# ---- copies --------------------------------------------------------------------------------------


@replaces("on_before_batch_transfer", DataModule)  # fault
def batch_not_pinned(before: Any, self: Any, batch: Batch, dataloader_idx: int) -> Batch:
    """New tensors, after the loader has pinned what it had read."""
    return {name: tensor.clone() for name, tensor in before(self, batch, dataloader_idx).items()}


@replaces("train_dataloader", Images)  # fault
def loader_without_pinned_memory(_: Any, self: Any) -> DataLoader:
    return DataLoader(self.train, self.batch_size, shuffle=True)


@of_loss
def read_before_it_has_arrived(self: Any, loss: Tensor, batch: Batch) -> None:
    host = torch.empty((), pin_memory=torch.cuda.is_available())
    host.copy_(loss.detach(), non_blocking=True)
    self.last = float(host)  # fault


@of_loss
def overwritten_while_it_is_copied(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    """One pinned tensor for two copies, of which the first one may still read."""
    pinned = torch.zeros(4, pin_memory=torch.cuda.is_available())
    first = pinned.to(self.device, non_blocking=True)  # fault
    pinned.fill_(1.0)
    return loss + 1e-3 * (first + pinned.to(self.device, non_blocking=True)).sum()


# ---- no faults -----------------------------------------------------------------------------------


def nothing() -> None:
    pass


@of_loss
def reduction_of_a_channels_last_tensor(self: Any, loss: Tensor, batch: Batch) -> None:
    """NCCL takes a tensor that is contiguous in its own format."""
    images = torch.ones(2, 3, 4, 5, device=self.device)
    dist.all_reduce(images.to(memory_format=torch.channels_last))


@of_loss
def loss_summed_on_the_device(self: Any, loss: Tensor, batch: Batch) -> None:
    """Read at the end of training."""
    self.total = getattr(self, "total", 0) + loss.detach()
    type(self).on_train_end = lambda self: print(f"{self.total.item():.3f}")


@in_callback("on_train_batch_end")
def loss_read_at_log_steps(
    self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
) -> None:
    self.total = getattr(self, "total", 0) + outputs["loss"]
    if ends_log_step(trainer, trainer.global_step):
        print(f"{self.total.item():.3f}")


@in_callback("on_validation_end")
def metrics_read_after_validation(self: Any, trainer: Any, pl_module: Any) -> None:
    print({name: value.item() for name, value in trainer.callback_metrics.items()})


@after_configure_model
def registered_buffers(self: Any) -> None:
    head = self.model.get_output_embeddings()
    head.register_buffer("scale", torch.ones(head.out_features))
    head.register_buffer("shift", torch.zeros(head.out_features), persistent=False)
    head.register_forward_hook(lambda head, args, logits: logits * head.scale + head.shift)


@of_loss
def generator_of_the_device(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    if not hasattr(self, "draw"):
        self.draw = torch.Generator(self.device).manual_seed(0)
    noise = torch.rand(batch["labels"].shape, device=self.device, generator=self.draw)
    return loss + 1e-3 * noise.mean()


@replaces("forward")
def made_on_the_device(forward: Any, self: Any, batch: Batch) -> Tensor:
    logits = forward(self, batch)
    positions = torch.arange(logits.shape[1], device=logits.device)
    return logits * (1 + 1e-3 * positions / len(positions))[:, None]


@replaces("forward")
def masked_by_where(forward: Any, self: Any, batch: Batch) -> Tensor:
    logits = forward(self, batch)
    is_counted = (batch["labels"] != -100)[..., None]
    logits = torch.where(is_counted, logits, logits.detach())
    return logits.masked_fill(~is_counted & (logits > 30), 30)


@after_configure_model
def metric_of_the_module(self: Any) -> None:
    """Moved with the module, and read when an evaluation ends."""
    self.accuracy = MulticlassAccuracy(2, average="micro", validate_args=False)
    self.mean = MeanMetric(nan_strategy="disable")

    def update(module: Any, args: Any, logits: Tensor) -> None:
        self.accuracy.update((logits[..., 0] > 0).long(), (logits[..., 1] > 0).long())
        self.mean.update(logits.detach().mean())

    def read(self: Any) -> None:
        print(self.accuracy.compute().item(), self.mean.compute().item())

    self.model.get_output_embeddings().register_forward_hook(update)
    type(self).on_validation_end = read


@of_loss
def logged_tensors(self: Any, loss: Tensor, batch: Batch) -> None:
    self.log("mine", loss, on_step=True, on_epoch=True)
    self.log_dict({"counted": (batch["labels"] != -100).float().mean()})


@of_loss
def copied_in_the_background(self: Any, loss: Tensor, batch: Batch) -> None:
    """Waits for the copy at the next log step."""
    if not torch.cuda.is_available():
        return
    if not hasattr(self, "host"):
        self.host, self.arrived = torch.zeros((), pin_memory=True), torch.cuda.Event()
        self.arrived.record()
    if ends_log_step(self.trainer, self.global_step + 1):
        self.arrived.synchronize()
        print(f"{float(self.host):.3f}")
    self.host.copy_(loss.detach(), non_blocking=True)
    self.arrived.record()


class Reversed(torch.autograd.Function):
    """The identity; its gradient is multiplied by a number that a tensor holds."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (factor,) = ctx.saved_tensors
        return grad_outputs[0] * factor, None


@of_loss
def function_of_its_own(self: Any, loss: Tensor, batch: Batch) -> Any:
    return Reversed.apply(loss, torch.full_like(loss, 0.5))


@replaces("transform", DataModule)
def labels_masked_by_the_loader(transform: Any, self: Any, batch: Batch) -> Batch:
    """Before the loader pins the batch."""
    batch = transform(self, batch)
    labels = batch["labels"].clone()
    labels[:, ::5] = -100
    return batch | {"labels": labels, "weights": torch.ones(labels.shape)}


@of_loss
def host_scalar_as_a_factor(self: Any, loss: Tensor, batch: Batch) -> Tensor:
    """CUDA takes a host tensor without dimensions."""
    return loss * torch.tensor(0.5)


def loader_with_pinned_memory() -> None:
    """Of batches that training and validation read; a mean over ranks in each step would wait."""

    def loader(rows: Any, self: Any) -> DataLoader:
        is_on_gpu = torch.cuda.is_available()
        return DataLoader(rows(self).dataset, self.batch_size, pin_memory=is_on_gpu)

    def log(log: Any, self: Any, name: str, value: Tensor, **options: Any) -> None:
        log(self, name, value, sync_dist=name.startswith("val"))

    for name in ("train_dataloader", "val_dataloader"):
        replaces(name, Images)(loader)()
    replaces("log", PlainClassifier)(log)()
