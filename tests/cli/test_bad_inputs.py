"""Drawn values for every key of `fit`: each is accepted, or refused in one sentence."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dist_template.cli.fit import CLI
from tests.support.library import RANGES, keys_of
from tests.support.runs import refused
from tests.support.tiers import tiers

LONGEST = 2_100  # characters of a sentence: a value that is longer is shown without its middle
SECTIONS = "data model trainer run cluster model.optim model.adapter model.architecture".split()
SECTIONS += "model.adapter.rank model.adapter.targets model.architecture.hidden_size".split()
SECTIONS += "model.architecture.model_type data.source.paths data.tokenizer.vocab_size".split()
SECTIONS += ["trainer.strategy.init_args.tp_size"]
TEXTS = ["", "null", "../..", "/proc/x", "a\0b", "\ud800", "x" * 5_000]
TEXTS += ["%s{}{run}", "[", "!!int x", "-1"]
NUMBERS = [0, -1, 1, 10**9, -(10**9), 10**30, 2**63, 1e300]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(TEXTS)
numbers = st.integers() | st.floats() | st.sampled_from(NUMBERS)
keys = texts | st.sampled_from(["class_path", "init_args"])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=4,
)

# An example takes 0.1 s: finding a shorter one that fails too takes minutes.
QUICK = settings(deadline=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate])


class Accepted(BaseException):
    """Raised where a command would begin to train."""


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What LightningCLI builds from the classes' signatures, built once."""
    kept: dict[str, Any] = {}
    setup = CLI.setup_parser

    def once(self: Any, *args: Any) -> None:
        if not kept:
            before = {*vars(self)}
            setup(self, *args)
            kept.update({name: value for name, value in vars(self).items() if name not in before})
        vars(self).update(kept)

    monkeypatch.setattr(CLI, "setup_parser", once)
    monkeypatch.delenv("TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)  # a drawn folder such as `[]` is made where the command runs
    return kept


@pytest.fixture
def outcome(flags: list[str], parsers: Any, tmp_path: Path, capfd: Any) -> Callable[..., str]:
    """The sentence that refuses `key: value`, or "" where it is accepted."""

    def of(key: str, value: Any, in_file: bool) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
        more = f"--{key}=" + text.removesuffix("\n...\n").strip()
        if in_file:
            for name in reversed(key.split(".")):
                value = {name: value}
            (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
            more = f"--config={tmp_path}/drawn.yaml"
        try:
            sentence = refused("fit", [*flags, more], capfd)
        except Accepted:
            return ""
        assert sentence.startswith("error: ") and len(sentence) <= LONGEST, (more, sentence)
        return sentence

    return of


@pytest.mark.slow
@pytest.mark.parametrize("examples", tiers([60, 4_000], daily=[60]))
def test_no_value_of_a_key_gives_a_traceback(
    outcome: Any, parsers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    def accept(self: CLI, subcommand: str) -> None:
        raise Accepted

    monkeypatch.setattr(CLI, "_run_subcommand", accept)
    outcome("run.report", False, False)
    names = {action.dest for action in keys_of(parsers["_subcommand_parsers"]["fit"])}
    names -= {"config", "print_config", *(name for name in names if name.endswith("help"))}

    @settings(QUICK, max_examples=examples, derandomize=True)
    @given(st.sampled_from([*sorted(names), *SECTIONS]), values, st.booleans())
    def drawn(key: str, value: Any, in_file: bool) -> None:
        sentence = outcome(key, value, in_file)
        if key in RANGES and isinstance(value, int | float) and not isinstance(value, bool):
            assert sentence or RANGES[key][1] <= value <= RANGES[key][2], (key, value)

    drawn()
