"""Evaluates runs and baselines one after the other, compares them, and writes the results."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from ....cli.fit import WithoutTrainer
from ....cli.run import verified_checkpoint
from ....cluster.signals import end_with_parent
from ....errors import Ended, Exit, InputError
from ....observe.history.run import CONFIG
from ....project import Project
from ....records import read_mapping, write_atomically
from ....text.cache.token_cache import Corpus
from ....text.tokenizers import Pretrained
from ..export import trained
from ..export.onnx import MANIFEST
from . import tasks
from .documents import DocumentScores
from .paired import LEAST, SCALED, Comparison, Pair, compare, parse

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerFast

UNIGRAM = "unigram"  # the baseline without a model
TRAIN_TOKENS = 2**24  # that it counts
MEASURED = ["model", "measure", "lower", "sample", "value"]  # fields of tasks.Value
SHOWN, CHARACTERS = 3, 300  # documents at each end, and of the text of each


def evaluate(given: argparse.Namespace, name: str, project: Project) -> list[Comparison]:
    """Writes <name>.json and .parquet, a row for each model and sample; returns the comparisons.

    Raises:
        InputError: a name is no model, or there are too few documents.
    """
    keys, split = tasks.read(given.config), given.split
    models = _models(given, project)
    first = models[0]
    known = dict.fromkeys(("loss", "bits_per_byte", getattr(keys["metric"], "__name__", "loss")))
    for text in given.require:
        measure, _ = parse(text)
        if measure not in known and not keys["tasks"]:
            raise InputError(f"--require: {measure} is not measured; give {', '.join(known)}")
    flags, *_ = trained.of_run(str(first.run), project, "RUN")
    data: Any = WithoutTrainer(project, flags, run=False).datamodule
    if not getattr(data, share := f"{split}_share", 1):
        other = "validation" if split == "test" else "test"
        raise InputError(
            f"data.{share} of {first.name} is 0, so its {split} split is empty: give --split"
            f" {other}, or train with a data.{share} that holds out {LEAST} documents or more"
        )
    folder = first.run / "evaluation"
    work = folder / f".{name}"
    work.mkdir(parents=True, exist_ok=True)
    tables: list[DataFrame] = []
    values: list[tasks.Value] = []
    try:
        for number, model in enumerate(models):
            if model.name == UNIGRAM:
                tables.append(score_unigrams(data.corpus, split, tables[0]))
                continue
            tables.append(score_documents(model, split, project, work, data.text_tokenizer))
            weights = model.folder or model.checkpoint
            if weights != "start" and (keys["tasks"] or keys["metric"]):
                loaded, samples = trained.load_trained(weights, project), tables[0]
                values += tasks.values_of(number, loaded, keys, samples.to_dict("records"))
    finally:
        shutil.rmtree(work)
    return Results(given, tables, values, data.corpus).write(folder, name)


def _models(given: argparse.Namespace, project: Project) -> list[Model]:
    """Returns the runs and then the baselines."""
    runs = [of_run(each, project, "RUN") for each in given.runs]
    if len({run.checkpoint for run in runs}) < len(runs):
        raise InputError(f"{' '.join(given.runs)}: a run is given twice; give each once")
    found = [baseline_of(each, runs[0], project) for each in given.baseline]
    if len(found) > 1 and not {"start", UNIGRAM}.isdisjoint(given.baseline):
        raise InputError("several baselines are runs that differ in their seed: give one of others")
    return runs + found


class Model(NamedTuple):
    """A run's configuration with a checkpoint, "start", or the weights of a folder or the hub."""

    name: str
    run: Path
    checkpoint: str = "start"
    folder: str | None = None

    def config(self) -> dict[str, Any]:
        return read_mapping(self.run / CONFIG, "restore it", yaml.safe_load)


def of_run(name: str, project: Project, flag: str) -> Model:
    """Finds the newest checkpoint of a run's folder, or the checkpoint at a path inside one."""
    _, path, run = trained.of_run(name, project, flag)
    return Model(name, run, str(verified_checkpoint(path, flag)))


def baseline_of(name: str, run: Model, project: Project) -> Model:
    """Finds the model of `--baseline`; a folder is evaluated on the data of `run`."""
    if name in ("start", UNIGRAM):
        return Model(name, run.run)
    folder = run.config()["model"].get("pretrained") if name == "parent" else name
    if not folder:
        raise InputError(f"--baseline parent: {run.name} was not fine-tuned; give start")
    if name == "parent" or trained.is_pretrained(name):
        return Model(name, run.run, folder=folder)
    return of_run(name, project, "--baseline")


