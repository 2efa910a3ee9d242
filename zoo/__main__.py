"""python -m zoo: trains small odd models of each type, and writes the library's table of models and
its page.

Cases that a file in build/zoo has are not run again, so that a run that was stopped resumes;
verdicts of other versions are run again. Types, variants and strategies that it does not have keep
their rows.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dist_template.model import proof

from . import ROOT
from .arms import ARMS
from .cases import Zoo
from .page import page
from .table import merged, table, text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument(
        "--models", default="", help="parts of the types' names, with commas; default: all"
    )
    parser.add_argument(
        "--arms", default="", help="parts of the strategies' names, such as lora; default: all"
    )
    parser.add_argument(
        "--variants", default="default,switched", help="default, switched or both, the default"
    )
    parser.add_argument(
        "--quick", type=Path, metavar="FOLDER", help="two cases; their table is FOLDER/proof.json"
    )
    given = parser.parse_args()
    wanted = given.models.split(",")
    kinds = sorted(
        kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if any(name in kind for name in wanted)
    )
    arms = [arm for arm in ARMS if any(name in arm for name in given.arms.split(","))]
    if given.quick:
        kinds, arms = ["llama"], ["ddp", "cp"]
    warnings.filterwarnings("ignore")
    zoo = Zoo(given.quick / "zoo" if given.quick else ROOT / "build" / "zoo")
    with ThreadPoolExecutor(3) as pool:  # a case waits for messages of its ranks; four take longer
        list(pool.map(partial(zoo.run_type, arms=arms, among=given.variants.split(",")), kinds))
    found, before = table(zoo.known.values()), proof._table()
    is_kept = not given.quick and before["versions"] == found["versions"]
    found["models"] = merged(before["models"] if is_kept else {}, found["models"])
    (given.quick or Path(proof.__file__).parents[1]).joinpath("proof.json").write_text(
        text(found), "utf-8"
    )
    if not given.quick:
        (ROOT / "docs" / "models.md").write_text(
            page(found, [arm.axes for arm in ARMS.values()]), "utf-8"
        )
    counts = Counter(each["verdict"] for each in zoo.known.values() if each["arm"] != "one")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


if __name__ == "__main__":
    main()
