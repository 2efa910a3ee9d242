"""W&B and TensorBoard have one run over restarts; a service that is away delays no training."""

import contextlib
import gzip
import json
import os
import re
import shlex
import signal
import struct
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.cluster.environment import git
from dist_template.observe.loggers.wandb import WandB
from tests.support.runs import CONFIGS, SHIPPED, run_in_subprocess, small
from tests.support.waiting import returns


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        if self.server.is_away:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # a file, or telemetry
            answer = self.server.answer(self.path, json.loads(body))
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class Service(ThreadingHTTPServer):
    """A W&B server for metrics: keeps each run's lines, which are written from an offset on."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.config: dict[str, Any] = {}
        self.is_away = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def answer(self, path: str, sent: dict[str, Any]) -> dict[str, Any]:
        if history := sent.get("files", {}).get("wandb-history.jsonl"):
            lines = self.lines.setdefault(path.split("/")[-2], [])
            lines[history["offset"] :] = [json.loads(line) for line in history["content"]]
        operation, given = sent.get("operationName"), sent.get("variables") or {}
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}
        bucket = {"id": "1", "name": given.get("name"), "config": json.dumps(self.config)}
        if operation == "RunResumeStatus":
            lines = self.lines.get(given["name"], [])
            bucket |= {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
            bucket |= {"historyTail": json.dumps([json.dumps(line) for line in lines[-1:]])}
            bucket |= {"eventsTail": "[]", "summaryMetrics": "{}", "wandbConfig": '{"t": 1}'}
            return {"data": {"model": project | {"bucket": bucket if lines else None}}}
        if operation == "UpsertBucket":
            self.config.update(json.loads(given.get("config") or "{}"))
            upserted = {"bucket": bucket | {"project": project}, "inserted": True}
            return {"data": {"upsertBucket": upserted}}
        if operation == "CreateRunFiles":
            url = f"http://127.0.0.1:{self.server_port}/upload"
            files = [{"name": name, "uploadUrl": url} for name in given["files"]]
            return {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


@pytest.fixture
def service(monkeypatch: Any, tmp_path: Path) -> Generator[Service]:
    import wandb

    wandb.teardown()  # what an earlier test set up in this process
    service = Service()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.server_port}")
    yield service
    wandb.teardown()
    service.shutdown()
    service.server_close()


def started(run: Path, init_timeout_s: float = 20, finish_timeout_s: float = 20) -> WandB:
    logger = WandB("p", str(run), init_timeout_s=init_timeout_s, finish_timeout_s=finish_timeout_s)
    logger.log_hyperparams({"data": {"seq_len": 32}})
    return logger


def log(logger: WandB, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step}, step)


def end(logger: WandB) -> None:
    """Ends the training and the process, as far as wandb knows."""
    import wandb

    logger.finalize("success")
    wandb.finish()
    wandb.teardown()


@pytest.mark.slow
def test_a_resumed_run_continues_as_the_same_run_online(tmp_path: Path, service: Service) -> None:
    for steps in range(1, 8), range(6, 11):  # resumed from step 5
        log(logger := started(tmp_path / "one"), steps)
        end(logger)
    ((name, lines),) = service.lines.items()
    assert name == "one" and service.config["data"]["value"] == {"seq_len": 32}
    steps = [line["trainer/global_step"] for line in lines if "train/loss" in line]
    assert steps == [*range(1, 8), *range(6, 11)]
    assert [line["_step"] for line in lines] == sorted({line["_step"] for line in lines})


@pytest.mark.slow
def test_a_service_that_goes_away_does_not_delay(tmp_path: Path, service: Service) -> None:
    log(logger := started(tmp_path / "one", finish_timeout_s=3), range(1, 4))
    service.is_away = True
    returns(log, logger, range(4, 7), why="training waited: wandb tries again for a week")
    logger.log_sample("text", 6)
    returns(end, logger, why="finish_timeout_s is 3")
    assert set(wandb_points(tmp_path / "one")["train/loss"]) == set(range(1, 7))


@pytest.mark.slow
def test_without_service_it_is_offline(tmp_path: Path, service: Service, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no service listens there
    with pytest.warns(UserWarning, match="logging offline"):
        log(logger := started(tmp_path / "one", init_timeout_s=3), range(1, 7))
    end(logger)
    assert set(wandb_points(tmp_path / "one")["train/loss"]) == set(range(1, 7))


def test_an_offline_run_says_how_to_upload_it(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandB("p", str(tmp_path / "one"))
    log(logger, range(1, 3))
    end(logger)
    (line,) = [each for each in capfd.readouterr().out.splitlines() if "W&B is offline" in each]
    folder = Path(shlex.split(line.partition("wandb sync ")[2])[0])
    assert folder.is_dir() and [*folder.glob("run-*.wandb")], "what `wandb sync` takes"


def test_an_error_of_wandb_is_one_warning(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = WandB("p", str(tmp_path / "r"))
    logger._experiment = SimpleNamespace()  # ty: ignore[invalid-assignment]  # it has no `log`
    with pytest.warns(UserWarning, match="continues without it") as warned:
        logger.log_metrics({"train/loss": 1.0}, step=1)
        logger.log_metrics({"train/loss": 1.0}, step=2)
    assert len(warned) == 1


class KillAfter(Callback):
    def __init__(self, step: int, api_key: str) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def restarted(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all loggers, killed in step 7 and resumed from step 5; its flags have a secret."""
    folder = tmp_path_factory.mktemp("restarted")
    both = folder / "both.yaml"
    text = (SHIPPED / "logger" / "wandb.yaml").read_text("utf-8")
    two = text.replace("  logger:\n", "  logger:\n    - class_path: TensorBoard\n")
    both.write_text(two, "utf-8")
    flags = [
        f"--config={CONFIGS}/quickstart.yaml",
        f"--config={both}",
        *small(corpus, cache, folder),
        f"--run.root={folder}",
        "--run.name=r",
        "--data.global_batch_size=4",
        "--trainer.max_steps=10",
        "--trainer.val_check_interval=5",
        "--last_checkpoint.every_n_steps=5",
        f"--trainer.callbacks+={__name__}.KillAfter",
        "--trainer.callbacks.api_key=s3cr3t",
    ]
    for step, code in (7, -signal.SIGKILL), (99, 0):
        step_flag = f"--trainer.callbacks.step={step}"
        ended = run_in_subprocess("fit", *flags, step_flag, DIST_RUN_ID="one", WANDB_MODE="offline")
        assert ended.returncode == code, ended.stderr
    return folder / "r" / "one"


