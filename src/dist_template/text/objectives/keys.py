"""The keys of `model` that choose what a language model learns, and the choice.

    data.source with pairs    the loss of `model.preference`
    model.distillation        a teacher's distribution
    model.mtp                 later tokens too
    model.objective           a class of a package
    none of them              the next token

A training has one: two of them are refused before the start. An entry point of the group
`dist_template.objectives` makes a package's class known to `class_path` by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

from ...model.training_module import TrainingModule
from ...parallel.configured import Configured, without_effect
from ...plugins import loaded
from .distillation import Distillation, DistillationConfig
from .mtp import MtpConfig, MultiToken
from .next_token import NextToken
from .objective import Objective, is_objective, source_kind
from .pairs import KEY, Dpo, Ipo, Orpo, Preference, PreferenceConfig, Simpo
from .ratings import Kto
from .reward import Reward

PREFERENCES: dict[str, type[Preference]] = {
    "dpo": Dpo,
    "ipo": Ipo,
    "simpo": Simpo,
    "orpo": Orpo,
    "kto": Kto,
    "reward": Reward,
}


class WithObjective(TrainingModule):
    """A TrainingModule that has an objective.

    Args:
        preference: The loss of pairs, which data.source Preferences yields in place of texts.
        distillation: Learn a teacher's distribution. null: from the data alone.
        mtp: Train modules that predict later tokens. null: none.
        objective: Learn something else, by a class of your own or of a package. null: as the keys
            above say.
        options: See TrainingModule."""

    objective_keys: ClassVar[tuple[str, ...]] = ("preference", "distillation", "mtp", "objective")

    active_objective: Objective  # what is learned; `configure_model` chooses it

    def __init__(
        self,
        preference: PreferenceConfig = PreferenceConfig(),  # noqa: B008  (nothing changes it)
        distillation: DistillationConfig | None = None,
        mtp: MtpConfig | None = None,
        objective: Objective | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.preference = preference
        self.distillation = distillation
        self.mtp = mtp
        self.objective = objective
        self._of_pairs: Objective = PREFERENCES[preference.loss](preference)
        self._of_texts: Objective = NextToken()
        if mtp is not None:
            self._of_texts = MultiToken(mtp)
        if distillation is not None:
            self._of_texts = Distillation(distillation)
        if objective is not None:
            objective.add_state(self)
        else:
            self._of_pairs.add_state(self)

    def objective_for(self, data: Any) -> Objective:
        """Returns what is learned from `data`, a datamodule."""
        if self.objective is not None:
            return self.objective
        return self._of_texts if source_kind(data) == "texts" else self._of_pairs

    def objective_facts(self) -> dict[str, object]:
        """Returns what a run records of its objective."""
        objective = self.active_objective
        multiplied, stored = objective.frozen_parameters(self, self.data, self.whole_size.total)
        return {
            "class": type(objective).__name__,
            "in_chunks": objective.in_chunks,
            "frozen_multiplied": multiplied,
            "frozen_stored": stored,
            "no_better": objective.no_better,
        }

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each setting of this module that cannot work."""
        if not setup.trains:
            return
        if self.objective is None:
            yield from self._of_pairs.refusals(setup)
        else:
            if self.objective.key != Objective.key:
                name = type(self.objective).__name__
                yield f"model.objective {name} is chosen by {self.objective.key}: set that instead"
            yield from self.objective.refusals(setup)
            reason = "model.objective replaces it: set that to null"
            keys = {field.name for field in fields(self.preference)}
            yield from without_effect(KEY, self.preference, keys, reason)
        if self.distillation is not None:
            yield from Distillation(self.distillation).refusals(setup)
        if self.mtp is not None:
            yield from MultiToken(self.mtp).refusals(setup)
        for key, given in (("distillation", self.distillation), ("mtp", self.mtp)):
            if self.objective is not None and given is not None:
                yield f"model.objective does not work with model.{key}: set one of them to null"

    def fixed_settings(self, data: Any) -> dict[str, object]:
        objective = self.objective_for(data)
        kind = type(objective)
        settings = super().fixed_settings(data) | objective.fixed_settings()
        settings["model.objective"] = f"{kind.__module__}.{kind.__qualname__}"
        return settings


def kinds() -> list[type[Objective]]:
    """Returns the classes of this library and of packages."""
    found = [NextToken, MultiToken, Distillation, *PREFERENCES.values()]
    for kind in loaded("dist_template.objectives", is_objective).values():
        found.append(kind)
    return found


kinds()  # known to `class_path` by their names
