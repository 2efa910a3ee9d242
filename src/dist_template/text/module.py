"""TextModule: a TrainingModule for language models, with loss in chunks, evaluation and generation.

    configure_model    build_network (build_model, what the objective needs in it, adapters), which
                       the strategy places, then the objective's `attach`
    a micro-batch      sums_of, which calls the objective, which calls `sums` wherever logits exist
    an evaluation      sums of each batch are added up (SplitMeans), and means logged at its end
    predict            generate

Shapes: B sequences, T tokens of a sequence, V vocabulary."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ..checkpoint.frozen import exclude_frozen
from ..errors import InputError
from ..model.metrics import SplitMeans
from ..parallel import rank_view
from ..parallel.configured import NOT_READ_YET, Configured
from ..parallel.place import build_unsharded
from ..ranges import PositiveInt, Range
from . import auto
from .model.adapters import AdapterConfig, add_adapters, proof_axes
from .model.causal_lm import checked_fields, freeze_untrained
from .model.quantize import quantize
from .objectives.keys import WithObjective

__all__ = ["TextModule"]


class TextModule(WithObjective):
    """Base class of a language model's module: `forward` gives logits, `loss` a value per token.

    Args:
        loss_chunk: Tokens whose logits are in memory at a time. null: the micro-batch's, for a
            model that changes its logits after the output layer.
        adapter: Train LoRA adapters and freeze everything else. null: train all weights.
        sample_tokens: Tokens that `generate` appends to a prompt.
        sample_temperature: Randomness of `generate`. 0 takes the most probable token each time.
        options: See WithObjective and TrainingModule."""

    sums_on_last_stage = True  # of a pipeline: validation waits for no other stage
    counts_tokens = True  # its Trainer's defaults are a language model's: see cli/defaults.py

    def __init__(
        self,
        loss_chunk: PositiveInt | None = 4096,
        adapter: AdapterConfig | None = None,
        sample_tokens: Annotated[int, Range(ge=1, le=65_536)] = 64,
        sample_temperature: Annotated[float, Range(ge=0, le=100)] = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.loss_chunk = loss_chunk
        self.adapter = adapter
        # names and hashes of the weights that are not in checkpoints
        self.frozen_base: dict[str, str] = {}
        self.frozen_reference: dict[str, str] = {}
        self.reference: nn.Module | None = None  # a frozen model beside the trained one
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
        # after the lines above: the objective keeps the compiled function
        self.active_objective = self.objective_for(self.data)
        self.active_objective.attach(self)

    def build_network(self, data: Any, quantized: bool = True) -> nn.Module:
        """Builds the network of `build_model`, with the adapters of `model.adapter`."""
        model = self.build_base(data)
        frozen = freeze_untrained(model)
        if frozen:
            names = frozen[0]
            if len(frozen) > 1:
                names += f" and {len(frozen) - 1} others"
            _print_once(f"note: no gradient reaches {names}: the weights stay as they start")
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
        return build_unsharded(partial(self.build_base, data))

    def build_base(self, data: Any) -> nn.Module:
        """Returns the network of `build_model`, with what the objective needs in it."""
        return self.objective_for(data).extend(self, self.build_model(data), data)

    @property
    def adapter_axes(self) -> list[str]:
        """Names the adapters in the table of proven models: model/proof.py."""
        if self.adapter is None:
            return []
        return proof_axes(self.adapter)

    def refusals(self, setup: Configured) -> Iterator[str]:
        given = getattr(self, "architecture", None)
        is_read = setup.model_config is not NOT_READ_YET or getattr(self, "pretrained", None)
        if isinstance(given, dict) and not is_read:
            # an unknown key, before the data are tokenized; afterwards `build_config` refuses it
            try:
                checked_fields(given)
            except InputError as error:
                yield str(error)
        yield from super().refusals(setup)

    def rate_for(self, data: Any, config: Any, steps: float) -> float:
        """Returns what `optim.learning_rate` auto stands for in a training of `steps`; `config` is
        the model's of transformers. Raises InputError where it stands for nothing."""
        return auto.rate_for(self, data, config, steps)

    def fixed_settings(self, data: Any) -> dict[str, object]:
        found = super().fixed_settings(data)
        if self.adapter is not None:
            for key in ("alpha", "dropout", "quantize"):
                found[f"model.adapter.{key}"] = getattr(self.adapter, key)
        return found

    def sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns sums over all or some tokens by name: the first is minimized, the others are
        metrics. `labels` (B, T) are already shifted; -100 does not count."""
        values, flat = logits.float().flatten(0, 1), labels.flatten()
        return {
            "loss": F.cross_entropy(values, flat, reduction="none").sum(),
            "token_accuracy": (logits.detach().argmax(-1) == labels).sum(),
        }

    def sums_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the objective's sums over a micro-batch, of tokens or pairs. The first is
        minimized, and it alone is differentiable."""
        return self.active_objective.sums(self, batch)

    def derive(self, metrics: dict[str, float]) -> None:
        self.active_objective.derive(self, metrics)

    def on_validation_epoch_start(self) -> None:
        self.split_means, self.source_means = SplitMeans(), defaultdict(SplitMeans)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        counted, sums = self.active_objective.count(batch), self.sums_of(batch)
        self.split_means.add(sums, counted)
        source = getattr(self.data, "source_name", "")  # of a mixture: its batches have one each
        if source:
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
            if "loss" not in means:
                name = type(self.active_objective).__name__
                raise InputError(
                    f"model.objective {name}: its sums have {', '.join(means)}, and no loss, by"
                    " which runs are compared: add it"
                )
            loss = means["loss"]
            self.active_objective.summarize(means)
            bytes_per_token = self.data.bytes_per_token(split)
            if bytes_per_token:
                means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
            for source, sums in sorted(self.source_means.items()):
                for name, mean in sums.read(self.trainer.strategy).items():
                    means[f"{source}/{name}"] = mean
            return means

        means = rank_view(self.trainer.strategy).layers.from_last(compute)
        self.log_eval({f"{prefix}/{name}": mean for name, mean in means.items()})

    @torch.no_grad()
    def generate(self, input_ids: Tensor) -> Tensor:
        """Tokens (1, T + n), n <= `sample_tokens`, within `seq_len`; keeps training's RNG state."""
        if self.active_objective.no_text:
            raise InputError(self.active_objective.no_text)
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
                # always given: published weights may come with sampling switched on
                do_sample=self.sample_temperature > 0,
                temperature=self.sample_temperature or 1.0,
            )

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, str]:
        tokens = self.generate(batch["input_ids"])[0, batch["input_ids"].shape[1] :]
        text = self.data.text_tokenizer.decode(tokens.tolist())
        return {"prompt": batch["prompt"], "continuation": text}


@cache
def _print_once(line: str) -> None:
    rank_zero_only(print)(line, flush=True)