@pytest.mark.slow
def test_tensorboard_has_every_metric_once_per_step_after_a_resume(restarted: Path) -> None:
    points, expected = tensorboard_points(restarted), metrics_of(restarted)
    assert set(points["train/loss"]) == set(range(1, 11)) and set(points["eval/loss"]) == {0, 5, 10}
    for step, metrics in expected.items():
        shown = {name: points[name][step][-1] for name in metrics}
        assert shown == pytest.approx(metrics, rel=1e-6, nan_ok=True)  # TensorBoard has float32
    assert all(len(values) == 1 for values in points["train/loss"].values())


@pytest.mark.slow
def test_wandb_continues_the_run_with_every_metric_and_setting(restarted: Path) -> None:
    files = wandb_files(restarted)
    assert len(files) == 2 and all(file.name == "run-one.wandb" for file in files)
    points, expected = wandb_points(restarted), metrics_of(restarted)
    for step in range(6, 11):  # wandb writes in blocks; a killed process loses the last one
        shown = {name: points[name][step][-1] for name in expected[step]}
        assert shown == pytest.approx(expected[step], rel=1e-6, nan_ok=True), step
    updates = [each for one in wandb_records(files[1]) for each in one.config.update]
    config = {each.key: json.loads(each.value_json) for each in updates}
    assert config["data"]["seq_len"] == 32 and config["last_checkpoint"]["every_n_steps"] == 5
    assert config["environment"]["git_commit"] == git("rev-parse", "HEAD")
    written = [path for path in restarted.rglob("*") if path.is_file()]
    assert not [path for path in written if b"s3cr3t" in path.read_bytes()]


Points = dict[str, dict[int, list[float]]]  # name -> step -> what was logged there, oldest first


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics.jsonl; what was done again counts as the newer attempt did it."""
    steps: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines()):
        step, _ = line.pop("step"), line.pop("time")
        steps = {at: values for at, values in steps.items() if at <= step}  # it went on from here
        steps.setdefault(step, {}).update(line)
    return steps


def wandb_records(path: Path) -> list[Any]:
    """An offline run: LevelDB log framing around protocol buffers (wandb 0.31 has no reader)."""
    from wandb.proto import wandb_internal_pb2

    content, block, header = path.read_bytes(), 32 * 1024, 7
    position, parts, records = header, b"", []  # the file's own header comes first
    while position + header <= len(content):
        if block - position % block < header:  # a block's tail too short for a header is padding
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + header])
        parts += content[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # FULL, LAST; 2 and 3 are FIRST and MIDDLE
            record = wandb_internal_pb2.Record()  # ty: ignore[missing-attribute]
            record.ParseFromString(parts)
            parts = b""
            records.append(record)
    return records


def wandb_files(run: Path) -> list[Path]:
    """A run's attempts, oldest first."""
    return sorted(run.glob("wandb/*run-*/run-*.wandb"))


def wandb_points(run: Path) -> Points:
    """Of all attempts, by the x axis of the charts."""
    points: Points = {}
    for record in (each for path in wandb_files(run) for each in wandb_records(path)):
        values = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        step = int(values.get("trainer/global_step", -1))
        for name, text in values.items():
            is_metric = not name.startswith(("_", "trainer/", "eval/sample"))
            if is_metric and re.fullmatch(r'[-+.\de]+|"(NaN|-?Infinity)"', text):
                value = float(text.strip('"'))
                points.setdefault(name, {}).setdefault(step, []).append(value)
    return points


def tensorboard_points(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), {"scalars": 0, "tensors": 0}).Reload()  # 0: all of them
    points: Points = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            points.setdefault(name, {}).setdefault(event.step, []).append(event.value)
    return points
