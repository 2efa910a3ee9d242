"""Evaluates a run and a baseline one after the other, compares them, and writes the results."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from ....cli.fit import WithoutTrainer
from ....errors import Ended, Exit, InputError
from ....observe.history.run import RunFile
from ....progress import running
from ....project import Project
from ....records import read_mapping, write_atomically
from ....text.cache.token_cache import Corpus
from ....text.objectives.next_token import NextToken
from ....text.objectives.objective import Measure, Objective, objective_for
from ....text.tokenizers import Pretrained
from ..export import trained
from . import tasks
from .documents import DocumentScores
from .models import Model, find, run_verb
from .paired import LEAST, Comparison, compare

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerFast


def evaluate(
    given: argparse.Namespace, name: str, cli: WithoutTrainer, project: Project
) -> list[Comparison]:
    """Writes <name>.json and .parquet, a row for each model and sample; returns the comparisons.
    Raises InputError if a name is no model, or there are too few documents."""
    run, split = find(given.run, project), given.split
    models = [run]
    if given.baseline:
        models.append(find(given.baseline, project, run.run))
    data: Any = cli.datamodule
    objective = objective_for(cli.model, data) or NextToken()
    if given.tasks and objective.no_text:
        raise InputError(f"{given.run} answers no tasks, because {objective.no_text}")
    check_size(data, split)
    folder = run.run / "evaluation"
    work = folder / f".{name}"
    work.mkdir(parents=True, exist_ok=True)
    tables: list[DataFrame] = []
    values: list[tuple[object, ...]] = []
    try:
        for number, model in enumerate(models):
            tables.append(
                score_documents(model, split, project, work, data.text_tokenizer, objective)
            )
            weights = model.folder or model.checkpoint
            if weights != "start" and given.tasks:
                values += tasks.values_of(number, trained.load_trained(weights, project), given)
    finally:
        shutil.rmtree(work)
    return write(
        folder / name,
        [model.name for model in models],
        in_common(tables, split),
        values,
        data.corpus,
        split,
        objective.measures,
    )


def check_size(data: Any, split: str) -> None:
    """Raises InputError if a split of text has fewer documents than a comparison needs, which is
    known before the models are run. The models may have still fewer in common."""
    if not hasattr(data, "corpus"):
        return  # DocumentScores refuses it
    num = sum(counts["documents"] for counts in data.corpus.parts(split).values())
    if 0 < num < LEAST:
        raise InputError(
            f"the {split} split has {num} documents, and {LEAST} are needed: give more, or a larger"
            f" data.{split}_share"
        )


def score_documents(
    model: Model,
    split: str,
    project: Project,
    work: Path,
    tokenizer: PreTrainedTokenizerFast,
    objective: Objective,
) -> DataFrame:
    """Returns the table of DocumentScores, of `test` or `validate` by the model's own strategy. A
    folder is evaluated in one process, with the run's token cache if it has its `tokenizer`. Raises
    Ended if it fails."""
    from transformers import AutoConfig

    config = read_mapping(model.run / RunFile.CONFIG, "restore it", yaml.safe_load)
    path, scores = work / RunFile.CONFIG, work / "scores.parquet"
    trainer = config["trainer"]
    if model.folder:
        with running(f"evaluate: the tokenizer of {model.folder}"):
            found = Pretrained(model.folder).fit(iter(()))
        if found.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
            of_folder = {"class_path": "Pretrained", "init_args": {"path": model.folder}}
            config["data"]["tokenizer"] = of_folder
        config["model"] |= {"adapter": None, "pretrained": model.folder}
        config["model"] |= objective.keys_without(AutoConfig.from_pretrained(model.folder))
        trainer |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    kind = f"{DocumentScores.__module__}.{DocumentScores.__name__}"
    callback = {"class_path": kind, "init_args": {"path": str(scores)}}
    trainer |= {"logger": False, "callbacks": [*(trainer["callbacks"] or []), callback]}
    config |= {"ckpt_path": model.checkpoint, "weights_only": None}
    config["run"] = {"root": str(work), "name": "run", "report": False}
    path.write_text(yaml.safe_dump(config), "utf-8")
    print(f"evaluate: {model.name}", flush=True)
    verb = "validate" if split == "validation" else "test"
    if code := run_verb(project, [verb, "--config", str(path)]):
        why = f"evaluate: {model.name} was not evaluated; the reason is above"
        raise Ended(Exit(code) if code in [*Exit] else Exit.FAILED, why)
    if not scores.exists():  # without documents the verb tests nothing
        raise InputError(
            f"{model.name} has an empty {split} split: give --split, or train with"
            f" data.{split}_share"
        )
    from pandas import read_parquet

    return read_parquet(scores)


def in_common(tables: list[DataFrame], split: str) -> list[DataFrame]:
    """Returns the rows of the documents that all models have scored, each text once."""
    tables = [table[(table["tokens"] > 0) & ~table.index.duplicated()] for table in tables]
    common = tables[0].index[tables[0].index.isin(tables[-1].index)]
    if len(common) < LEAST:
        raise InputError(
            f"the models have {len(common)} documents of the {split} split in common, and"
            f" {LEAST} are needed: give more, or a larger data.{split}_share"
        )
    return [table.loc[common] for table in tables]


def write(
    path: Path,
    names: list[str],
    tables: list[DataFrame],
    values: list[tuple[object, ...]],
    corpus: Corpus,
    split: str,
    measures: Mapping[str, Measure],
) -> list[Comparison]:
    """Compares the models and writes `path` with .json and .parquet. Of conversations (`is_whole`)
    only some tokens count, so they are compared by tokens alone."""
    from pandas import DataFrame, concat

    is_whole, measured = corpus.is_whole(split), DataFrame(values, columns=tasks.COLUMNS)
    comparisons = compared(tables, measured, is_whole, measures) if len(tables) > 1 else []
    models, rows = [], [measured]
    for number, (name, table) in enumerate(zip(names, tables, strict=True)):
        figures = figures_of(table, is_whole, measures)
        figures |= (
            measured[measured["model"] == number].groupby("measure")["value"].mean().to_dict()
        )
        models.append({"model": name, "figures": figures, "is_baseline": number > 0})
        for column in ("nats", *columns_of(measures)):
            if column in table:
                rows.append(
                    table.assign(model=number, measure=column, value=table[column]).reset_index()
                )
        print(f"{name}: " + "  ".join(f"{key} {value:.4f}" for key, value in figures.items()))
    found = {"split": split, "documents": len(tables[0]), "models": models}
    found["comparisons"] = list(map(asdict, comparisons))
    columns = [*tasks.COLUMNS, "hash", "source", "bytes", "tokens"]
    concat(rows)[columns].to_parquet(f"{path}.parquet", index=False)
    write_atomically(Path(f"{path}.json"), json.dumps(found, indent=1))
    print("\n".join(each.sentence for each in comparisons))
    print(f"written to {path}.json and .parquet")
    return comparisons


def compared(
    tables: list[DataFrame], measured: DataFrame, is_whole: bool, measures: Mapping[str, Measure]
) -> list[Comparison]:
    """Compares by equal tokens, by bytes, which any tokenizers allow, and by tasks."""
    has_same_tokens = tables[0]["tokenizer"].iloc[0] == tables[1]["tokenizer"].iloc[0]
    if is_whole and not has_same_tokens:
        raise InputError("tokenizers differ, and of conversations only some tokens count")
    run, baseline = (measured_in(table, is_whole, measures) for table in tables)
    of_documents = {name for name, measure in measures.items() if not measure.weights}
    # loss and bits are one test in two units
    num_tests = len(run.keys() - {"bits_per_byte"}) + measured["measure"].nunique()
    found = []
    for name, (values, weights, lower) in run.items():
        if name in baseline and (has_same_tokens or name in {"bits_per_byte", *of_documents}):
            found.append(compare(name, values, baseline[name].values, weights, lower, num_tests))
    for measure, rows in measured.groupby("measure"):
        by_model = rows.pivot(index="sample", columns="model", values="value").dropna()
        if len(by_model.columns) == len(tables):
            lower, ones = bool(rows["lower"].iloc[0]), np.ones(len(by_model))
            found.append(compare(str(measure), *by_model.to_numpy().T, ones, lower, num_tests))
    return found


NO_MEASURES: Mapping[str, Measure] = {}


class Measured(NamedTuple):
    """A measure of documents: a sum of values over a sum of weights, (S,) each."""

    values: np.ndarray
    weights: np.ndarray
    lower_is_better: bool = True


def columns_of(measures: Mapping[str, Measure]) -> list[str]:
    """Returns the columns of an objective's measures: of one of documents, its own name."""
    found: list[str] = []
    for name, measure in measures.items():
        found += [measure.values, measure.weights] if measure.weights else [name]
    return found


def measured_in(
    table: DataFrame, is_whole: bool, measures: Mapping[str, Measure]
) -> dict[str, Measured]:
    """Returns the measures of a model's documents by name, with those of its objective that the
    table has; bits per byte only of text, whose tokens all count."""
    nats = table["nats"].to_numpy()
    found = {"loss": Measured(nats, table["tokens"].to_numpy())}
    if not is_whole:
        found["bits_per_byte"] = Measured(nats, table["bytes"].to_numpy() * math.log(2))
    for name, measure in measures.items():
        columns = columns_of({name: measure})
        if not {*columns} <= {*table}:
            continue
        values, *weights = (table[column].to_numpy() for column in columns)
        ones = np.ones(len(table))
        found[name] = Measured(values, weights[0] if weights else ones, measure.lower_is_better)
    return found


def figures_of(
    table: DataFrame, is_whole: bool, measures: Mapping[str, Measure] = NO_MEASURES
) -> dict[str, float]:
    """Returns the value of each measure for a model."""
    return {
        name: float(one.values.sum() / one.weights.sum())
        for name, one in measured_in(table, is_whole, measures).items()
    }
