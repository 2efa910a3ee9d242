"""TextModule: a TrainingModule for language models, with loss in chunks, evaluation and generation.

Shapes: B sequences, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..model.head import ChunkedLoss, Kernel, check_kernel, without_head
from ..model.metrics import SplitMeans
from ..model.training_module import TrainingModule
from ..parallel import run_strategy
from .batches.rows import PAIRS
from .preference_loss import PreferenceConfig, add_reference, has_pairs, pair_sums


class TextModule(TrainingModule):
    """Base class of a language model's module: `forward` gives logits, `loss` a value per token.

    Args:
        loss_chunk: Tokens whose logits are in memory at a time. null: those of the micro-batch, for
            a model that changes its logits after the output layer.
        loss_kernel: What computes the loss. liger: Liger's fused kernel, a separate package for
            GPUs, in chunks that it chooses; it computes cross entropy itself and does not call
            `loss` and `sums`.
        preference: The loss of pairs, which data.source Preferences yields in place of texts.
        sample_tokens: Tokens that `generate` appends to a prompt.
        sample_temperature: Randomness of `generate`. 0 takes the most probable token each time.
        options: See TrainingModule.
    """

    sums_on_last_stage = True  # of a pipeline: validation waits for no other stage

    def __init__(
        self,
        loss_chunk: int | None = 4096,
        loss_kernel: Kernel = "torch",
        preference: PreferenceConfig = PreferenceConfig(),  # noqa: B008  (nothing changes it)
        sample_tokens: int = 64,
        sample_temperature: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.loss_chunk = loss_chunk
        self.loss_kernel: Kernel = loss_kernel
        self.preference = preference
        self.sample_tokens = sample_tokens
        self.sample_temperature = sample_temperature

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            check_kernel(self.loss_kernel, self.device)
            super().configure_model()
            if self.blocks.compile:  # one pass over the logits forward, one backward, not a dozen
                self.sums = torch.compile(self.sums)
            self.chunked_loss = ChunkedLoss(
                self.model, self.sums, self.loss_chunk, self.loss_kernel
            )
            add_reference(self)

    def fixed_settings(self, data: Any) -> dict[str, Any]:
        keys = ("loss", "beta", "margin") if has_pairs(data) else ()
        values = {f"model.preference.{key}": getattr(self.preference, key) for key in keys}
        return super().fixed_settings(data) | values

    # ---- loss and metrics ------------------------------------------------------------------------

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns sums over all or some tokens by name: the first is minimized, the others are
        metrics.

        `labels` (B, T) are already shifted; -100 does not count.
        """
        cross_entropy = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        return {
            "loss": cross_entropy.sum(),
            "token_accuracy": (logits.detach().argmax(-1) == labels).sum(),
        }

    def sums_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `sums` over all tokens, or pairs, of a micro-batch. Only the first is
        differentiable."""
        if PAIRS in batch:
            return pair_sums(self, batch)
        if not self.chunked_loss.applies_to(batch["labels"]):
            return self.sums(self(batch), batch["labels"])
        with without_head(self.model) as hidden_states:
            hidden = hidden_states(self(batch))
        return self.chunked_loss(hidden, batch["labels"])

    def derive(self, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics and "train/rewards/margin" not in metrics:
            metrics["train/perplexity"] = _perplexity(metrics["train/loss"])

    def on_validation_epoch_start(self) -> None:
        self.split_means, self.source_means = SplitMeans(), defaultdict(SplitMeans)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # the last batch may be padded, so that all ranks have equally many
        counted = (batch["labels"] != -100).sum()
        if PAIRS in batch:
            counted = torch.full_like(counted, len(batch[PAIRS]))
        sums = self.sums_of(batch)
        self.split_means.add(sums, counted)
        if source := getattr(self.data, "source_name", ""):  # one of a mixture's
            self.source_means[source].add(sums, counted)

    def on_validation_epoch_end(self) -> None:
        self._log_split("eval", "validation")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_split("test", "test")

    def _log_split(self, prefix: str, split: str) -> None:
        means = run_strategy(self.trainer.strategy).layers.from_last(partial(self._means, split))
        self.log_eval({f"{prefix}/{name}": mean for name, mean in means.items()})

    def _means(self, split: str) -> dict[str, float]:
        means = self.split_means.read(self.trainer.strategy)
        loss = means["loss"]
        if "rewards/margin" not in means:
            means["perplexity"] = _perplexity(loss)
        if bytes_per_token := self.data.bytes_per_token(split):
            means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        for source, sums in sorted(self.source_means.items()):
            own = sums.read(self.trainer.strategy)
            means |= {f"{source}/{name}": mean for name, mean in own.items()}
        return means

    # ---- text out --------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, input_ids: Tensor) -> Tensor:
        """Tokens (1, T + n), n <= `sample_tokens`, within `seq_len`; keeps training's RNG state."""
        if not hasattr(self.model, "generate"):
            raise InputError(
                f"{type(self.model).__name__} has no generate: write {type(self).__name__}.generate"
            )
        sampling = (
            {"do_sample": True, "temperature": self.sample_temperature}
            if self.sample_temperature
            else {"do_sample": False}  # published weights may come with sampling switched on
        )
        room = max(1, self.data.seq_len - input_ids.shape[1])
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            return self.model.generate(  # ty: ignore[not-callable]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=min(self.sample_tokens, room),
                pad_token_id=self.data.eos_token_id,
                **sampling,
            )

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, str]:
        tokens = self.generate(batch["input_ids"])[0, batch["input_ids"].shape[1] :]
        return {
            "prompt": batch["prompt"],
            "continuation": self.data.text_tokenizer.decode(tokens.tolist()),
        }


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows
