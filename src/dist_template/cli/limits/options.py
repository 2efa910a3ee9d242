"""Options of the Trainer that are refused, with their replacements; values without an effect."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from ...compat.lightning import logs_graph
from ...errors import InputError
from ...model.any_module import owns_order
from ...model.optim import OptimConfig
from ...parallel.configured import without_effect
from ...parallel.mesh.spec import MeshSpec
from ...parallel.spec.refusals import manual_refusal
from ...parallel.zero.spec import ZeroSpec
from .machine import Setup

# Key: the value that is allowed, and what to do instead of another.
REPLACED: dict[str, tuple[Any, str]] = {
    "overfit_batches": (0.0, "set data.repeat_first_batch true, as --config preset/overfit does"),
    "barebones": (False, "it forbids loggers, checkpoints and callbacks: remove the key"),
    "use_distributed_sampler": (False, "the data module shards the samples: remove the key"),
    "model_registry": (None, "remove the key, and give --ckpt_path a folder"),
}
OF_AN_ORDER = ("overfit_batches", "use_distributed_sampler")  # the Trainer's without an order

# Callbacks that change training in a way that a resume, or several ranks, would not have, and what
# to do instead: with model.optim and a data module that orders the samples, and without.
REFUSED_CALLBACKS: dict[type[Callback], tuple[str, ...]] = {
    StochasticWeightAveraging: (
        "set model.optim.schedule warmup_stable_decay, or use EMAWeightAveraging",
        "use EMAWeightAveraging",
    ),
    LearningRateFinder: (
        "compare runs with different model.optim.learning_rate by the verb `compare`",
        "compare runs with different rates by the verb `compare`",
    ),
    BatchSizeFinder: (
        "compare runs with different data.micro_batch_size by the verb `compare`",
        "compare runs with different batch sizes by the verb `compare`",
    ),
    GradientAccumulationScheduler: ("give phases of data.global_batch_size", ""),
    # It fails when a checkpoint is loaded (lightning 2.6.6: 'no attribute "running"').
    SpikeDetection: ("set numerics.on_spike stop or skip",) * 2,
    # Lightning's checkpoints have neither its masks nor the weights below them.
    ModelPruning: ("prune the trained model by torch.nn.utils.prune",) * 2,
}
# Callbacks that change the optimizer's groups of parameters, or the accumulation, in training.
CHANGE_STEPS: tuple[type[Callback], ...] = (BaseFinetuning, GradientAccumulationScheduler)


def replaced_keys(setup: Setup) -> Iterator[str]:
    for key, (allowed, instead) in REPLACED.items():
        if key in OF_AN_ORDER and not owns_order(setup.data):
            continue
        given = setup.trainer.get(key, allowed)
        if given != allowed:
            yield f"trainer.{key} {str(given).lower()} is not supported: {instead}"


def callbacks(setup: Setup) -> Iterator[str]:
    is_of_text = setup.optim is not None and owns_order(setup.data)
    spec = setup.spec
    for callback in setup.callbacks:
        for kind, instead in REFUSED_CALLBACKS.items():
            cure = instead[0] if is_of_text else instead[1]
            if isinstance(callback, kind) and cure:
                yield f"trainer.callbacks: {kind.__name__} is not supported: {cure}"
        name = type(callback).__name__
        if not spec.is_replicated and isinstance(callback, WeightAveraging):
            yield (
                f"trainer.callbacks: {name} does not work under {spec.name}, which shards the"
                " model: use --config strategy/ddp, or remove the callback"
            )
        elif isinstance(spec, ZeroSpec) and isinstance(callback, CHANGE_STEPS):
            yield (
                f"trainer.callbacks: {name} does not work under {spec.name}, whose groups of"
                " parameters and accumulation are fixed when training starts: use --config"
                " strategy/fsdp2 or strategy/ddp, or remove the callback"
            )


def saves_on_exceptions(setup: Setup) -> Iterator[str]:
    """Callbacks that save when a rank fails. The rank is alone in that, and saving needs all: it
    would wait for the others, which wait for it in another collective, or write a part."""
    if setup.machine.world_size == 1 or not setup.trains:
        return
    for callback in setup.callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            name += " with save_on_exception"
        elif not isinstance(callback, OnExceptionCheckpoint):
            continue
        yield (
            f"trainer.callbacks: {name} does not work on {setup.machine.world_size} processes, of"
            " which one may fail alone, while all save together: remove it, and lower"
            " last_checkpoint.every_n_steps"
        )


def flags(setup: Setup) -> Iterator[str]:
    """Flags of Lightning's Trainer that some strategies do not read, or cannot work with."""
    spec = setup.spec
    if setup.trainer.get("sync_batchnorm") and not spec.is_replicated:
        yield (
            f"trainer.sync_batchnorm true has no effect under {spec.name}: use --config"
            " strategy/ddp, or convert the layers in the module's __init__ by"
            " torch.nn.SyncBatchNorm.convert_sync_batchnorm and remove the key"
        )
    if setup.trainer.get("enable_checkpointing") is False:
        for callback in setup.callbacks:
            if isinstance(callback, Checkpoint):
                yield (
                    "trainer.enable_checkpointing is false, and trainer.callbacks has"
                    f" {type(callback).__name__}, which saves: remove one of them"
                )
    loggers = setup.trainer.get("logger")
    has_example = setup.module.example_input_array is not None
    if isinstance(spec, MeshSpec) and has_example and isinstance(loggers, list):
        for logger in loggers:
            if logs_graph(logger):
                yield (
                    f"trainer.logger: {type(logger).__name__} with log_graph true does not work"
                    f" under {spec.name}, whose shards torch cannot trace: set log_graph false,"
                    " or use --config strategy/ddp"
                )
    on_gpu = setup.machine.accelerator != "cpu"  # gloo: Lightning takes no_grad
    if setup.trainer.get("inference_mode") and on_gpu and isinstance(spec, MeshSpec):
        yield (
            f"trainer.inference_mode true does not work under {spec.name}, whose sharded"
            " parameters torch cannot gather in that mode: remove the key"
        )


