"""python -m benchmarks.learning: do the defaults learn? Held-out loss before and after trainings of
a small published model, by method, number of records and learning rate.

    python -m benchmarks.learning --records 150 --methods lora dpo-lora --rates auto 0.1x 10x
    python -m benchmarks.learning --table benchmarks/results/learning.md

The model is SmolLM2-135M-Instruct (demonstrations/weights.py). Records, short ones, so that a
training takes a minute of two cores:

    150      questions and answers of English dialogues (chatterbot-corpus)
    2,000    all of its short ones, and sums "412 + 93 =" with their results
    50,000   sums

A pair's rejected answer is another question's, a sum's is a wrong number. 110 such pairs rank no
rates (dpo-lora: 0.693 to 0.668 at the best of four, dpo: no rate learned), so the rejected one also
hesitates ("Um, 515"), and in every fourth pair the chosen one, as people do not agree. Ratings are
both answers of a pair.

Each training is one `fit` of the command line, with finetune.yaml or preferences.yaml, in a process
of its own. `auto` gives no learning rate: the product chooses; `3x` is three times that; a number
is the rate itself. A training of which --limit cuts the steps has its schedule over these.

A finished training is one line of JSON in --log, and is not run again. The fall is the loss before
minus the loss after. A default learns if its fall is at least 20 % of the best rate's.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dist_template.wings.history import read_run
from dist_template.wings.rehearse.workers import clean_processes
from tests.support import chats, line
from tests.support.real_weights import MADE
from tests.support.runs import CONFIGS, SHIPPED

from . import ROOT
from .record import commit, cpu_name, versions

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
FULL = "--model.adapter=null"
LORA = "--model.adapter.targets=all-linear --model.adapter.rank=16 --model.adapter.alpha=32"
BETA = {"simpo": 2.0}  # docs/finetune.md; 0.1 for the others
PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "kto", "reward")
METHODS = ["full", "lora", *(each + kind for each in PREFERENCES for kind in ("", "-lora"))]
HELD_OUT = {150: 0.25, 2_000: 0.05, 50_000: 0.002}  # shares of the records
LEAST = 0.2  # of the best fall, for a default that learns
TEMPLATE = (  # ChatML without SmolLM2's system prompt, which would be half of each record
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Training:
    """One training: what is trained on what, and how."""

    method: str
    records: int
    rate: str  # auto, or a number
    batch: str  # rows of an optimizer step: auto, or a number
    limit: int  # optimizer steps; -1: all
    seq_len: int
    precision: str


@dataclass
class Ended:
    """What a training reached: a line of the log."""

    method: str
    records: int
    rate: float
    global_batch: int
    steps: int
    before: float  # held-out losses
    after: float
    seconds: float
    steps_of_data: int  # optimizer steps of a training that --limit does not cut
    accuracy: float | None  # held-out: of tokens, or of pairs
    asked: dict[str, Any]  # the Training

    @property
    def fall(self) -> float:
        return self.before - self.after


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--records", type=int, nargs="+", default=[150], choices=HELD_OUT)
    parser.add_argument("--methods", nargs="+", default=["full", "lora"], choices=METHODS)
    parser.add_argument("--rates", nargs="+", default=["auto"], help="auto, 3x or 2e-5")
    parser.add_argument("--batch", default="auto", help="rows of an optimizer step")
    parser.add_argument("--limit", type=int, default=-1, help="optimizer steps of a training")
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--micro_batch_size", type=int, default=1, help="changes speed alone")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--model", type=Path, default=MADE / "model")
    parser.add_argument("--dialogues", type=Path, default=MADE / "dialogues.jsonl")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "learning.jsonl")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "learning")
    parser.add_argument("--table", type=Path, help="writes the table of the log, and runs nothing")
    given = parser.parse_args(argv)
    if given.table:
        given.table.write_text(page(read(given.log)), encoding="utf-8")
        return 0
    for records in given.records:
        for method in given.methods:
            for rate in given.rates:
                train(method, records, rate, given)
    print(table(read(given.log)))
    return 0


def train(method: str, records: int, rate: str, given: argparse.Namespace) -> Ended:
    """Runs a training, or returns what the log has of it."""
    if rate.endswith("x"):
        base = train(method, records, "auto", given).rate
        rate = f"{base * float(rate.removesuffix('x')):.3g}"
    asked = Training(
        method, records, rate, given.batch, given.limit, given.seq_len, given.precision
    )
    log = read(given.log)
    if found := [each for each in log if each.asked == asdict(asked)]:
        return found[0]
    key = asdict(asked) | {"rate": "", "batch": "", "limit": 0}
    alike = [e for e in log if e.asked | {"rate": "", "batch": "", "limit": 0} == key]
    before = alike[0].before if alike else None  # it depends on data, model and loss alone
    ended = run(asked, before, given)
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with given.log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(ended)) + "\n")
    print(
        f"{method}, {records} records, rate {ended.rate:.3g}, {ended.steps} steps of"
        f" {ended.global_batch} rows: {ended.before:.4f} to {ended.after:.4f},"
        f" {ended.seconds:.0f} s",
        flush=True,
    )
    return ended


def run(asked: Training, before: float | None, given: argparse.Namespace) -> Ended:
    """Runs `prepare` and `fit`. A validation comes before the first step if `before` is None."""
    given.work.mkdir(parents=True, exist_ok=True)
    flags, began = flags_of(asked, given), time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        prepared = prepare(asked, flags, given.work)
        flags += [f"--run.root={folder}/runs", "--trainer.num_sanity_val_steps=0"]
        if before is None:
            flags[-1] = "--trainer.num_sanity_val_steps=-1"
        command(["fit", *flags], Path(folder, "fit.log"))
        (run_folder,) = Path(folder).glob("runs/*/*")
        history = read_run(run_folder)
    metrics = history.metrics
    losses = metrics["eval/loss"].values
    accuracy = [name for name in metrics.names if re.fullmatch("eval/.*accuracy", name)]
    rows = int(history.facts["data"]["tokens_per_step"]) // asked.seq_len
    (of_data,) = re.findall(r"^ *train +([\d,]+) rows", prepared, re.MULTILINE)
    epochs = history.config["trainer"]["max_epochs"]
    return Ended(
        method=asked.method,
        records=asked.records,
        rate=float(history.config["model"]["optim"]["learning_rate"]),
        global_batch=rows,
        steps=int(metrics["train/loss"].steps[-1]),
        before=float(losses[0]) if before is None else before,
        after=float(losses[-1]),
        seconds=round(time.monotonic() - began, 1),
        steps_of_data=int(of_data.replace(",", "")) * epochs // rows,
        accuracy=float(metrics[accuracy[0]].values[-1]) if accuracy else None,
        asked=asdict(asked),
    )


def prepare(asked: Training, flags: list[str], work: Path) -> str:
    """Tokenizes once; returns what was printed."""
    log = work / f"prepared-{source_of(asked.method)}-{asked.records}-{asked.seq_len}.log"
    return log.read_text("utf-8") if log.exists() else command(["prepare", *flags], log)


def command(argv: list[str], log: Path) -> str:
    """Runs a command of the project in a new process; returns what it printed."""
    process = clean_processes().Process(target=_serve, args=(argv, log, THREADS))
    process.start()
    process.join()
    printed = log.read_text("utf-8")
    if process.exitcode:
        raise RuntimeError(f"{argv} ended with {process.exitcode}:\n{printed[-4000:]}")
    return printed


def _serve(argv: list[str], log: Path, threads: int) -> None:
    with log.open("w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        torch.set_num_threads(threads)
        code = line.command(argv)
    os._exit(code)  # exit handlers of libraries may wait


def source_of(method: str) -> str:
    if method in ("full", "lora"):
        return "Chat"
    return "Ratings" if method.startswith("kto") else "Preferences"


def flags_of(asked: Training, given: argparse.Namespace) -> list[str]:
    loss, source = asked.method.partition("-")[0], source_of(asked.method)
    is_chat = source == "Chat"
    path = records_of(source, asked.records, given)
    config = CONFIGS / "finetune.yaml" if is_chat else SHIPPED / "preferences.yaml"
    micro = given.micro_batch_size
    flags = f"""--config={config} --run.report=false --data.cache_dir={given.work}/cache
        --data.source={source} --data.source.paths=[{path}]
        --data.tokenizer.path={given.model}
        --data.seq_len={asked.seq_len} --data.micro_batch_size={micro}
        --data.validation_share={HELD_OUT[asked.records]} --data.test_share=0
        --data.prompts=[] --model.pretrained={given.model} --model.sample_tokens=1
        --trainer.precision={asked.precision} --trainer.accelerator=cpu --trainer.devices=1
        --trainer.enable_checkpointing=false --trainer.logger=false
        --trainer.log_every_n_steps=1 --trainer.val_check_interval=1000000
        {LORA if "lora" in asked.method else FULL}""".split()
    if is_chat:
        flags.append(f"--data.source.template={given.work}/chatml.jinja")
    else:
        flags.append(f"--model.preference.loss={loss}")
    if loss in BETA:
        flags.append(f"--model.preference.beta={BETA[loss]}")
    if asked.limit > 0:
        flags.append(f"--trainer.max_steps={asked.limit}")
    if asked.rate != "auto":
        flags.append(f"--model.optim.learning_rate={asked.rate}")
    if asked.batch != "auto":
        flags.append(f"--data.global_batch_size={asked.batch}")
    return flags


# ---- the records ---------------------------------------------------------------------------------


def records_of(source: str, num: int, given: argparse.Namespace) -> Path:
    """Writes `num` records for a source, the same each time, and the chat template."""
    path = given.work / f"{source}-{num}.jsonl"
    if not path.exists():
        asked = [(q, right, wrong) for q, right, wrong in questions(num, given.dialogues)]
        chats.write(path, [*records(source, asked)][:num])
    (given.work / "chatml.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


def records(source: str, asked: list[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    for number, (question, right, wrong) in enumerate(asked):
        if source == "Chat":
            yield {"prompt": question, "completion": right}
            continue
        prompt = f"{question}\n"  # texts: a chat template would be half of each
        hesitates = number % 4 == 3
        chosen, rejected = (f"Um, {right}", wrong) if hesitates else (right, f"Um, {wrong}")
        if source == "Preferences":
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        else:
            yield {"prompt": prompt, "completion": chosen, "label": True}
            yield {"prompt": prompt, "completion": rejected, "label": False}


def questions(num: int, dialogues: Path) -> list[tuple[str, str, str]]:
    """Returns questions with a right and a wrong answer, each question and answer once."""
    chance = random.Random(0)
    if num == max(HELD_OUT):
        return sums(num, chance)
    talks = [json.loads(text)["messages"] for text in dialogues.read_text("utf-8").splitlines()]
    turns = [talk[i : i + 2] for talk in talks for i in range(0, len(talk), 2)]
    texts = {(question["content"], answer["content"]) for question, answer in turns}
    short = sorted(each for each in texts if len("".join(each)) <= 120)
    short = sorted(chance.sample(short, len(short)), key=lambda each: len("".join(each)) > 40)
    found = [(question, right, short[i - 7][1]) for i, (question, right) in enumerate(short)]
    found = [each for each in found if each[1] != each[2]][:num]
    return chance.sample([*found, *sums(num - len(found), chance)], num)


def sums(num: int, chance: random.Random) -> list[tuple[str, str, str]]:
    terms = [divmod(each, 1000) for each in chance.sample(range(1_000_000), num)]
    return [
        (f"{a} + {b} =", str(a + b), str(a + b + chance.choice([-100, -10, -1, 1, 10, 100])))
        for a, b in terms
    ]


# ---- what was found ------------------------------------------------------------------------------


def read(log: Path) -> list[Ended]:
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return [Ended(**json.loads(text)) for text in lines]


def page(ended: Sequence[Ended]) -> str:
    """Returns the Markdown of benchmarks/results/learning.md."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"""# Do the defaults learn?

