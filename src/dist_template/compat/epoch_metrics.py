"""What `self.log` has summed in an epoch, as plain types, and back. Lightning (2.6.6) keeps it in
private classes, and saves none of it."""

import operator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric

from .. import processes
from ..errors import InputError

Entry = dict[str, Any]
BUILTIN = {"max": max, "min": min, "sum": sum}  # `reduce_fx` may be one of them
META = """fx name prog_bar logger on_step on_epoch add_dataloader_idx dataloader_idx
    metric_attribute""".split()


def summed(trainer: Any) -> dict[str, Entry]:
    """Returns what this rank has logged for the end of the present epoch: by Lightning's key its
    arguments and its sums so far."""
    found = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        # A metric of torchmetrics can be put back only where it is the module's attribute.
        can_be_saved = metric.is_tensor or metric.meta.metric_attribute is not None
        if _is_of_epoch(metric) and can_be_saved:
            found[key] = metric
    return _entries(found)


def _is_of_epoch(metric: Any) -> bool:
    meta = metric.meta
    return not metric.has_reset and meta.on_epoch and meta.sync.group is None


def _entries(metrics: dict[str, Any]) -> dict[str, Entry]:
    """Returns the arguments and the sums so far of each metric. Waits for the device once."""
    found: dict[str, Entry] = {}
    sums: list[tuple[str, str, Any]] = []
    for key, metric in metrics.items():
        meta = metric.meta
        entry: Entry = {name: getattr(meta, name) for name in META}
        entry["reduce_fx"] = meta.reduce_fx.__name__
        entry["is_builtin"] = meta.reduce_fx in BUILTIN.values()
        entry["sync_dist"], entry["rank_zero_only"] = meta.sync.should, meta.sync.rank_zero_only
        found[key] = entry
        if metric.is_tensor:
            sums.append((key, "value", metric.value))
            if meta.is_mean_reduction:
                sums.append((key, "weight", metric.cumulated_batch_size))
    on_device = [value for _, _, value in sums]
    for (key, name, _), value in zip(sums, on_host(on_device), strict=True):
        found[key][name] = value
    return found


def on_host(values: list[Any]) -> list[Tensor]:
    """Returns copies of numbers, tensors of one element, on the host; one read from each device."""
    tensors = [torch.as_tensor(value).detach().reshape(()) for value in values]
    kinds: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in kinds.values():
        read = torch.stack([tensors[number] for number in numbers]).cpu()
        for number, one in zip(numbers, read, strict=True):
            tensors[number] = one.clone()
    return tensors


def merged(one: dict[str, Entry], other: dict[str, Entry]) -> dict[str, Entry]:
    """Returns the sums of both."""
    found = dict(one)
    for key, entry in other.items():
        if key in found:
            entry = _added(found[key], entry)
        found[key] = entry
    return found


def _added(one: Entry, other: Entry) -> Entry:
    if "value" not in other:  # a metric of torchmetrics has its sums itself
        return one
    add = {"max": torch.maximum, "min": torch.minimum}.get(one["reduce_fx"], torch.add)
    sums = {"value": add(one["value"], other["value"])}
    if "weight" in one:
        sums["weight"] = one["weight"] + other["weight"]
    return one | sums


