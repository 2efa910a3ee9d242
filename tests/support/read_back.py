"""What TensorBoard and WandB would show, read from their own files."""

import json
import re
import struct
from pathlib import Path
from typing import Any

Points = dict[str, dict[int, list[float]]]  # name -> step -> what was logged there, oldest first


def metrics(run: Path) -> dict[int, dict[str, float]]:
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
