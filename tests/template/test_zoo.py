"""The table of models: rows turn red without a mend; a sample, another each day, is right."""

import datetime
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_template.model import proof
from dist_template.parallel.mesh import ranks as mesh_ranks
from dist_template.parallel.mesh import strategy as mesh
from dist_template.parallel.mesh.sequence import shard_batch
from tests.support.tiers import NIGHTLY
from zoo import cases as zoo
from zoo.arms import OF_LORA, reference_of
from zoo.models import variants
from zoo.table import merged, without_table

from .conftest import output


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> zoo.Zoo:
    return zoo.Zoo(tmp_path_factory.mktemp("zoo"))


def verdict(cases: zoo.Zoo, kind: str, variant: str, arm: str) -> tuple[str, str]:
    architecture = variants(kind)[variant]
    one = cases.train(kind, variant, reference_of(arm), architecture).check()
    return cases.judge(kind, variant, arm, architecture, one)


# ---- without a mend ------------------------------------------------------------------------------


def forget_the_norms() -> None:
    """transformers' plan unchanged: no rule for the norms of queries and keys."""
    without_table()
    vars(mesh)["complete_plan"] = lambda *_: None


def count_positions_per_shard() -> None:
    """Each rank's tokens as if they were the first of the row."""
    without_table()

    def local(batch: Any, group: Any) -> Any:
        sharded = shard_batch(batch, group)
        if isinstance(positions := sharded.get("position_ids"), Tensor):
            sharded["position_ids"] = torch.arange(positions.shape[1]).expand_as(positions)
        return sharded

    vars(mesh_ranks)["shard_batch"] = local


SPARSE = "gemma3n_text"
OLMO2 = ("olmo2", "default", "cp", count_positions_per_shard, "rotary_emb")
PHI = ("phi", "switched", "tp", forget_the_norms, "replicas differ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mend", [PHI, pytest.param(OLMO2, marks=NIGHTLY)], ids=lambda mend: mend[0]
)
def test_a_row_turns_red_without_its_mend(cases: zoo.Zoo, monkeypatch: Any, mend: Any) -> None:
    kind, variant, arm, remove, why = mend
    assert verdict(cases, kind, variant, arm) == ("right", "")
    monkeypatch.setattr(zoo, "without_table", remove)
    found, sentence = verdict(cases, kind, variant, arm)
    assert found == "fault" and why in sentence, sentence


@pytest.mark.slow
def test_sizes_of_mixtures_are_no_powers_of_two() -> None:
    for kind, width in {
        "qwen3_moe": "moe_intermediate_size",
        "mixtral": "intermediate_size",
    }.items():
        for architecture in variants(kind).values():
            assert architecture["hidden_size"] == 48 and architecture[width] in (24, 72), kind


@pytest.mark.slow
def test_numbers_are_switched_too() -> None:
    assert variants("olmo")["default"].get("clip_qkv") is None
    assert variants("olmo")["switched"]["clip_qkv"] == 0.5
    sparse = {name: each["activation_sparsity_pattern"] for name, each in variants(SPARSE).items()}
    assert sparse == {"default": [0.5] * 5, "switched": [0.0] * 5}
    assert variants("gemma2")["switched"]["attn_logit_softcapping"] is None
    assert variants("starcoder2")["switched"]["sliding_window"] == 8


def test_what_was_not_tried_again_stays() -> None:
    off, on = {"bias": False, "clip": False}, {"bias": True, "clip": False}

    def variant(switches: dict[str, bool], right: list[str], **refused: str) -> dict[str, Any]:
        return {"switches": switches, "right": right, "refused": refused}

    before = {
        "a": {"leaks": {"documents": "x"}, "variants": [variant(off, ["tp"], pp="p", cp="c")]},
        "b": {"variants": [variant(off, ["tp"])]},
    }
    before["a"]["variants"] += [variant(on, ["tp", "cp"])]
    clipped = on | {"clip": True}
    again = variant(off, ["pp"], tp="t") | {"variant": "default"}
    other = variant(clipped, []) | {"variant": "switched"}
    found = {"a": {"variants": [again, other]}, "b": {"variants": [dict(other)]}}
    before["c"] = json.loads(json.dumps(before["a"]))
    found["c"] = {"leaks": {}, "variants": [dict(other)]}  # its defaults were not tried again
    got = merged(before, found)
    assert got["c"]["leaks"] == {"documents": "x"}
    assert got["b"]["variants"] == [variant(off, ["tp"]), variant(clipped, [])]
    assert got["a"]["leaks"] == {"documents": "x"}
    assert got["a"]["variants"] == [variant(off, ["pp"], cp="c", tp="t"), variant(clipped, [])]


# ---- a sample of the table -----------------------------------------------------------------------

SAMPLE = 24  # rows: two minutes
TOUCHES = {  # a change of these files: the arms whose rows are all tried again
    "parallel/mesh/pipeline/": ["pp", "pp_fsdp2", "pp_ep"],
    "parallel/mesh/sequence.py": ["cp"],
    "parallel/mesh/shard.py": ["tp"],
    "compat/parallel_styles.py": ["tp", *OF_LORA],
    "parallel/zero": ["zero2", "zero3"],
    "compat/deepspeed.py": ["zero2", "zero3"],
    "text/model/adapters.py": [*OF_LORA],
}


def due(today: datetime.date, changed: str) -> list[tuple[str, str, str]]:
    """(type, variant, arm) of the rows for `today`, and of those that `changed` may change."""
    table = json.loads((Path(proof.__file__).parents[1] / "proof.json").read_text("utf-8"))
    rows = [
        (kind, variant, arm)
        for kind, entry in table["models"].items()
        for variant, known in zip(("default", "switched"), entry.get("variants", []), strict=False)
        for arm, one in zoo.ARMS.items()
        if one.axes in known["right"]
    ]
    touched = [arms for path, arms in TOUCHES.items() if f"src/dist_template/{path}" in changed]
    drawn = random.Random(today.isoformat()).sample(rows, min(SAMPLE, len(rows)))
    return sorted({*drawn, *(row for row in rows if row[2] in sum(touched, []))})


def test_what_is_tried_again_depends_on_the_day_and_on_what_changed() -> None:
    monday, tuesday = datetime.date(2026, 11, 23), datetime.date(2026, 11, 24)
    assert len(due(monday, "")) == SAMPLE and due(monday, "") == due(monday, "") != due(tuesday, "")
    more = {*due(monday, "src/dist_template/parallel/mesh/sequence.py")} - {*due(monday, "")}
    assert {arm for *_, arm in more} == {"cp"}


@pytest.mark.nightly
@pytest.mark.timeout(10_800)  # a change that touches most strategies tries half of the table again
def test_the_rows_of_the_day_are_right(cases: zoo.Zoo) -> None:
    """Two at a time, as `python -m zoo` does."""
    changed = output("git", "log", "--since=8 days", "--name-only", "--format=", cwd=zoo.ROOT)
    rows, arms = due(datetime.date.today(), changed), dict[str, list[str]]()
    for kind, _, arm in rows:
        arms.setdefault(kind, []).append(arm)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cases.run_type, arms, arms.values()))
    found = {row: cases.known.get(row, {"verdict": "not run"}) for row in rows}
    wrong = {row: each for row, each in found.items() if each["verdict"] != "right"}
    assert not wrong, f"{len(wrong)} of {len(rows)} rows: {wrong}"