def score_documents(
    model: Model, split: str, project: Project, work: Path, tokenizer: PreTrainedTokenizerFast
) -> DataFrame:
    """Returns the table of DocumentScores, of `test` or `validate` by the model's own strategy.

    A folder is evaluated in one process, with the run's token cache if it has its `tokenizer`.

    Raises:
        Ended: it failed; the reason is on the screen.
    """
    config, path, scores = model.config(), work / CONFIG, work / "scores.parquet"
    trainer, onnx = config["trainer"], None
    if model.folder:
        found = Pretrained(model.folder).fit(iter(()))
        if found.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
            of_folder = {"class_path": "Pretrained", "init_args": {"path": model.folder}}
            config["data"]["tokenizer"] = of_folder
        config["model"]["adapter"] = None
        if (Path(model.folder) / MANIFEST).is_file():
            onnx, config["model"]["loss_chunk"] = model.folder, None
        else:
            config["model"]["pretrained"] = model.folder
        trainer |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    kind = f"{DocumentScores.__module__}.{DocumentScores.__name__}"
    callback = {"class_path": kind, "init_args": {"path": str(scores), "onnx": onnx}}
    trainer |= {"logger": False, "callbacks": [*(trainer["callbacks"] or []), callback]}
    config |= {"ckpt_path": model.checkpoint, "weights_only": None}
    config["run"] = {"root": str(work), "name": "run", "report": False}
    path.write_text(yaml.safe_dump(config), "utf-8")
    print(f"evaluate: {model.name}", flush=True)
    verb = "validate" if split == "validation" else "test"
    if code := run_verb(project, [verb, "--config", str(path)]):
        why = f"evaluate: {model.name} was not evaluated; the reason is above"
        raise Ended(Exit(code) if code in [*Exit] else Exit.FAILED, why)
    from pandas import read_parquet

    return read_parquet(scores)


def run_verb(project: Project, argv: list[str]) -> int:
    """Runs a verb in a process of its own, which starts the other ranks; returns its exit code."""
    command = [sys.executable, "-m", project.package, *argv]
    return subprocess.call(command, preexec_fn=end_with_parent)


def score_unigrams(corpus: Corpus, split: str, table: DataFrame) -> DataFrame:
    """Returns a model's table with the nats of the train split's frequencies of tokens."""
    nats = nats_of_unigrams(corpus, split)
    if corpus.is_whole(split):
        nats *= corpus.counted(split)
    return table.assign(nats=np.add.reduceat(nats, np.append(0, table["end"][:-1])))


def nats_of_unigrams(corpus: Corpus, split: str) -> np.ndarray:
    """Returns (T,) nats of each token of a split; each token of the vocabulary has one more."""
    train = corpus.tokens("train")[:TRAIN_TOKENS]
    counts = np.bincount(train, minlength=corpus.manifest["vocab_size"]) + 1
    return np.log(counts.sum() / counts)[corpus.tokens(split)]


