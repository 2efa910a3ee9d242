"""Evaluates runs and baselines one after the other, compares them, and writes what is found."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ....cli.fit import WithoutTrainer
from ....errors import InputError
from ....project import Project
from ....records import write_atomically
from ....text.cache.quality import contaminated_share
from ....text.cache.token_cache import Corpus
from ..export import trained
from . import baselines, tasks
from .models import baseline_of, of_run, score
from .paired import LEAST, SCALED, Comparison, Pair, compare
from .requirement import parse

SHOWN, CHARACTERS = 3, 300  # documents at each end, and of the text of each


def evaluate(given: Any, name: str, project: Project) -> list[Comparison]:
    """Writes <name>.json and .parquet, a row for each model and sample; returns the comparisons.

    Raises:
        InputError: a name is no model, or there are too few documents.
    """
    from pandas import DataFrame

    keys, models = tasks.read(given.config), [of_run(n, project, "RUN") for n in given.runs]
    known = dict.fromkeys(("loss", "bits_per_byte", getattr(keys["metric"], "__name__", "loss")))
    for text in given.require if not keys["tasks"] else ():  # tasks have measures of their own
        if (measure := re.sub("^(eval|test)/", "", parse(text)[0])) not in known:
            raise InputError(f"--require: {measure} is not measured; give {', '.join(known)}")
    if len({model.checkpoint for model in models}) < len(models):
        raise InputError(f"{' '.join(given.runs)}: a run is given twice; give each once")
    first = models[0]
    others = [n if n in baselines.NAMES else baseline_of(n, first, project) for n in given.baseline]
    if len(others) > 1 and any(isinstance(o, str) or o.checkpoint == "start" for o in others):
        raise InputError("several baselines are runs that differ in their seed: give one of others")
    flags, *_ = trained.of_run(str(first.run), project, "RUN")
    data: Any = WithoutTrainer(project, flags, run=False).datamodule
    if not getattr(data, share := f"{given.split}_share", 1):
        other = "validation" if given.split == "test" else "test"
        raise InputError(
            f"data.{share} of {first.name} is 0, so its {given.split} split is empty: give --split"
            f" {other}, or train with a data.{share} that holds out {LEAST} documents or more"
        )
    folder = first.run / "evaluation"
    work = folder / f".{name}"
    work.mkdir(parents=True, exist_ok=True)
    tables, values = [], []
    try:
        for number, model in enumerate([*models, *others]):
            if isinstance(model, str):
                tables.append(baselines.scored(model, data.corpus, given.split, tables[0]))
                continue
            tables.append(score(model, given.split, project, work, data))
            weights = model.folder or model.checkpoint
            if weights != "start" and (keys["tasks"] or keys["metric"]):
                rows = tables[0].to_dict("records")
                loaded = trained.load_trained(weights, project)
                values += [(number, *row) for row in tasks.values_of(loaded, keys, rows)]
    finally:
        shutil.rmtree(work)
    own = DataFrame(values, columns=["model", "measure", "lower", "sample", "value"])
    tables = _in_common(tables, given)
    comparisons = _compared(tables, len(models), own, data.corpus.is_whole(given.split))
    names = [*given.runs, *given.baseline]
    _write(folder, name, names, tables, own, given, comparisons, data.corpus)
    print("\n".join(each.sentence for each in comparisons))
    print(f"written to {folder / name}.json and .parquet")
    return comparisons


def _in_common(tables: list[Any], given: Any) -> list[Any]:
    """Returns the documents that all models have scored, each text once, in the same order."""
    tables = [table[(table["tokens"] > 0) & ~table.index.duplicated()] for table in tables]
    held = reduce(lambda a, b: a[a.isin(b)], [table.index for table in tables])
    if len(held) < LEAST:
        raise InputError(
            f"the models have {len(held)} documents of the {given.split} split in common, and"
            f" {LEAST} are needed: give more, or a larger data.{given.split}_share"
        )
    return [table.loc[held] for table in tables]


def _compared(tables: list[Any], num: int, own: Any, is_whole: bool) -> list[Comparison]:
    """Compares by bytes, which any tokenizers allow, and by equal tokens; then tasks.

    Of conversations only some tokens count, so that they are compared by tokens alone.
    """
    if num == len(tables):
        return []
    same, first = len({table["tokenizer"].iloc[0] for table in tables}) == 1, tables[0]
    if is_whole and not same:
        raise InputError("tokenizers differ, and of conversations only some tokens count")
    bits, size = np.stack([table["nats"] for table in tables]) / math.log(2), first["bytes"]
    pairs = [Pair("bits_per_byte", bits[:num], bits[num:], size.to_numpy())]
    for measure, rows in own.groupby("measure"):
        values = rows.pivot(index="sample", columns="model", values="value").dropna().to_numpy().T
        if len(values) == len(tables):
            ones, lower = np.ones(values.shape[1]), bool(rows["lower"].iloc[0])
            pairs.append(Pair(str(measure), values[:num], values[num:], ones, lower))
    found = compare(pairs)
    if same:  # one test in two units
        factor = math.log(2) * size.sum() / first["tokens"].sum()
        scaled = {key: getattr(found[0], key) * factor for key in SCALED}
        found.insert(0, replace(found[0], name="loss", **scaled))
        found[0].decide()
    return found[:1] + found[2:] if is_whole else found


def _write(
    folder: Path, name: str, names: list[str], tables: list[Any], own: Any,
    given: Any, comparisons: list[Comparison], corpus: Corpus,
) -> None:  # fmt: skip
    from pandas import concat

    rows, figures, shown = [own], [], tables[0].assign(text=tables[0]["text"].str[:CHARACTERS])
    whole = corpus.is_whole(given.split)
    for number, table in enumerate(tables):
        means = own[own["model"] == number].groupby("measure")["value"].mean().to_dict()
        known = {"model": names[number], "figures": _figures(table, whole) | means}
        known["sources"] = {
            str(s): _figures(part, whole) for s, part in table.groupby("source") if s
        }
        figures.append(known | {"is_baseline": number >= len(given.runs)})
        print(f"{names[number]}: " + "  ".join(f"{k} {v:.4f}" for k, v in known["figures"].items()))
        table = table.assign(model=number, measure="nats", value=table["nats"]).reset_index()
        rows.append(table.drop(columns=["text", "end", "tokenizer", "nats"]))
    for column, table in {"run": tables[0], "baseline": tables[-1]}.items():
        size = table["tokens"] if whole else math.log(2) * table["bytes"]
        shown[column] = table["nats"] / size
    order = shown["run"] - shown["baseline"] * (len(tables) > len(given.runs))
    shown = shown.loc[order.sort_values().index, ["sample", "text", "run", "baseline"]]
    found = {"split": given.split, "documents": len(shown), "models": figures}
    found["unit"] = "loss" if whole else "bits per byte"
    found |= {"contaminated_share": contaminated_share(corpus, given.split)}
    found |= {"best": shown[:SHOWN].to_dict("records"), "comparisons": [*map(asdict, comparisons)]}
    found |= {"worst": shown[: -SHOWN - 1 : -1].to_dict("records")}
    concat(rows).to_parquet(folder / f".{name}.parquet", index=False)
    (folder / f".{name}.parquet").replace(folder / f"{name}.parquet")
    write_atomically(folder / f"{name}.json", json.dumps(found, indent=1))


def _figures(table: Any, is_whole: bool) -> dict[str, float]:
    """Returns the means; bits per byte only of text, as of conversations only some tokens count."""
    nats, tokens, size = (float(table[column].sum()) for column in ("nats", "tokens", "bytes"))
    by_byte = {} if is_whole else {"bits_per_byte": nats / math.log(2) / size}
    return {"loss": nats / tokens, **by_byte}
