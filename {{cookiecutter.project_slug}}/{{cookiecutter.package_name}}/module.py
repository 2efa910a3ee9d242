"""What is trained: the model, its loss and its metrics. This file is yours to edit.

Three edits, each in one place:
    another model           `architecture` or `pretrained` in the YAML; `build_model` for one of your own
    other inputs/outputs    `build_model` (the vocabulary is resized there) and `forward`
    another loss or metric  `loss` is minimized; a metric of tokens is one line in `sums`, any other training metric one
                            line in `training_step`: `self.track(name, value)`

The machine is not mentioned here: strategy, precision, devices, accumulation and checkpoints are configuration.

Shapes: B sequences, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from dist_template.errors import InputError, reason
from dist_template.layout import clip_by_norm
from dist_template.model.architecture_keys import checked_fields
from dist_template.model.balance import BalanceConfig, Balancer
from dist_template.model.head import Kernel, check_kernel, sums_over_tokens
from dist_template.model.kernels import Attention, cast_experts, known_documents, set_attention
from dist_template.model.metrics import MetricBuffer, SplitMeans
from dist_template.model.optim import OptimConfig, build_optimizer, build_schedule
from dist_template.model.pretrained import check_files, load_pretrained
from dist_template.parallel.blocks import BlockConfig
from dist_template.parallel.place import place
from torch import Tensor, nn

# DeepSeek-V3's architecture (multi-head latent attention, mixture of experts) at a size that learns on a CPU.
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


class LanguageModule(L.LightningModule):
    """A transformers causal language model with next-token loss.

    Args:
        architecture: A transformers configuration: `model_type` and any of its fields; under `extra`, keys that only
            your own model reads. Vocabulary, sequence length and end-of-document token come from the data. Trained from
            scratch. Not used when `pretrained` is set.
        pretrained: A local folder or hub name to load weights from. null starts from scratch.
        attention: The kernel, see kernels.py; flash_attention_2 and 3 are packages of their own. null: sdpa where the
            model can, else eager.
        optim: Optimizer and schedule.
        blocks: Activation checkpointing and compilation, block by block.
        balance: Load balancing of a mixture of experts.
        loss_chunk: Tokens whose logits exist at a time: with a large vocabulary they hold more memory than all else.
            Has an effect on micro-batches of more tokens. null: all at once, for a model that changes its logits after
            the output layer.
        loss_kernel: What computes the loss. liger: Liger's fused kernel, a package of its own for GPUs, in chunks that
            it chooses; it computes cross entropy itself, `loss` and `sums` below are not asked.
        sample_tokens: Tokens that `generate` writes for a prompt.
        sample_temperature: Randomness of `generate`. 0 takes the likeliest token each time.
    """

    model: nn.Module

    def __init__(
        self,
        architecture: dict[str, Any] = SMALL_DEEPSEEK_V3,
        pretrained: str | None = None,
        attention: Attention | None = None,
        optim: OptimConfig = OptimConfig(),  # noqa: B008  (a dataclass that nothing mutates)
        blocks: BlockConfig = BlockConfig(),  # noqa: B008
        balance: BalanceConfig = BalanceConfig(),  # noqa: B008
        loss_chunk: int | None = 4096,
        loss_kernel: Kernel = "torch",
        sample_tokens: int = 64,
        sample_temperature: float = 0.8,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.pretrained = pretrained
        self.attention = attention
        self.optim = optim
        self.blocks = blocks
        self.balance = balance
        self.loss_chunk = loss_chunk
        self.loss_kernel: Kernel = loss_kernel
        self.sample_tokens = sample_tokens
        self.sample_temperature = sample_temperature
        self.metrics = MetricBuffer()
        self.eval_metrics: dict[str, float] = {}  # of the newest validation or test, for callbacks

    # ---- the model ---------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the model once, when the data, and with it the vocabulary, is known, and put it in its place."""
        if not hasattr(self, "model"):
            check_kernel(self.loss_kernel, self.device)
            cast_experts()
            self.model = place(lambda: self.build_model(self.data), self.trainer.strategy, self.blocks).train()
            self.balancer = Balancer(self.model, self.balance)
            if self.blocks.compile:  # one pass over the logits forward, one backward, where there are a dozen
                self.sums = torch.compile(self.sums)

    def build_model(self, data: Any) -> nn.Module:
        """The network, with room for `data.vocab_size` tokens and sequences of `data.seq_len`.

        Only rank 0 builds it with weights, which the others then receive; on those torch's default device is `meta`.
        """
        from transformers import AutoModelForCausalLM

        config = self.build_config(data)
        # Published embeddings are often padded beyond their tokenizer; only a larger vocabulary needs new rows.
        if not self.pretrained or torch.get_default_device().type == "meta":
            config.vocab_size = max(config.vocab_size, data.vocab_size)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = load_pretrained(self.pretrained, config)
        embeddings: Any = model.get_input_embeddings()
        if embeddings.num_embeddings < data.vocab_size:
            model.resize_token_embeddings(data.vocab_size)
        return model

    def build_config(self, data: Any) -> Any:
        """The transformers configuration; also called before any process starts, to find mistakes early.

        Raises:
            InputError: there is no such model or architecture.
        """
        from transformers import AutoConfig

        if self.pretrained:
            try:
                config = AutoConfig.from_pretrained(self.pretrained, trust_remote_code=False)
                check_files(self.pretrained)
                return set_attention(config, self.attention)
            except InputError:
                raise
            except (OSError, ValueError) as error:
                raise InputError(f"model.pretrained {self.pretrained!r} cannot be loaded: {reason(error)}") from error
        fields = {"max_position_embeddings": data.seq_len, **checked_fields(self.architecture)}
        fields |= {"vocab_size": data.vocab_size, "bos_token_id": data.eos_token_id, "eos_token_id": data.eos_token_id}
        model_type: Any = self.architecture.get("model_type")
        try:
            config = AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # each architecture refuses in its own way
            raise InputError(f"model.architecture with model_type {model_type!r}: {reason(error)}") from error
        return set_attention(config, self.attention)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, T) tokens to (B, T, V) logits.

        `use_cache=False` and no attention mask: only so does transformers read document boundaries off the
        positions; with either, packed documents see each other.
        """
        with known_documents(self.model, batch, self.blocks.compile) as known:
            tokens, positions = batch["input_ids"], batch["position_ids"]
            return self.model(input_ids=tokens, position_ids=positions, use_cache=False, **known).logits

    # ---- loss and metrics --------------------------------------------------------------------------------------

    def loss(self, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        """Returns what training minimizes: (B*T,) values, 0 where the label is -100.

        Change it for label smoothing or a penalty on logits: train/loss, eval/loss, perplexity and bits per byte are
        means of `cross_entropy` all the same; the mean of what is returned here is then train/objective.
        """
        return cross_entropy

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns sums over all or some tokens by name: the first is minimized, the others are metrics.

        A further line `"name": sum` is logged as its mean per token: train/name, eval/name, test/name. `labels` (B, T)
        are already shifted, -100 where none counts.
        """
        cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        minimized = self.loss(logits, labels, cross_entropy)
        objective = {} if minimized is cross_entropy else {"objective": minimized.sum()}
        return objective | {
            "loss": cross_entropy.sum(),
            "token_accuracy": (logits.detach().argmax(-1) == labels).sum(),
        }

    def sums_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `sums` over a whole micro-batch. Only the first is differentiable."""
        how = self.sums, self.loss_chunk, self.loss_kernel
        return sums_over_tokens(lambda: self(batch), self.model, batch["labels"], *how)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["tokens_per_micro_batch"]  # that count, over the global batch: not `.mean()` of this micro-batch
        means = {name: total / tokens for name, total in self.sums_of(batch).items()}
        for name, mean in means.items():
            self.track(f"train/{name}", mean)
        loss = next(iter(means.values()))
        for name, weight, value in self.balancer.losses(batch):  # of a mixture of experts' routers, see balance.py
            self.track(name, value)
            loss = loss + weight * value
        return loss

    def track(self, name: str, value: Tensor) -> None:
        """Log the mean of `value` over ranks and the steps since the last log step; costs no device sync."""
        self.metrics.add(name, value)

    def derive(self, metrics: dict[str, float]) -> None:
        """Add what follows from the means at a log step."""
        if "train/loss" in metrics:
            metrics["train/perplexity"] = math.exp(min(metrics["train/loss"], 700.0))  # exp(710) overflows

    def on_validation_epoch_start(self) -> None:
        self.split_means = SplitMeans()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        counted = (batch["labels"] != -100).sum()  # the last batch may be padded, so that all ranks have equally many
        self.split_means.add(self.sums_of(batch), counted)

    def on_validation_epoch_end(self) -> None:
        self._log_eval("eval", "validation")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_eval("test", "test")

    def _log_eval(self, prefix: str, split: str) -> None:
        means = self.split_means.read(self.trainer.strategy)
        loss = means["loss"]
        means["perplexity"] = math.exp(min(loss, 700.0))
        if bytes_per_token := self.data.bytes_per_token(split):
            means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        self.eval_metrics = {f"{prefix}/{name}": mean for name, mean in means.items()}
        self.log_dict(self.eval_metrics, logger=False)  # for callbacks to monitor; Lightning would log it a step early
        if not self.trainer.sanity_checking or self.trainer.num_sanity_val_batches == self.trainer.num_val_batches:
            for logger in self.trainer.loggers:
                logger.log_metrics(self.eval_metrics, step=self.global_step)

    # ---- text out ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, input_ids: Tensor) -> Tensor:
        """Continue (1, T) tokens by up to `sample_tokens`, within `seq_len`; keeps training's random state."""
        if not hasattr(self.model, "generate"):
            raise InputError(f"{type(self.model).__name__} has no generate: write LanguageModule.generate for it")
        sampling = {"do_sample": True, "temperature": self.sample_temperature} if self.sample_temperature else {}
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
        return {"prompt": batch["prompt"], "continuation": self.data.text_tokenizer.decode(tokens.tolist())}

    # ---- optimization ------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self, self.optim, scaled=self.trainer.scaler is not None)
        num_steps = self.trainer.estimated_stepping_batches
        steps = self.data.steps_per_validation
        schedule = build_schedule(optimizer, self.optim, num_steps, steps and steps * self.data.accumulation)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm == "value":
            for parameter in self.parameters():  # one by one: under tensor parallelism they lie differently
                torch.nn.utils.clip_grad_value_(parameter, gradient_clip_val)
            gradient_clip_val = None
        norm = clip_by_norm(self.parameters(), gradient_clip_val)
        if norm is not None:  # DeepSpeed clips in its own step, and tells the norm itself
            self.track("train/grad_norm", norm)

    @property
    def data(self) -> Any:
        """The datamodule: vocabulary, tokenizer and sequence length are its."""
        return self.trainer.datamodule  # ty: ignore[missing-attribute]