def manual_optimization(setup: Setup) -> Iterator[str]:
    """The module steps by itself: an engine, or a pipeline, has steps of its own."""
    if not setup.trains or setup.module.automatic_optimization:
        return
    try:
        why = setup.spec.why_not_manual(setup.machine.world_size)
    except InputError:
        return  # the strategy reports that its sizes do not fit
    if why:
        yield manual_refusal(type(setup.module).__name__, why)


def ignored(setup: Setup) -> Iterator[str]:
    """Keys of AdamW that another optimizer does not read. Muon has AdamW beside it."""
    if not setup.trains or setup.optim is None:
        return
    chosen = setup.optim.optimizer_class
    name = chosen["class_path"].rpartition(".")[2] if chosen else ""
    if name not in ("", "Muon"):
        why = f"--optimizer {name} has its own: give --optimizer.KEY, if it has that key"
        yield from without_effect("model.optim", setup.optim, {"betas", "eps", "optimizer"}, why)
    yield from _of_the_schedule(setup.optim)


def _of_the_schedule(optim: OptimConfig) -> Iterator[str]:
    """Keys of a schedule that another one does not read. --lr_scheduler and phases replace them
    all, and `warmup` and `schedule` with them: files that come with this library set those."""
    section = "model.optim"
    if optim.lr_scheduler_class or isinstance(optim.learning_rate, list):
        unread = {"min_learning_rate_share", "decay_share"}
        instead = "--lr_scheduler" if optim.lr_scheduler_class else f"{section}.learning_rate"
        yield from without_effect(section, optim, unread, f"{instead} replaces the schedule")
        return
    why = f"{section}.schedule is {optim.schedule}: set"
    if optim.schedule != "warmup_stable_decay":
        yield from without_effect(section, optim, {"decay_share"}, f"{why} warmup_stable_decay")
    if optim.schedule not in ("cosine", "warmup_stable_decay"):
        yield from without_effect(section, optim, {"min_learning_rate_share"}, f"{why} cosine")
