"""The next token: each token is predicted from those before it, by cross-entropy.

Where logits exist (of a micro-batch, of a chunk of it, in a pipeline's last stage), two functions
are called, in this order:

    TextModule.sums    the loss of some tokens' logits; a user's module overrides it
    blend              what is minimized in its place; an objective overrides it

An objective that changes the loss of a token overrides `blend`, and works under every strategy.

Shapes: B sequences, T tokens of a sequence, V vocabulary."""

from typing import Any

from torch import Tensor

from ..model.head import ChunkedLoss, without_head
from .objective import Batch, Objective, Sums

__all__ = ["NextToken"]


class NextToken(Objective):
    """Cross-entropy of the next token."""

    def blend(self, sums: Sums, logits: Tensor, labels: Tensor) -> Sums:
        """Returns what is minimized and what is logged of some tokens.

        Args:
            sums: What `TextModule.sums` returns for them: the first is minimized otherwise, `loss`
                is the cross-entropy.
            logits: (…, V), in the type in which the network computes them.
            labels: (…), already shifted; -100 does not count."""
        return sums

    def chunked_loss(self, module: Any) -> ChunkedLoss:
        return ChunkedLoss(module.model, module.sums, module.loss_chunk, blend=self.blend)

    def sums(self, module: Any, batch: Batch) -> Sums:
        labels = batch["labels"]
        if not module.chunked_loss.applies_to(labels):
            return self.sums_at_once(module, module(batch), labels)
        with without_head(module.model) as hidden_states:
            hidden = hidden_states(module(batch))
        return module.chunked_loss(hidden, labels)

    def sums_at_once(self, module: Any, logits: Tensor, labels: Tensor) -> Sums:
        """Returns what `chunked_loss` returns, of logits that are all in memory."""
        return self.blend(module.sums(logits, labels), logits, labels)
