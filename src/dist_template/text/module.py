"""TextModule: a TrainingModule for language models, with loss in chunks, evaluation and generation.

Shapes: B sequences, T tokens of a sequence, V vocabulary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ..checkpoint.frozen import exclude_frozen
from ..cli.limits.options import without_effect
from ..errors import InputError
from ..model.any_module import value_now
from ..model.metrics import SplitMeans
from ..model.training_module import TrainingModule
from ..parallel import run_strategy
from ..parallel.configured import NOT_READ_YET
from ..parallel.place import in_full
from . import auto
from .batches.rows import PAIRS
from .model.adapters import AdapterConfig, add_adapters, proof_axes
from .model.causal_lm import checked_fields, freeze_untrained, read_modules
from .model.head import ChunkedLoss, without_head
from .model.mtp import ACCEPTED, COMPARED, MtpConfig, add_modules, sums_with_predictions
from .model.mtp import KEY as MTP_WEIGHT
from .model.mtp import NAME as MTP
from .model.quantize import quantize
from .model.reward import is_reward_model, refuse_reward_model, reward_model
from .objectives.distillation import DistillationConfig, blended, build_teacher, distilled_sums
from .objectives.pairs import (
    Distance,
    PreferenceConfig,
    add_reference,
    build_reference,
    has_pairs,
    needs_copy,
    pair_values,
)

if TYPE_CHECKING:
    from ..cli.limits.machine import Setup


class TextModule(TrainingModule):
    """Base class of a language model's module: `forward` gives logits, `loss` a value per token.

    Args:
        loss_chunk: Tokens whose logits are in memory at a time. null: the micro-batch's, for a
            model that changes its logits after the output layer.
        adapter: Train LoRA adapters and freeze everything else. null: train all weights.
        preference: The loss of pairs, which data.source Preferences yields in place of texts.
        distillation: Learn a teacher's distribution. null: from the data alone.
        mtp: Train modules that predict later tokens. null: none.
        sample_tokens: Tokens that `generate` appends to a prompt.
        sample_temperature: Randomness of `generate`. 0 takes the most probable token each time.
        options: See TrainingModule."""

    sums_on_last_stage = True  # of a pipeline: validation waits for no other stage
    counts_tokens = True  # its Trainer's defaults are a language model's: see cli/defaults.py

    def __init__(
        self,
        loss_chunk: int | None = 4096,
        adapter: AdapterConfig | None = None,
        preference: PreferenceConfig = PreferenceConfig(),  # noqa: B008  (nothing changes it)
        distillation: DistillationConfig | None = None,
        mtp: MtpConfig | None = None,
        sample_tokens: int = 64,
        sample_temperature: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.loss_chunk = loss_chunk
        self.adapter = adapter
        # names and hashes of the weights that are not in checkpoints
        self.frozen_base: dict[str, str] = {}
        self.frozen_reference: dict[str, str] = {}
        self.preference = preference
        self.distillation = distillation
        self.mtp = mtp
        self.reference: nn.Module | None = None
        if preference.loss == "kto":
            self.distance = Distance()
            self.distance.may_be_missing(self)
        self.accepted: Tensor | None = (
            None  # (2, D, B, T) of the newest batch of an evaluation: see model/mtp.py
        )
        self.sample_tokens = sample_tokens
        self.sample_temperature = sample_temperature

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        super().configure_model()
        if self.adapter is not None:
            self.frozen_base = self.frozen.entry(self.frozen_base["name"])
            exclude_frozen(self)
        if self.blocks.compile:  # one pass over the logits forward, one backward, not a dozen
            self.sums = torch.compile(self.sums)
        if self.distillation or needs_copy(self):
            add_reference(
                self, partial(build_teacher if self.distillation else build_reference, self)
            )
        blend = partial(blended, self.distillation) if self.distillation else None
        teacher = self.reference if self.distillation else None
        self.chunked_loss = ChunkedLoss(self.model, self.sums, self.loss_chunk, teacher, blend)

    def build_network(self, data: Any, quantized: bool = True) -> nn.Module:
        """Builds the network of `build_model`, with the adapters of `model.adapter`."""
        model = self.build_base(data)
        if self.mtp is not None:
            add_modules(model)
            if pretrained := getattr(self, "pretrained", None):
                read_modules(model, pretrained)
        if names := freeze_untrained(model):
            others = f" and {len(names) - 1} others" if names[1:] else ""
            _print_once(
                f"note: no gradient reaches {names[0]}{others}: the weights stay as they start"
            )
        if self.adapter is not None:
            model = add_adapters(model, self.adapter)
            self.frozen_base = {"name": getattr(self, "pretrained", None) or type(model).__name__}
            if self.adapter.quantize and quantized:
                quantize(model)
        return model

    def build_on_host(self, data: Any) -> nn.Module:
        model = super().build_on_host(data)
        if self.adapter is not None:
            self.frozen_base = self.frozen.entry(self.frozen_base["name"])
        return model

    def base_on_host(self, data: Any) -> nn.Module:
        """Returns what adapters are added to, likewise."""
        return in_full(partial(self.build_base, data))

    def build_base(self, data: Any) -> nn.Module:
        """Returns the network of `build_model`, with a reward model's head if pairs train one."""
        model = self.build_model(data)
        if self.reads_ends and has_pairs(data):
            return reward_model(model, data)
        refuse_reward_model(model, getattr(self, "pretrained", None))
        return model

    @property
    def reads_ends(self) -> bool:
        """Whether a reward model is trained, which is read at the last token of an answer."""
        return self.preference.loss == "reward"

    @property
    def adapter_axes(self) -> list[str]:
        """Names the adapters in the table of proven models: model/proof.py."""
        return proof_axes(self.adapter) if self.adapter else []

    def refusals(self, setup: Setup) -> Iterator[str]:
        """Yields a sentence for each setting of this module that cannot work."""
        given = getattr(self, "architecture", None)
        is_read = setup.model_config is not NOT_READ_YET or getattr(self, "pretrained", None)
        if isinstance(given, dict) and not is_read:
            # an unknown key, before the data are tokenized; afterwards `build_config` refuses it
            try:
                checked_fields(given)
            except InputError as error:
                yield str(error)
        if setup.trains and not has_pairs(setup.data):
            why = "data.source yields no pairs: set Preferences there"
            yield from without_effect("model.preference", self.preference, {"beta"}, why)
        if setup.trains and self.reads_ends:
            why = "a reward model is compared with no reference: set another model.preference.loss"
            yield from without_effect("model.preference", self.preference, {"beta"}, why)
            if not has_pairs(setup.data):
                yield "model.preference.loss reward learns from pairs: set data.source Preferences"
        if setup.trains and has_pairs(setup.data):
            loss, of_kto = self.preference.loss, {"desirable_weight", "undesirable_weight"}
            if loss != "simpo":
                why = f"model.preference.loss is {loss}: set simpo"
                yield from without_effect("model.preference", self.preference, {"margin"}, why)
            if loss != "kto":
                why = f"model.preference.loss is {loss}: set kto"
                yield from without_effect("model.preference", self.preference, of_kto, why)
        are_ratings = getattr(getattr(setup.data, "source", None), "ratings", False)
        if setup.trains and (self.preference.loss == "kto") != are_ratings:
            yield (
                "model.preference.loss kto and data.source Ratings need each other: set both, or"
                " neither"
            )
        if setup.trains and self.distillation and has_pairs(setup.data):
            yield (
                "model.distillation learns from texts or conversations, and data.source yields"
                " pairs: remove one"
            )
        for key, is_set in (
            ("data.source with pairs", has_pairs(setup.data)),
            ("model.distillation", self.distillation),
            ("model.adapter", self.adapter),
        ):
            if setup.trains and self.mtp and is_set:
                yield f"model.mtp does not work with {key}: set model.mtp null, or remove the other"

    def rate_for(self, data: Any, config: Any, steps: float) -> float:
        """Returns what `optim.learning_rate` auto stands for in a training of `steps`; `config` is
        the model's of transformers. Raises InputError where it stands for nothing."""
        return auto.rate_for(self, data, config, steps)

    def fixed_settings(self, data: Any) -> dict[str, object]:
        found = super().fixed_settings(data)
        if self.adapter is not None:
            for key in ("alpha", "dropout", "quantize"):
                found[f"model.adapter.{key}"] = getattr(self.adapter, key)
        if has_pairs(data):
            found["model.preference.beta"] = self.preference.beta
        if self.mtp:
            found[MTP_WEIGHT] = self.mtp.weight
        if self.distillation:
            found["model.distillation"] = [self.distillation.weight, self.distillation.temperature]
        return found

    @property
    def predicted_ahead(self) -> int:
        """How many tokens beyond the next one are predicted."""
        modules: Any = self.model.get_submodule(MTP) if self.mtp else None
        return modules.depth if modules else 0

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns sums over all or some tokens by name: the first is minimized, the others are
        metrics. `labels` (B, T) are already shifted; -100 does not count."""
        values, flat = logits.float().flatten(0, 1), labels.flatten()
        return {
            "loss": F.cross_entropy(values, flat, reduction="none").sum(),
            "token_accuracy": (logits.detach().argmax(-1) == labels).sum(),
        }

    def sums_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `sums` over all tokens, or pairs, of a micro-batch. Only the first is
        differentiable."""
        if PAIRS in batch:
            return {name: values.sum() for name, values in self.pair_values(batch).items()}
        if self.distillation:
            return distilled_sums(self, batch)
        if self.mtp is not None:
            return sums_with_predictions(self, batch)
        if not self.chunked_loss.applies_to(batch["labels"]):
            return self.sums(self(batch), batch["labels"])
        with without_head(self.model) as hidden_states:
            hidden = hidden_states(self(batch))
        return self.chunked_loss(hidden, batch["labels"])

    def pair_values(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns values (P,) of the pairs of a micro-batch by name. Only the first is
        differentiable."""
        return pair_values(self, batch)

    def derive(self, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics and "train/rewards/margin" not in metrics:
            metrics["train/perplexity"] = _perplexity(metrics["train/loss"])
        if self.mtp and isinstance(self.mtp.weight, list):
            metrics["train/mtp_weight"] = value_now(self, MTP_WEIGHT, self.mtp.weight)

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
        def compute() -> dict[str, float]:
            means = self.split_means.read(self.trainer.strategy)
            loss = means["loss"]
            if compared := means.pop(COMPARED, 0.0):
                means["mtp_acceptance"] = means.pop(ACCEPTED) / compared
            if "rewards/margin" not in means:
                means["perplexity"] = _perplexity(loss)
            if bytes_per_token := self.data.bytes_per_token(split):
                means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
            for source, sums in sorted(self.source_means.items()):
                for name, mean in sums.read(self.trainer.strategy).items():
                    means[f"{source}/{name}"] = mean
            return means

        means = run_strategy(self.trainer.strategy).layers.from_last(compute)
        self.log_eval({f"{prefix}/{name}": mean for name, mean in means.items()})

    @torch.no_grad()
    def generate(self, input_ids: Tensor) -> Tensor:
        """Tokens (1, T + n), n <= `sample_tokens`, within `seq_len`; keeps training's RNG state."""
        if is_reward_model(self.model):
            raise InputError(
                "a reward model scores answers and generates none: evaluate it, or serve it for"
                " /pooling"
            )
        if not hasattr(self.model, "generate"):
            raise InputError(
                f"{type(self.model).__name__} has no generate: write {type(self).__name__}.generate"
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
                do_sample=bool(
                    self.sample_temperature
                ),  # published weights may come with sampling switched on
                temperature=self.sample_temperature or 1.0,
            )

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, str]:
        tokens = self.generate(batch["input_ids"])[0, batch["input_ids"].shape[1] :]
        text = self.data.text_tokenizer.decode(tokens.tolist())
        return {"prompt": batch["prompt"], "continuation": text}


@cache
def _print_once(line: str) -> None:
    rank_zero_only(print)(line, flush=True)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows
