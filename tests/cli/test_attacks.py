"""Wrong inputs over all verbs: each ends with a code above 0 and a sentence, and writes nothing.

The command line runs in this process, which is quicker than a start of Python for each."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template.cli.verbs import TRAINING, verbs
from tests.support.line import command
from tests.support.ranges import ranges

TIME_S = 60  # of a case that waits: a pipe, a device, a network

SECTIONS = """trainer model data run cluster watchdog console last_checkpoint best_checkpoint
preemption throughput numerics gpu samples store diagnosis preflight model.optim model.blocks
model.mtp model.balance cluster.kubernetes""".split()
OF_A_SECTION = ("3", "[1, 2]", "text")
FILES = "{missing} {folder} {pipe} /dev/zero {empty} {binary} {list} {huge}".split()
OF_FILES = """--config --deepspeed --ckpt_path --model.pretrained --model
--data.tokenizer --trainer""".split()
RUNS = """{missing} {empty} {folder} {binary} {pipe} /dev/zero s3:// file://x ftp://h/x zip://x
memory://nothing/here {foreign}""".split(" ")
OF_RUNS = {
    "diagnose": "{}",
    "report": "{}",
    "compare": "{} {}",
    "export": "{} --output={out}",
    "evaluate": "{}",
    "promote": "{}",
    "serve": "{}",
}
YAML = {
    "tabs": "trainer:\n\tmax_steps: 3",
    "python": "!!python/object/apply:os.system [id]",
    "number-key": "1: 2",
    "null-key": "~: 2",
    "list-key": "? [a, b]\n: 3",
    "bool-key": "true: {a: 1}",
    "alias-loop": "trainer: &a {max_steps: *a}",
    "alias-bomb": "a: &a [x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{n}: &{n} [{','.join([f'*{o}'] * 9)}]\n"
        for o, n in zip("abcdefg", "bcdefgh", strict=True)
    ),
    "two-documents": "trainer: {max_steps: 3}\n---\nmodel: {}",
    "unknown-tag": "trainer: {max_steps: !mine 3}",
    "unknown-alias": "trainer: *nowhere",
    "nul": "trainer: {max_steps: 3}\0",
    "escape": 'run: {name: "\\e[31m"}',
    "list": "- trainer",
    "text": "trainer",
    "number": "3",
    "date": "2026-11-28",
    "unknown": "nowhere: 3",
    "unknown-empty": "nowhere: {}",
    "unknown-null": "nowhere: null",
    "unknown-list": "nowhere: []",
    "unknown-below": "trainer: {nowhere: {}}",
    "unknown-below-null": "trainer: {nowhere: null}",
    "unknown-deep": "model: {optim: {nowhere: {a: {}}}}",
    "section-null": "trainer: null",
    "section-list": "trainer: []",
    "section-text": "trainer: max_steps",
    "dotted-twice": "run.name: a\nrun: {name: b}",
    "dotted-unknown": "run.nowhere: a",
    "class-without-path": "trainer: {strategy: {init_args: {stage: 2}}}",
    "class-of-nowhere": "trainer: {strategy: {class_path: nowhere.X}}",
    "class-is-a-module": "trainer: {strategy: {class_path: os}}",
    "class-is-a-function": "trainer: {strategy: {class_path: os.getcwd}}",
    "class-of-another-kind": "trainer: {strategy: {class_path: torch.nn.Linear}}",
    "class-is-a-number": "trainer: {strategy: {class_path: 3}}",
    "callbacks-of-numbers": "trainer: {callbacks: [3]}",
    "callback-of-another-kind": "trainer: {callbacks: [{class_path: torch.nn.Linear}]}",
    "callback-without-arguments": "trainer: {callbacks: [EarlyStopping]}",
    "logger-of-numbers": "trainer: {logger: [3]}",
    "logger-of-nowhere": "trainer: {logger: [{class_path: nowhere.Logger}]}",
    "hosts-text": "cluster: {hosts: node1}",
    "hosts-of-numbers": "cluster: {hosts: [1, 2]}",
    "environment-list": "cluster: {environment: [A=1]}",
    "pod-text": "cluster: {kubernetes: {pod: containers}}",
    "kind": "cluster: {kubernetes: {kind: Pod}}",
    "config-in-config": "config: other.yaml",
    "infinite": "trainer: {max_steps: .inf}",
    "half-steps": "trainer: {max_steps: 1.5}",
    "text-steps": "trainer: {max_steps: many}",
    "list-steps": "trainer: {max_steps: [1]}",
    "source-text": "data: {source: nowhere}",
    "source-list": "data: {source: [TextFiles]}",
    "source-path-number": "data: {source: {class_path: TextFiles, init_args: {paths: [3]}}}",
    "tokenizer-number": "data: {tokenizer: 7}",
    "architecture-empty": "model: {architecture: {}}",
    "architecture-list": "model: {architecture: [llama]}",
    "architecture-unknown": "model: {architecture: {model_type: nowhere}}",
    "architecture-negative": "model: {architecture: {model_type: llama, hidden_size: -3}}",
    "architecture-text": "model: {architecture: {model_type: llama, hidden_size: wide}}",
    "architecture-zero-heads": "model: {architecture: {model_type: llama, num_attention_heads: 0}}",
    "architecture-layers": "model: {architecture: {model_type: llama, num_hidden_layers: -1}}",
    "deepspeed-text": "trainer: {strategy: {class_path: ZeroStrategy, init_args: {config: '{}'}}}",
    "phases-empty": "model: {optim: {learning_rate: []}}",
    "phases-text": "model: {optim: {learning_rate: [fast]}}",
}
ENVIRONMENT = """WORLD_SIZE=x WORLD_SIZE=0 WORLD_SIZE=-2 WORLD_SIZE=1e3 RANK=x RANK=-1 LOCAL_RANK=x
LOCAL_WORLD_SIZE=0 LOCAL_SIZE=0 NODE_RANK=x MASTER_PORT=x MASTER_PORT=-1 MASTER_PORT=70000
SLURM_PROCID=x SLURM_LOCALID=x SLURM_NTASKS=0 DIST_JOB_STARTED=x DIST_JOB_STARTED=inf
DIST_RUN_ID=../x DIST_RUN_ID=.. DIST_RUN_ID=a/b""".split()
VALUES = """
--run.name= --run.name=/ --run.name=.. --run.name=a/../../b --run.root= --run.root=/proc/x
--run.root={file}/x --run.store= --run.store=x --run.store=:// --run.store=s3://
--run.store=file://x --run.store=s3://a@b/c --run.store=s3://a/../b --run.store=ftp://h/x
--run.store=zip://x --run.store=github://x --run.store=reference://x --run.report=maybe
--run.plotly=none --seed_everything=-1 --seed_everything=x --store.folder=/etc --store.keep=0
--trainer.devices=0 --trainer.devices=-7 --trainer.devices=x --trainer.devices=[]
--trainer.devices=[0,0] --trainer.num_nodes=0 --trainer.accelerator=abacus --trainer.precision=7
--trainer.strategy= --trainer.strategy=nowhere --trainer.strategy=ddp_spawn --trainer.max_steps=-5
--trainer.max_epochs=-5 --trainer.max_time=x --trainer.max_time=-1
--trainer.gradient_clip_algorithm=x --trainer.gradient_clip_val=-1 --trainer.limit_val_batches=-1
--trainer.limit_train_batches=1.5 --trainer.val_check_interval=0 --trainer.val_check_interval=1.5
--trainer.profiler=x --trainer.logger=x --trainer.callbacks=x --trainer.plugins=x
--trainer.fast_dev_run=-1 --trainer.accumulate_grad_batches=0
--trainer.accumulate_grad_batches=1.5 --ckpt_path= --ckpt_path=newest --ckpt_path=best
--ckpt_path=s3://nowhere --ckpt_path=ftp://h/x --weights_only=maybe --optimizer=x
--optimizer=torch.nn.Linear --optimizer=SGD,--optimizer.lr=x
--optimizer=SGD,--optimizer.momentum=-1 --lr_scheduler=x --lr_scheduler=StepLR
--model.optim.optimizer=x --model.optim.schedule=x --model.optim.warmup=-1 --model.attention=x
--model.pretrained=/ --model.pretrained=.. --model.architecture= --model.adapter.rank=0
--model.adapter.targets=[nowhere] --model.adapter=x --model.mtp.weight=-1 --model.mtp.weight=1
--model.preference.loss=x --model.distillation.teacher=nowhere --model.blocks.checkpoint=x
--data.seq_len=0 --data.global_batch_size=0 --data.global_batch_size=7
--data.global_batch_size=[] --data.micro_batch_size=0 --data.micro_batch_size=99
--data.validation_share=1 --data.validation_share=-1 --data.num_workers=-1 --data.source=x
--data.source.paths=[] --data.source.paths=x --data.source.paths=[/dev/zero]
--data.source.paths=[{pipe}] --data.source.paths=[{folder}] --data.tokenizer=x --data.tokenizer=
--data.cache_dir={file}/x --data.cache_dir= --data.prompts=x --data.balance=x
--data.rank_speeds=[0] --data.rank_speeds=[1,2] --last_checkpoint.every_n_steps=0
--last_checkpoint.dirpath={file}/x --last_checkpoint.dirpath= --best_checkpoint.mode=x
--best_checkpoint.keep=-1 --preemption.max_time=x --preemption.max_time=-1 --watchdog.timeout_s=-1
--console.line_every_s=-1 --cluster.nodes=0 --cluster.min_nodes=0
--cluster.nodes=1,--cluster.min_nodes=2 --cluster.time_limit=x --cluster.time_limit=1
--cluster.time_limit=-1 --cluster.time_limit=1:2:3:4 --cluster.device_memory=80
--cluster.device_memory=-1GB --cluster.device_memory=0GB --cluster.hosts=[a,a]
--cluster.hosts=[-x] --cluster.master=-x --cluster.port=0 --cluster.port=99999
--cluster.container=docker --cluster.container=pyxis --cluster.include=a
--cluster.environment={1a:1} --cluster.kubernetes.pod={containers:[]}
--cluster.kubernetes.kind=Pod --cluster.save_s=0 --nowhere --nowhere=1 --trainer
--trainer.max_steps nowhere -x --config --config= --config=strategy/nowhere --config={missing}
--config=http://127.0.0.1:9/x --trainer.max_step=3 --trainer.max_steps=3=4""".split()
FLAGS = {
    "config": ["", "nowhere", "list x", "show", "show nowhere", "copy", "copy nowhere", "deepspeed",
               "deepspeed --output={missing}/x"],
    "completion": ["", "fish", "bash x"],
    "docs": ["nowhere", "a b", "../../etc/passwd", "--x"],
    "doctor": ["--nowhere", "x", "--run.rot=x"],
    "launch": ["", "--on", "--on=nowhere", "--on=slurm --x", "--on=kubernetes", "--on=ssh status",
               "--status nowhere", "--logs nowhere", "--stop nowhere"],
    "plan": ["--memory=x", "--devices=0", "--devices=x", "--nodes=-1", "--x", "x"],
    "prepare": ["--data.source=x", "--x", "x"],
    "rehearse": ["--x", "x", "--devices=0"],
    "sweep": ["", "--space={missing}", "--space={empty}", "--space={pipe}", "--space={list}",
              "--space={folder}", "--space={binary}", "--trials=0", "--trials=x"],
    "upgrade": ["--x", "x"],
    "compare": ["", "x", "--x"],
    "diagnose": ["", "--json", "a b c"],
    "report": ["--x"],
    "export": ["", "{missing}", "{missing} --to=x", "--to"],
    "evaluate": ["", "--x", "{missing} --tasks="],
    "promote": ["", "x", "--x"],
    "serve": ["", "{missing} --port=x", "{missing} --port=0", "--x"],
}  # fmt: skip


