"""The model, its loss and its metrics. Edit this file.

    to change           edit
    the model           `model.architecture`, `model.pretrained` in YAML; `build_model` for your own
    inputs and outputs  `forward`, and `transform` in data.py
    the loss            `loss`
    a metric            `sums` for a mean per token; `self.track` in `training_step` for others
    the optimizer       `model.optim` in YAML, --optimizer, --lr_scheduler; `configure_optimizers`
    your own callback   `configure_callbacks`

This file is hardware-independent: strategy, precision, devices and accumulation are set in YAML.
The base class, a LightningModule, has evaluation, generation and logging: override methods here.

Shapes: B sequences, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from dist_template import BalanceConfig, BlockConfig, OptimConfig
from dist_template.text import Attention, TextModule, causal_lm, causal_lm_config, known_documents
from lightning.pytorch import Callback
from torch import Tensor, nn

# DeepSeek-V3 (multi-head latent attention, mixture of experts) at a size that learns on a CPU.
SMALL_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
}


class LanguageModule(TextModule):
    """A transformers causal language model with next-token loss.

    Args:
        architecture: A transformers configuration, trained from scratch: `model_type` and any
            of its fields; under `extra`, keys that only your own model reads. The data set the
            vocabulary, sequence length and EOS token. Not used when `pretrained` is set.
        pretrained: A local folder or hub name to load weights from. null starts from scratch.
        attention: The attention kernel; flash_attention_2 and 3 need packages of that name.
            null: sdpa where the model supports it, else eager.
        optim: Optimizer and schedule.
        blocks: Activation checkpointing and compilation, block by block.
        balance: Load balancing of a mixture of experts.
        options: loss_chunk, sample_tokens, sample_temperature: see TextModule.
    """

    def __init__(
        self,
        architecture: dict[str, Any] = SMALL_DEEPSEEK_V3,
        pretrained: str | None = None,
        attention: Attention | None = None,
        optim: OptimConfig = OptimConfig(),  # noqa: B008  (a dataclass that nothing mutates)
        blocks: BlockConfig = BlockConfig(),  # noqa: B008
        balance: BalanceConfig = BalanceConfig(),  # noqa: B008
        **options: Any,
    ) -> None:
        super().__init__(optim=optim, blocks=blocks, balance=balance, **options)
        self.architecture = architecture
        self.pretrained = pretrained
        self.attention = attention

    def build_config(self, data: Any) -> Any:
        """Returns the transformers configuration, checked before a start; None for other models."""
        return causal_lm_config(self.architecture, self.pretrained, self.attention, data)

    def build_model(self, data: Any) -> nn.Module:
        """Returns the network, for `data.vocab_size` and `data.seq_len`: return your own here."""
        return causal_lm(self.build_config(data), self.pretrained, data.vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns (B, T, V) logits of (B, T) tokens.

        Keep `use_cache=False` and pass no attention mask: otherwise transformers ignores the
        document boundaries in the positions, and packed documents attend to each other.
        """
        with known_documents(self.model, batch, self.blocks.compile) as known:
            tokens, positions = batch["input_ids"], batch["position_ids"]
            output = self.model(input_ids=tokens, position_ids=positions, use_cache=False, **known)
            return output.logits

    def loss(self, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        """Returns the values (B*T,) whose sum training minimizes, 0 where the label is -100.

        Change it for label smoothing or a penalty on logits. Its mean is then logged as
        train/objective; train/loss, eval/loss, perplexity and bits per byte still follow
        `cross_entropy`.
        """
        return cross_entropy

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns sums over (some) tokens by name: the first is minimized, the others are metrics.

        A further entry `"name": sum` is logged as its mean per token: train/name, eval/name,
        test/name. `labels` (B, T) are already shifted; -100 does not count.
        """
        targets = labels.flatten()
        cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        minimized = self.loss(logits, labels, cross_entropy)
        objective = {} if minimized is cross_entropy else {"objective": minimized.sum()}
        return objective | {
            "loss": cross_entropy.sum(),
            "token_accuracy": (logits.detach().argmax(-1) == labels).sum(),
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # Every strategy averages gradients over ranks and micro-batches. Dividing by the mean token
        # count of the global batch's micro-batches, not this one, gives the mean per counted token.
        num_tokens = batch["tokens_per_micro_batch"]
        means = {name: total / num_tokens for name, total in self.sums_of(batch).items()}
        for name, mean in means.items():
            self.track(f"train/{name}", mean)
        loss = next(iter(means.values()))
        for name, weight, value in self.balancer.losses(batch):  # auxiliary losses of MoE routers
            self.track(name, value)
            loss = loss + weight * value
        return loss

    def configure_optimizers(self) -> Any:
        """Returns `model.optim`'s optimizer and schedule; replace it for other parameter groups."""
        return super().configure_optimizers()

    def configure_callbacks(self) -> list[Callback]:
        """Returns your own callbacks; YAML's `trainer.callbacks` are added to them."""
        return []
