"""What a language model learns, as one class: `Objective`.

TextModule, the data and the verbs know no objective by name. They ask the one that a training has,
in this order:

    before the start    refusals, fixed_settings, rate_share
    the data            reads_ends, and which kind of source it `learns_from`
    the network         add_state, extend; attach: frozen models beside it, and the loss in chunks
    a micro-batch       extend_batch on the device, then sums, of which the first is minimized
    a log step          derive
    an evaluation       count, summarize
    verbs               plan: frozen_parameters, in_chunks, own_blocks, forwarding, copied
                        rehearse: phases, frozen_weights, and what it learns from
                        evaluate: values or figures, measures, keys_without
                        export: task, part

Three classes have all of it for their kind, and an objective of a package derives from one of them:
`NextToken` (next_token.py) for losses of tokens, `Pairs` (pairs.py) for losses of two answers to a
prompt, and `Objective` itself for anything else. docs/extend.md has a complete one.

Shapes: B sequences, T tokens of a sequence, P pairs of a micro-batch, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from ...model.metrics import NOT_COUNTED
from ...project import Choice
from ..model.head import ChunkedLoss
from ..model.reward import refuse_reward_model
from .frozen import add_frozen

if TYPE_CHECKING:
    from ...parallel.configured import Configured

Batch = dict[str, Tensor]
Sums = dict[str, Tensor]
Source = Literal["texts", "pairs", "ratings"]


class Measure(NamedTuple):
    """A measure that `evaluate` compares: a sum of values over a sum of weights.

    Attributes:
        values: The name of one of the objective's `values`, or of its `figures`.
        weights: Of its `figures`. "": each document counts once.
        lower_is_better: Whether the model with the smaller value is better."""

    values: str
    weights: str = ""
    lower_is_better: bool = False


class Part(NamedTuple):
    """A part of the network that training needs and `export` may leave out.

    Attributes:
        name: Of the submodule, and of the flag of `export`.
        help: Of the flag."""

    name: str
    help: str


class Objective(Choice):
    """What a language model learns. Define `sums`; see the file's header for the rest.

    The arguments of `__init__`, which it keeps as attributes of the same names, are the keys of
    `model.objective.init_args`."""

    key: ClassVar[str] = "model.objective"  # that chooses it
    learns_from: ClassVar[Source] = "texts"  # which sources of `data.source` it needs
    reads_ends: ClassVar[bool] = False  # whether the last token of a sequence is an input too
    # Whether a step is one forward pass of the network, whose sums are sums over tokens: a pipeline
    # computes nothing else.
    is_one_pass: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True  # whether `model.loss_chunk` bounds the logits in memory
    is_cross_entropy: ClassVar[bool] = True  # whether exp(loss) is a perplexity
    unit: ClassVar[Literal["tokens", "documents"]] = "tokens"  # what a mean is a mean over
    no_text: ClassVar[str] = ""  # why its models generate no text
    task: ClassVar[str] = "text-generation"  # as the Hugging Face hub names it
    part: ClassVar[Part | None] = None
    measures: ClassVar[Mapping[str, Measure]] = {}  # that `evaluate` compares besides the loss
    figures: ClassVar[tuple[str, ...]] = ()  # columns that those of `measures` need
    phases: ClassVar[tuple[str, ...]] = ()  # keys of `model` that may be phases by tokens
    frozen_weights: ClassVar[tuple[str, ...]] = ()  # keys of `model` that name a frozen model's
    no_better: ClassVar[str] = ""  # a cause where the model is no better than a unigram model

    @property
    def label(self) -> str:
        """Names it in a strategy's refusal."""
        return self.key

    # ---- before the start ------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each setting of a training that cannot work with it."""
        kind = source_kind(setup.data)
        if kind == self.learns_from:
            return
        if self.learns_from == "texts":
            yield (
                f"{self.key} learns from texts or conversations, and data.source yields {kind}:"
                " remove one"
            )
        else:
            name = {"pairs": "Preferences", "ratings": "Ratings"}[self.learns_from]
            yield f"{self.key} learns from {self.learns_from}: set data.source {name}"

    def fixed_settings(self) -> dict[str, object]:
        """Returns the settings that change the loss, which a resume compares: the arguments of
        `__init__` that are plain values."""
        settings: dict[str, object] = {}
        for name in signature(type(self)).parameters:
            value = getattr(self, name, None)
            if value is None or isinstance(value, str | int | float | list | tuple | dict):
                settings[f"{self.key}.{name}"] = value
        return settings

    def rate_share(self, steps: float) -> float:
        """Returns which share of a fine-tuning's usual learning rate `model.optim.learning_rate`
        auto takes in a training of `steps`."""
        return 1.0

    # ---- the network -----------------------------------------------------------------------------

    def add_state(self, module: Any) -> None:
        """Adds submodules to `module`, the LightningModule, that checkpoints keep besides the
        network. Called in its `__init__`."""

    def extend(self, module: Any, network: nn.Module, data: Any) -> nn.Module:
        """Returns the network with what the objective needs in it, on torch's meta device. Raises
        InputError if it cannot have it."""
        refuse_reward_model(network, getattr(module, "pretrained", None))
        return network

    def frozen_model(self, module: Any) -> Callable[[], nn.Module] | None:
        """Returns what builds a frozen model, which is placed beside the network by its own
        strategy as `module.reference`; None: there is none."""
        return None

    def attach(self, module: Any) -> None:
        """Adds what needs the placed network: the frozen model, and the loss in chunks."""
        build = self.frozen_model(module)
        if build is not None:
            add_frozen(module, build)
        module.chunked_loss = self.chunked_loss(module)

    def chunked_loss(self, module: Any) -> ChunkedLoss:
        return ChunkedLoss(module.model, module.sums, module.loss_chunk)

    # ---- a micro-batch ---------------------------------------------------------------------------

    def extend_batch(self, module: Any, batch: Batch) -> Batch:
        """Returns a batch on its device with what the network is given besides its rows."""
        return batch

    def sums(self, module: Any, batch: Batch) -> Sums:
        """Returns sums over the tokens, or other units, of a micro-batch by name. The first is
        minimized, the others are metrics; only the first is differentiable. One of them is `loss`,
        by which runs are compared.

        `evaluate` takes the cross-entropy of each document where `module.sums` is called; an
        objective that does not call it sets `unit` to documents and defines `values`."""
        raise NotImplementedError(f"{type(self).__name__} has no sums: define it")

    # ---- metrics ---------------------------------------------------------------------------------

    def count(self, batch: Batch) -> Tensor:
        """Returns (), over how many units `sums` of a micro-batch are."""
        return (batch["labels"] != NOT_COUNTED).sum()

    def derive(self, module: Any, metrics: dict[str, float]) -> None:
        """Adds metrics of training that follow from its means, at a log step."""
        if self.is_cross_entropy and "train/loss" in metrics:
            metrics["train/perplexity"] = perplexity(metrics["train/loss"])

    def summarize(self, means: dict[str, float]) -> None:
        """Adds metrics of an evaluation that follow from its means, by names without a prefix."""
        if self.is_cross_entropy:
            means["perplexity"] = perplexity(means["loss"])

    # ---- plan ------------------------------------------------------------------------------------

    def frozen_parameters(self, module: Any, data: Any, trained: int) -> tuple[int, int]:
        """Returns how many parameters of frozen models a step multiplies by, and how many are
        stored besides the network's, which has `trained` parameters."""
        return 0, 0

    def own_blocks(self, network: nn.Module) -> int:
        """Returns how many of the network's blocks, the last ones, are the objective's own."""
        return 0

    def forwarding(self, network: nn.Module, tokens: Tensor) -> AbstractContextManager[object]:
        """Returns a context in which a forward pass of `tokens` (B, T) alone is training's."""
        return nullcontext()

    def copied(self, network: nn.Module) -> None:
        """Mends references in a deep copy of the network."""

    # ---- evaluate --------------------------------------------------------------------------------

    def values(self, module: Any, batch: Batch) -> Sums:
        """Returns values (P,) of a micro-batch's documents by name, where `unit` is documents; the
        first is the loss."""
        raise NotImplementedError(f"{type(self).__name__} has no values of documents")

    def newest_figures(self) -> Tensor:
        """Returns `figures` of the newest batch of an evaluation at each position, (F, B, T)."""
        raise NotImplementedError(f"{type(self).__name__} has no figures of tokens")

    def keys_without(self, config: Any) -> dict[str, object]:
        """Returns keys of `model` with which published weights of the transformers configuration
        `config` are evaluated, if they lack a part of the network."""
        return {}


def objective_of(module: object) -> Objective | None:
    """Returns what a placed module learns; None: it is not a TextModule."""
    objective = getattr(module, "active_objective", None)
    return objective if isinstance(objective, Objective) else None


def objective_for(module: object, data: object) -> Objective | None:
    """Returns what a module that need not be placed learns from a datamodule; None: it is not a
    TextModule."""
    find = getattr(module, "objective_for", None)
    return find(data) if callable(find) else None


def source_kind(data: object) -> Source:
    """Returns which kind of documents a datamodule's source yields."""
    source = getattr(data, "source", None)
    if getattr(source, "ratings", False):
        return "ratings"
    if getattr(source, "pairs", False):
        return "pairs"
    return "texts"


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows


def is_objective(value: object) -> bool:
    """a subclass of dist_template.text.Objective"""
    return isinstance(value, type) and issubclass(value, Objective)