def cases() -> Iterator[tuple[str, ...]]:
    """Yields (what precedes it, a verb, its words …); "small" stands for a complete training."""
    for name in "fitt '' -x --fit FIT fit.py é ../fit".split():
        yield "", name.strip("'")
    yield ("",)
    for verb in verbs():
        yield "", verb, "--nowhere_at_all=3"
    for verb in TRAINING:
        yield "", verb, "--config={empty}"
        yield "", verb, "--trainer.max_stepz=3"
    for section in SECTIONS:
        for value in OF_A_SECTION:
            yield "small", "fit", f"--{section}={value}"
    for flag in OF_FILES:
        for file in FILES:
            yield "small", "fit", f"{flag}={file}"
    for file in FILES:
        yield "small", "launch", "--on=ssh", "--dry-run", f"--cluster.hostfile={file}"
    for name in YAML:
        yield "small", "fit", f"--config={{here}}/{name}.yaml"
    for given in ENVIRONMENT:
        yield given, "fit"
    for given in VALUES:
        yield ("small", "fit", *given.split(",--")) if ",--" not in given else (
            "small", "fit", *(given.replace(",--", " --").split()))  # fmt: skip
    for key, checks in sorted(ranges().items()):
        if checks and key.count(".") == 1:
            yield "small", "fit", f"--{key}=-7"
    for verb, pattern in OF_RUNS.items():
        for run in RUNS:
            yield "", verb, *pattern.replace("{}", run).split(" ")
    for verb, given in FLAGS.items():
        for words in given:
            yield "", verb, *words.split()


