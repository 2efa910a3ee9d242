"""Pipeline parallelism: each rank has some consecutive blocks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ....by_tokens import divisor_of, values_of
from ...configured import ARGS, Configured
from ...spec.facts import Facts, Sent
from ..pipeline.stages import (
    ONE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    LayerSplit,
    Schedule,
    StageFacts,
    needed_micro_batches,
    stages_per_rank,
    wrong_layers,
)
from .axis import Axis


class Stages(NamedTuple):
    """A pipeline's stages as memory and time need them; the defaults are a model of one stage."""

    largest: float = 1.0  # share of the parameters on the rank that has most
    mean: float = 1.0  # share of the parameters on a rank, with the copies of tied ones
    blocks: int = 0  # on the rank that has most
    kept: float = 1.0  # micro-batches whose activations the rank keeps that keeps most
    kept_at_end: float = 1.0  # the same of the rank that has the last stage
    crossings: int = 0  # pairs of stages between which messages are sent


class PipelineAxis(Axis):
    """Ranks that pass each micro-batch on, by a schedule; ../pipeline/ runs it.

    Inside of a stage it is ZeRO-1: weights are gathered once per step, whatever fsdp would do."""

    name = "pp"
    comes_last = True

    @property
    def schedule(self) -> Schedule:
        return self.argument("pp_schedule", "1F1B")

    @property
    def layers(self) -> LayerSplit:
        return self.argument("pp_layers", "cost")

    @property
    def interleaved(self) -> int:
        """Stages of each rank in the interleaved schedules."""
        return self.argument("pp_stages_per_rank", 2)

    @property
    def stages_per_rank(self) -> int:
        return stages_per_rank(self.schedule, self.interleaved)

    # ---- refusals --------------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from self._division(setup)
        if self.schedule in SPLIT_BACKWARD:
            yield from self._split_backward(setup)
        yield from self._micro_batches(setup)
        if getattr(setup.data, "rank_speeds", None):
            why = "does not work in a pipeline, whose micro-batches have one shape"
            yield f"data.rank_speeds {why}: remove it, or set {ARGS}.pp_size to 1"
        if self.argument("cpu_offload"):
            yield f"{ARGS}.cpu_offload true does not work in a pipeline: set it to false"
        if setup.setting("adapter.quantize"):
            way_out = f"set it to null, or {ARGS}.pp_size to 1"
            yield f"model.adapter.quantize does not work in a pipeline: {way_out}"
        yield from self._objectives(setup)

    def _division(self, setup: Configured) -> Iterator[str]:
        """There are blocks for every stage."""
        schedule, per_rank = self.schedule, self.stages_per_rank
        stages = self.size * per_rank
        if schedule not in ONE_STAGE and per_rank < 2:
            yield (
                f"{ARGS}.pp_stages_per_rank {per_rank}: {schedule} needs 2 or more; edit it, or set"
                f" {ARGS}.pp_schedule 1F1B"
            )
        config, num = setup.text_config, None
        if not hasattr(config, "decoder_layers"):  # else num_hidden_layers is the encoder's
            num = getattr(config, "num_hidden_layers", None)
        if num is not None and num < stages:
            way_out = f"lower {ARGS}.pp_size, or set another {ARGS}.pp_schedule"
            yield f"the model's {num} blocks cannot be divided into {stages} stages: {way_out}"
        elif isinstance(self.layers, list):
            why = wrong_layers(self.layers, stages, num)
            if why:
                yield f"{ARGS}.{why}"

    def _split_backward(self, setup: Configured) -> Iterator[str]:
        """Nothing is compiled or recomputed that computes all gradients at once."""
        for key, value, instead in (
            ("blocks.compile", True, "false"),
            ("blocks.checkpointing", "selective", "full or none"),
        ):
            if setup.setting(key) == value:
                yield (
                    f"model.{key} {str(value).lower()} does not work with pp_schedule"
                    f" {self.schedule}, which computes gradients of inputs and of weights in two"
                    f" passes: set it to {instead}, or {ARGS}.pp_schedule to 1F1B or"
                    " Interleaved1F1B"
                )

    def _micro_batches(self, setup: Configured) -> Iterator[str]:
        """A step has micro-batches for every stage."""
        rows = getattr(setup.data, "global_batch_size", None)
        micro = getattr(setup.data, "micro_batch_size", None)
        if not setup.trains or not rows or not micro:
            return
        together = micro * self.spec.data_parallel(setup.machine.world_size)
        least, multiple = needed_micro_batches(self.schedule, self.size)
        batches, needs = int(min(values_of(rows))) // together, ""
        of_all = divisor_of(rows) // together
        if multiple > 1 and of_all % multiple:
            batches, needs = of_all, f"a multiple of {multiple}"
        elif batches < least:
            needs = f"{least} or more, one for each stage"
        if needs:
            yield (
                f"an optimizer step has {batches} micro-batches (global_batch_size /"
                f" micro_batch_size / data-parallel ranks), and {self.schedule} needs {needs}:"
                f" edit data.micro_batch_size, data.global_batch_size or {ARGS}.pp_schedule"
            )

    def _objectives(self, setup: Configured) -> Iterator[str]:
        """What is trained for needs one pass of the model in a step."""
        if setup.several_passes:
            yield f"{setup.several_passes} does not work in a pipeline: set {ARGS}.pp_size to 1"

    def least_micro_batches(self) -> int:
        least, _ = needed_micro_batches(self.schedule, self.size)
        return least

    def reduced(self, notes: list[str]) -> dict[str, Any]:
        if self.size == 1:
            return {}
        changed: dict[str, Any] = {"pp_stages_per_rank": min(self.interleaved, 2)}
        if isinstance(self.layers, list):
            changed["pp_layers"] = "even"
            notes.append("pp_layers is even: the small model has fewer blocks")
        return changed

    # ---- memory ----------------------------------------------------------------------------------

    def stage_facts(self, model: Any) -> StageFacts:
        """Returns the stages of `model`. Raises InputError if it cannot be divided."""
        from ..pipeline.partition import facts_of

        return facts_of(model, self.size, self.schedule, self.interleaved, self.layers)

    def stages(self, facts: Facts) -> Stages:
        """Returns the stages that a run recorded, or `plan` made; one stage if none."""
        if not facts.pipeline:
            return Stages(blocks=facts.layers)
        stages, m = facts.pipeline["stages"], self.spec.accumulation(facts)
        p, v = len(stages), len(stages[0])
        sizes, blocks = [], []  # of each rank
        for own in stages:
            sizes.append(sum(map(facts.pipeline["parameters"].__getitem__, own)))
            blocks.append(sum(map(facts.pipeline["blocks"].__getitem__, own)))
        last = next(rank for rank, own in enumerate(stages) if p * v - 1 in own)
        blocks[last] += facts.predicted  # after the last stage's
        schedule = facts.pipeline["schedule"]
        most, at_end = kept_micro_batches(schedule, p, v, m)
        return Stages(
            largest=max(sizes) / facts.parameters,
            mean=sum(sizes) / facts.parameters / p,
            blocks=max(blocks),
            kept=min(most, m),
            kept_at_end=min(at_end, m),
            crossings=2 * (p - 1) if schedule in V_SHAPED else v * p - 1,
        )

    def share(self, facts: Facts) -> float:
        return self.stages(facts).largest

    def mean_share(self, facts: Facts) -> float:
        return self.stages(facts).mean

    def kept_share(self, facts: Facts) -> float:
        stages = self.stages(facts)
        return stages.kept * stages.blocks / facts.layers

    def buffers(self, facts: Facts) -> dict[str, float]:
        """A stage's weights and their gradients, if its ranks share them."""
        sizes = self.sizes
        if sizes.dp_replicate * sizes.fsdp == 1:
            return {}
        experts = facts.experts if sizes.ep > 1 else 0
        gathered = (facts.parameters - experts) / sizes.tp + experts / sizes.ep
        gathered *= self.stages(facts).largest
        trained = gathered * facts.trainable / facts.parameters
        return {
            "gathered weights": gathered * self.spec.used_bytes(facts),
            "unsharded gradients": trained * self.spec.weight_bytes(facts),
        }

    def correct_traced(self, parts: dict[str, float], facts: Facts) -> None:
        """The rank of the last stage, which alone has logits, keeps fewer micro-batches."""
        stages = self.stages(facts)
        parts["activations"] *= self.kept_share(facts)
        fewer = parts["activations"] * (1 - stages.kept_at_end / stages.kept)
        parts["logits"] = max(0.0, parts["logits"] - fewer)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Hidden states and their gradients; the gradients of the two copies of a tied weight."""
        p, stages, sizes = self.size, self.stages(facts), self.sizes
        span = facts.world_size // p + 1
        passes = 2 * stages.crossings * self.spec.accumulation(facts) / p
        elements = passes * self.spec.tokens(facts) * facts.width
        yield Sent("send", elements, self.spec.used_bytes(facts), 2, span)
        tied = (stages.mean * p - 1) * facts.parameters
        if tied > 1 / 2:
            yield Sent("all_reduce", 2 / p * tied / sizes.fsdp / sizes.tp, 4, 2, span)

    def allows(self, facts: Facts) -> bool:
        """Also whether the formulas apply: a schedule that splits the backward pass recomputes a
        block twice, and ZBVZeroBubble waits longer with few micro-batches."""
        p, m = self.size, self.spec.accumulation(facts)
        least, multiple = needed_micro_batches(self.schedule, p)
        least = max(least, p)
        if self.schedule in SPLIT_BACKWARD and facts.checkpointing != "none":
            return False
        if self.schedule == "ZBVZeroBubble":
            least = (3 * p + 1) // 2
        return m >= least and m % multiple == 0

    def slowdown(self, facts: Facts) -> float:
        waits = 0.0
        if facts.pipeline:
            waits = facts.pipeline["bubble"] / self.spec.accumulation(facts)
        return (1 + waits) * self.stages(facts).blocks * self.size / facts.layers


def kept_micro_batches(schedule: str, p: int, v: int, m: int) -> tuple[float, float]:
    """Returns of how many micro-batches a rank keeps activations: the rank that keeps most, and the
    one that has the last stage.

    A rank keeps what runs before its first backward pass (Narayanan et al., arXiv:2104.04473,
    section 2.2). If gradients of weights are computed later, gradients of activations are kept for
    them: in the pass as many as activations, then half of them."""
    if schedule == "GPipe":
        return m, m
    if schedule in ("1F1B", "Interleaved1F1B"):
        return p + (p - 1) * (v > 1) / v, ((v - 1) * p + 1) / v
    if schedule == "InterleavedZeroBubble":
        most = p + (p + 1) / v / 2
    elif schedule == "ZBVZeroBubble":
        return (3 * p - 1) / 2, p + 1 / 2
    else:
        most = p + 1 / 2
    return most, most
