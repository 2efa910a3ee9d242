"""What `self.log` has summed in an epoch, as plain types, and back. Lightning (2.6.6) keeps it in
private classes, and saves none of it."""

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric

from .. import weights

Entry = dict[str, Any]
META = """fx name prog_bar logger on_step on_epoch add_dataloader_idx dataloader_idx
    metric_attribute""".split()


def summed(trainer: Any) -> dict[str, Entry]:
    """Returns what this rank has logged for the end of the present epoch: by Lightning's key its
    arguments and its sums so far."""
    found = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        meta = metric.meta
        if metric.has_reset or not meta.on_epoch or meta.sync.group is not None:
            continue
        entry = {name: getattr(meta, name) for name in META}
        entry["reduce_fx"] = meta.reduce_fx.__name__
        entry["sync_dist"] = meta.sync.should
        entry["rank_zero_only"] = meta.sync.rank_zero_only
        if metric.is_tensor:
            entry["value"] = metric.value.detach().cpu().clone()
            if meta.is_mean_reduction:
                entry["weight"] = torch.as_tensor(metric.cumulated_batch_size).cpu().clone()
        elif meta.metric_attribute is None:
            continue
        found[key] = entry
    return found


def merged(one: dict[str, Entry], other: dict[str, Entry]) -> dict[str, Entry]:
    """Returns the sums of both."""
    found = dict(one)
    for key, entry in other.items():
        found[key] = _added(found[key], entry) if key in found else entry
    return found


def _added(one: Entry, other: Entry) -> Entry:
    if "value" not in other:  # a metric of torchmetrics has its sums itself
        return one
    reduce = {"max": torch.maximum, "min": torch.minimum}.get(one["reduce_fx"], torch.add)
    sums = {"value": reduce(one["value"], other["value"])}
    if "weight" in one:
        sums["weight"] = one["weight"] + other["weight"]
    return one | sums


def put(trainer: Any, module: nn.Module, entries: dict[str, Entry]) -> None:
    """Adds saved sums to those of the present epoch."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    present = summed(trainer)
    for key, entry in entries.items():
        total = _added(present[key], entry) if key in present else entry
        if key not in results:
            results[key] = _registered(trainer, module, entry)
        metric = results[key]
        metric.has_reset, metric._computed = False, None
        metric._update_count = max(1, metric._update_count)
        if metric.is_tensor:
            metric.value = total["value"].to(device)
            if "weight" in total:
                metric.cumulated_batch_size = total["weight"].to(device)


def _registered(trainer: Any, module: nn.Module, entry: Entry) -> _ResultMetric:
    """Returns an entry as `self.log` registers it."""
    meta = _Metadata(
        **{name: entry[name] for name in META}, reduce_fx=getattr(torch, entry["reduce_fx"])
    )
    meta.sync = _Sync(
        fn=trainer.strategy.reduce,
        _should=entry["sync_dist"],
        rank_zero_only=entry["rank_zero_only"],
    )
    metric = _ResultMetric(meta, is_tensor="value" in entry)
    if not metric.is_tensor:
        metric.value = module.get_submodule(entry["metric_attribute"])
    return metric.to(trainer.strategy.root_device)


def reduce_over_ranks(results: Any) -> None:
    """Gives each rank the sums of all, of metrics that Lightning does not reduce. Collective; a
    rank may lack some of them."""
    own: dict[str, Entry] = {}
    for key, metric in results.items():
        is_reduced = metric.meta.sync.should or metric.meta.sync.rank_zero_only
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset and not is_reduced:
            own[key] = {"reduce_fx": metric.meta.reduce_fx.__name__, "value": metric.value.cpu()}
            if metric.meta.is_mean_reduction:
                own[key]["weight"] = torch.as_tensor(metric.cumulated_batch_size).cpu()
    ranks = weights.broadcast(weights.to_rank_zero(own))
    total: dict[str, Entry] = {}
    for rank in ranks:
        total = merged(total, rank)
    for key in own:
        metric = results[key]
        metric.value, metric._computed = total[key]["value"].to(metric.value.device), None
        if "weight" in total[key]:
            metric.cumulated_batch_size = total[key]["weight"]


def metric_states(module: nn.Module) -> dict[str, Entry]:
    """Returns the states of the module's torchmetrics, which are in no `state_dict`, by name."""
    found = {}
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric._update_count:
            states = {key: _on_host(value) for key, value in metric.metric_state.items()}
            found[name] = {"count": metric._update_count, "states": states}
    return found


def put_metric_states(module: nn.Module, saved: dict[str, Entry]) -> None:
    for name, metric in module.named_modules():
        if name in saved and isinstance(metric, Metric):
            for key, value in saved[name]["states"].items():
                setattr(metric, key, _on(metric.device, value))
            metric._update_count, metric._computed = saved[name]["count"], None


def newest_metrics(trainer: Any) -> dict[str, float]:
    """Returns what callbacks and plateaus see, such as the newest validation's results."""
    logged = trainer._logger_connector._callback_metrics.items()
    return {name: float(value) for name, value in logged}


def put_newest_metrics(trainer: Any, saved: dict[str, float]) -> None:
    known = trainer._logger_connector._callback_metrics
    for name, value in saved.items():
        known.setdefault(name, torch.tensor(value))


def _on_host(value: Any) -> Any:
    return [_on_host(one) for one in value] if isinstance(value, list) else value.detach().cpu()


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, one) for one in value]