def put(trainer: Any, module: nn.Module, entries: dict[str, Entry]) -> None:
    """Adds saved sums to those of the present epoch."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    present = summed(trainer)
    for key, entry in entries.items():
        total = entry
        if key in present:
            total = _added(present[key], entry)
        if key not in results:
            results[key] = _registered(trainer, entry)
            if not results[key].is_tensor:
                results[key].value = module.get_submodule(entry["metric_attribute"])
        metric = results[key]
        metric.has_reset, metric._computed = False, None
        metric._update_count = max(1, metric._update_count)
        if metric.is_tensor:
            metric.value = total["value"].to(device)
            if "weight" in total:
                metric.cumulated_batch_size = total["weight"].to(device)


def _registered(trainer: Any, entry: Entry) -> _ResultMetric:
    """Returns an entry as `self.log` registers it."""
    name = entry["reduce_fx"]
    reduce_fx = BUILTIN[name] if entry.get("is_builtin") else getattr(torch, name)
    meta = _Metadata(**{name: entry[name] for name in META}, reduce_fx=reduce_fx)
    meta.sync = _Sync(
        fn=trainer.strategy.reduce,
        _should=entry["sync_dist"],
        rank_zero_only=entry["rank_zero_only"],
    )
    metric = _ResultMetric(meta, is_tensor="value" in entry)
    return metric.to(trainer.strategy.root_device)


def reduce_over_ranks(trainer: Any, group: dist.ProcessGroup | None = None) -> None:
    """Computes the metrics of the present epoch of all ranks, on each of them, whether they were
    logged with `sync_dist` or not, in any order and by some ranks alone. What each rank has summed
    stays its own. Collective over `group`, all ranks.

    Not of `rank_zero_only` and of a `sync_dist_group`. Raises InputError if a metric of
    torchmetrics was logged on some ranks alone: it would wait for the others."""
    results = trainer._results
    reduced = {}
    for key, metric in results.items():
        if _is_of_epoch(metric) and not metric.meta.sync.rank_zero_only:
            reduced[key] = metric
    own = _entries(reduced)
    ranks = processes.broadcast(processes.to_rank_zero(own, group), group)
    for key, entry in reduce(operator.or_, ranks, {}).items():
        having = [number for number, rank in enumerate(ranks) if key in rank]
        if "value" in entry:
            if key not in results:
                results[key] = _registered(trainer, entry)
            metric = results[key]
            metric.has_reset, metric._update_count = False, max(1, metric._update_count)
            metric._computed = _total([ranks[number][key] for number in having]).to(metric.device)
        elif len(having) < len(ranks):
            raise InputError(
                f"self.log({entry['name']!r}, …) of a metric of torchmetrics was called on"
                f" {len(having)} of {len(ranks)} ranks in this epoch, and it gathers over all of"
                " them: log it on each rank"
            )
        elif results[key]._computed is None:
            results[key].compute()


def _total(entries: list[Entry]) -> Tensor:
    """Returns the metric of all ranks. Equal means stay as they are, to the last bit."""
    first, total = entries[0], reduce(_added, entries)
    if "weight" not in first:
        return total["value"]
    means = {float(entry["value"] / entry["weight"]) for entry in entries}
    one = first if len(means) == 1 else total
    return one["value"] / one["weight"]


def metric_states(module: nn.Module) -> dict[str, Entry]:
    """Returns the states of the module's torchmetrics, which are in no `state_dict`, by name."""
    found = {}
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric._update_count:
            states = {key: _on_host(value) for key, value in metric.metric_state.items()}
            found[name] = {"count": metric._update_count, "states": states}
    return found


def put_metric_states(module: nn.Module, saved: dict[str, Entry]) -> None:
    """Puts back what `metric_states` has returned."""
    if not saved:
        return
    for name, metric in module.named_modules():
        if name in saved and isinstance(metric, Metric):
            for key, value in saved[name]["states"].items():
                setattr(metric, key, _on(metric.device, value))
            metric._update_count, metric._computed = saved[name]["count"], None


def newest_metrics(trainer: Any) -> dict[str, float]:
    """Returns what callbacks and plateaus see, such as the newest validation's results."""
    logged = trainer._logger_connector._callback_metrics
    values = on_host(list(logged.values()))
    return {name: float(value) for name, value in zip(logged, values, strict=True)}


def put_newest_metrics(trainer: Any, saved: dict[str, float]) -> None:
    known = trainer._logger_connector._callback_metrics
    for name, value in saved.items():
        known.setdefault(name, torch.tensor(value))


def _on_host(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    return value.detach().cpu()


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, one) for one in value]