ALL = list(dict.fromkeys(cases()))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    here = tmp_path_factory.mktemp("here")
    for name, text in YAML.items():
        (here / f"{name}.yaml").write_text(text)
    (here / "empty").touch()
    (here / "binary").write_bytes(bytes(range(256)) * 9)
    (here / "list").write_text("[1, 2]")
    (here / "file").write_text("x")
    (here / "folder").mkdir()
    (here / "foreign").mkdir()
    (here / "foreign" / "config.yaml").write_text("a: 1")
    os.mkfifo(here / "pipe")
    (here / "huge").touch()
    os.truncate(here / "huge", 2**40)
    names = "empty binary list file folder foreign pipe huge missing out".split()
    return {"here": str(here), **{name: str(here / name) for name in names}}


def late(number: int, frame: object) -> None:
    raise TimeoutError(f"it has taken {TIME_S} s")


def attacked(case: tuple[str, ...], flags: list[str], places: dict[str, str], capfd: Any) -> str:
    """Why a case is not refused as it should be; "": it is."""
    words = [*case[1:]]
    for name, path in places.items():
        words = [word.replace(f"{{{name}}}", path) for word in words]
    if case[0] == "small":
        words = [words[0], *flags, *words[1:]]
    capfd.readouterr()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TIME_S)
    try:
        code: Any = command(words)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = capfd.readouterr().err.strip()
    sentences = [line for line in said.splitlines() if line.startswith("error: ")]
    if code in (0, None):
        return f"is accepted ({said[-200:]})"
    if "Traceback" in said:
        return f"has a traceback: {said.splitlines()[-1]}"
    if len(case) > 1 and len(sentences) != 1:
        return f"code {code}, {len(sentences)} sentences: {said[-300:]}"
    return ""


@pytest.mark.slow
@pytest.mark.nightly
def test_each_is_refused_in_a_sentence(
    flags: list[str],
    places: dict[str, str],
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(places["folder"])
    wrong = []
    for case in ALL:
        with monkeypatch.context() as patch:
            patch.delenv("DIST_RUN_ID", raising=False)
            if "=" in case[0]:
                patch.setenv(*case[0].split("=", 1))
            if why := attacked(case, flags, places, capfd):
                wrong.append(f"{' '.join(case)}: {why}")
        if written := [*tmp_path.glob("runs/*/*"), *Path(places["folder"]).rglob("*")]:
            wrong.append(f"{' '.join(case)}: has written {written[0]}")
            for path in written:  # not said of the next case too
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
    assert len(ALL) > 300
    assert not wrong, f"{len(wrong)} of {len(ALL)}:\n" + "\n".join(wrong)