Written by `python -m benchmarks.learning --table`: {time.strftime("%Y-%m-%d")}, commit {commit()},
{cpu_name()}, one thread; {packages}.

SmolLM2-135M-Instruct in bf16-mixed; the head of `benchmarks/learning.py` has the records. A fall is
the held-out loss before minus after. "Of the best" is the default's fall over the best rate's of
the row; {LEAST:.0%} is required. Where steps are "of" more, a training was cut to these by
`trainer.max_steps`, and its schedule and the rate of `auto` are for these: what the whole one would
reach is not measured. Each training ran once, and of 150 records 34 to 39 are held out: rates that
differ by a sixth of a fall are alike.
Rows are of {" or ".join(map(str, sorted({each.asked["seq_len"] for each in ended})))} tokens.

{table(ended)}

Not run: {"; ".join(not_run(ended))}.
"""


def not_run(ended: Sequence[Ended]) -> Iterator[str]:
    """Yields each number of records with the methods that have no training."""
    for records in HELD_OUT:
        ran = {each.method for each in ended if each.records == records}
        yield f"{records:,} records: {', '.join(each for each in METHODS if each not in ran)}"


def table(ended: Sequence[Ended]) -> str:
    """Returns a row for each number of records, method, batch and number of steps."""
    lines = [
        "| records | method | rows, steps | loss before | fall by rate | default | of the best |",
        "|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[int, str, int, int], list[Ended]] = {}
    for each in ended:
        key = (each.records, each.method, each.global_batch, each.steps)
        cells.setdefault(key, []).append(each)
    order = sorted(cells, key=lambda key: (key[0], METHODS.index(key[1]), *key[2:]))
    autos = {each.method: each.rate for each in ended if each.asked["rate"] == "auto"}
    same = {method: autos[method] for method in ("full", "lora") if method in autos}
    return "\n".join(lines + [row(cells[key], same.get(key[1])) for key in order])


def row(cell: list[Ended], same: float | None = None) -> str:
    """Returns the row of trainings that differ in their rates. `same`: what `auto` is for each
    number of records and steps, as it is for conversations."""
    one, best = cell[0], max(each.fall for each in cell)
    by_rate = sorted({each.rate: each for each in cell}.values(), key=lambda each: each.rate)
    falls = ", ".join(f"{each.rate:.2g}: {each.fall:.3g}" for each in by_rate)
    of_data = "" if one.steps >= one.steps_of_data else f" of {one.steps_of_data:,}"
    default, share = "not run", ""
    if chosen := [each for each in cell if each.asked["rate"] == "auto" or each.rate == same]:
        default, part = f"{chosen[-1].rate:.2g}", chosen[-1].fall / best
        share = f"{part:.0%}" if best > 0 and part >= LEAST else "**missed**"
        if len(by_rate) == 1:
            share = "no other" if best > 0 else "**missed**"
    return (
        f"| {one.records:,} | {one.method} | {one.global_batch}, {one.steps}{of_data}"
        f" | {one.before:.3f} | {falls} | {default} | {share} |"
    )


if __name__ == "__main__":
    sys.exit(main())