class Results:
    """The documents that all models have scored, each text once, and the values of tasks.

    Of conversations (`is_whole`) only some tokens count, so they are compared by tokens alone.
    """

    def __init__(
        self, given: argparse.Namespace, tables: list[DataFrame], values: list[tasks.Value],
        corpus: Corpus,
    ) -> None:  # fmt: skip
        from pandas import DataFrame

        self.names, self.num_runs = [*given.runs, *given.baseline], len(given.runs)
        self.split, self.corpus, self.is_whole = given.split, corpus, corpus.is_whole(given.split)
        self.measured = DataFrame(values, columns=MEASURED)
        tables = [table[(table["tokens"] > 0) & ~table.index.duplicated()] for table in tables]
        common = tables[0].index
        for table in tables[1:]:
            common = common[common.isin(table.index)]
        if len(common) < LEAST:
            raise InputError(
                f"the models have {len(common)} documents of the {self.split} split in common, and"
                f" {LEAST} are needed: give more, or a larger data.{self.split}_share"
            )
        self.tables = [table.loc[common] for table in tables]

    def write(self, folder: Path, name: str) -> list[Comparison]:
        comparisons = []
        if len(self.tables) > self.num_runs:
            comparisons = self._compared()
        unit = "loss" if self.is_whole else "bits per byte"
        found = {"split": self.split, "documents": len(self.tables[0]), "unit": unit}
        found["models"] = self._figures_of_models()
        found["comparisons"] = list(map(asdict, comparisons))
        self._write_samples(folder / f"{name}.parquet")
        found |= self._best_and_worst()
        write_atomically(folder / f"{name}.json", json.dumps(found, indent=1))
        print("\n".join(each.sentence for each in comparisons))
        print(f"written to {folder / name}.json and .parquet")
        return comparisons

    def _compared(self) -> list[Comparison]:
        """Compares by bytes, which any tokenizers allow, and by equal tokens; then tasks."""
        tables, num_runs, first = self.tables, self.num_runs, self.tables[0]
        has_same_tokens = len({table["tokenizer"].iloc[0] for table in tables}) == 1
        if self.is_whole and not has_same_tokens:
            raise InputError("tokenizers differ, and of conversations only some tokens count")
        bits = np.stack([table["nats"] for table in tables]) / math.log(2)
        size = first["bytes"].to_numpy()
        pairs = [Pair("bits_per_byte", bits[:num_runs], bits[num_runs:], size)]
        for measure, rows in self.measured.groupby("measure"):
            by_model = rows.pivot(index="sample", columns="model", values="value").dropna()
            values = by_model.to_numpy().T
            if len(values) == len(tables):
                ones, lower = np.ones(values.shape[1]), bool(rows["lower"].iloc[0])
                pairs.append(Pair(str(measure), values[:num_runs], values[num_runs:], ones, lower))
        by_bytes, *others = compare(pairs)
        if not has_same_tokens:
            return [by_bytes, *others]
        factor = math.log(2) * size.sum() / first["tokens"].sum()  # one test in two units
        scaled = {key: getattr(by_bytes, key) * factor for key in SCALED}
        by_tokens = replace(by_bytes, name="loss", **scaled)
        by_tokens.decide()
        return [by_tokens, *others] if self.is_whole else [by_tokens, by_bytes, *others]

    def _figures_of_models(self) -> list[dict[str, Any]]:
        """Returns, and prints, the figures of each model; for a mixture also by source."""
        found = []
        for number, (name, table) in enumerate(zip(self.names, self.tables, strict=True)):
            values = self.measured[self.measured["model"] == number].groupby("measure")["value"]
            figures = figures_of(table, self.is_whole) | values.mean().to_dict()
            sources = {}
            for source, rows in table.groupby("source"):
                if source:
                    sources[str(source)] = figures_of(rows, self.is_whole)
            known = {"model": name, "figures": figures, "sources": sources}
            found.append(known | {"is_baseline": number >= self.num_runs})
            print(f"{name}: " + "  ".join(f"{key} {value:.4f}" for key, value in figures.items()))
        return found

    def _best_and_worst(self) -> dict[str, Any]:
        """Returns the documents where the first run is best and worst, against the baseline."""
        run, last = self.tables[0], self.tables[-1]
        size, unit = ("tokens", 1.0) if self.is_whole else ("bytes", math.log(2))
        shown = run[["sample"]].assign(text=run["text"].str[:CHARACTERS])
        shown["run"] = difference = run["nats"] / run[size] / unit
        shown["baseline"] = last["nats"] / last[size] / unit
        if len(self.tables) > self.num_runs:
            difference = shown["run"] - shown["baseline"]
        shown = shown.loc[difference.sort_values().index]
        best, worst = shown[:SHOWN], shown[: -SHOWN - 1 : -1]
        return {"best": best.to_dict("records"), "worst": worst.to_dict("records")}

    def _write_samples(self, path: Path) -> None:
        from pandas import concat

        rows = [self.measured]
        for number, table in enumerate(self.tables):
            table = table.assign(model=number, measure="nats", value=table["nats"])
            rows.append(table.reset_index())
        columns = [*self.measured.columns, "hash", "source", "bytes", "tokens"]
        temporary = path.with_name(f".{path.name}")
        concat(rows)[columns].to_parquet(temporary, index=False)
        temporary.replace(path)


def figures_of(table: DataFrame, is_whole: bool) -> dict[str, float]:
    """Returns the means; bits per byte only of text, whose tokens all count."""
    nats = float(table["nats"].sum())
    found = {"loss": nats / float(table["tokens"].sum())}
    if not is_whole:
        found["bits_per_byte"] = nats / math.log(2) / float(table["bytes"].sum())
    return found
