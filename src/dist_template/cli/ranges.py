"""The range of each numeric key, and the characters of texts, checked before anything is built.

A type accepts -1, nan and 10**9 wherever it accepts a number, and training would run with them, or
fail in another library. What `class_path` names checks the rest of its arguments."""

import math
import re
import sys
from collections.abc import Iterator

from jsonargparse import Namespace

from ..errors import InputError

ABOVE_0, BELOW_1, FINITE = math.ulp(0.0), math.nextafter(1.0, 0.0), sys.float_info.max
RULES = (  # what is allowed, least, most, keys
    (
        "1 or more",
        1,
        FINITE,
        """trainer.log_every_n_steps model.loss_chunk
        model.blocks.checkpoint_every data.seq_len data.global_batch_size data.micro_batch_size
        data.tokenizer.train_mib trainer.strategy.sub_group_size
        trainer.check_val_every_n_epoch lr_scheduler.step_size lr_scheduler.T_max
        lr_scheduler.total_iters lr_scheduler.step_size_up lr_scheduler.step_size_down
        trainer.logger.flush_secs cluster.min_nodes cluster.save_s numerics.patience
        last_checkpoint.every_n_steps last_checkpoint.keep store.keep""",
    ),
    (
        "0 or more",
        0,
        FINITE,
        """trainer.gradient_clip_val trainer.reload_dataloaders_every_n_epochs
        model.optim.weight_decay model.optim.warmup
        model.balance.bias_update_speed model.balance.aux_loss_coef model.balance.sequence_loss_coef
        model.balance.z_loss_coef model.mtp.weight model.preference.margin
        model.preference.desirable_weight model.preference.undesirable_weight numerics.spike_sigmas
        console.line_every_s diagnosis.every_s store.every_s best_checkpoint.keep
        trainer.strategy.param_persistence_threshold lr_scheduler.eta_min lr_scheduler.min_lr
        lr_scheduler.base_lr lr_scheduler.factor lr_scheduler.end_factor lr_scheduler.patience
        lr_scheduler.cooldown lr_scheduler.milestones trainer.strategy.prefetch_bucket_size
        optimizer.lr""",
    ),
    (
        "more than 0",
        ABOVE_0,
        FINITE,
        """trainer.val_check_interval model.optim.learning_rate
        model.optim.eps model.adapter.alpha model.preference.beta model.distillation.temperature
        data.rank_speeds
        cluster.time_limit preflight.device_mtbf_h preflight.disk_gb_s trainer.limit_train_batches
        lr_scheduler.gamma lr_scheduler.max_lr lr_scheduler.power lr_scheduler.div_factor
        lr_scheduler.final_div_factor""",
    ),
    ("-1 or more", -1, FINITE, "trainer.num_sanity_val_steps"),
    (
        "0 or more, below 1",
        0,
        BELOW_1,
        """model.optim.betas model.adapter.dropout
        data.validation_share data.test_share""",
    ),
    (
        "a share from 0 to 1",
        0,
        1,
        """model.optim.min_learning_rate_share model.optim.decay_share
        model.distillation.weight preflight.least_share""",
    ),
    # More than these would exhaust memory, processes or a timer, or is not a port.
    ("0 to 100", 0, 100, "model.sample_temperature"),
    ("1 to 99", 1, 99, "optimizer.ns_steps"),  # Muon's, which torch checks in the first step
    ("1 to 65,536", 1, 65_536, "model.sample_tokens model.adapter.rank"),
    ("0 to 1,024", 0, 1024, "data.num_workers"),
    ("4 to 1,000,000", 4, 1_000_000, "numerics.spike_window"),
    (
        "0 to 100,000,000 seconds",
        0,
        1e8,
        """watchdog.timeout_s watchdog.start_timeout_s gpu.every_s
        trainer.logger.init_timeout_s trainer.logger.finish_timeout_s""",
    ),
    ("1 to 100,000", 1, 100_000, "trainer.num_nodes cluster.nodes cluster.devices_per_node"),
    ("-1 to 1,024", -1, 1024, "trainer.devices"),
    ("1 to 65,535", 1, 65_535, "cluster.port"),
    ("0 to 4,294,967,295", 0, 2**32 - 1, "seed_everything data.seed"),
)
RANGES: dict[str, tuple[str, float, float]] = {}  # key: what is allowed, least, most
for _allowed, _least, _most, _keys in RULES:
    RANGES |= dict.fromkeys(_keys.split(), (_allowed, _least, _most))
PHASED = (
    "model.optim.learning_rate",
    "model.balance.bias_update_speed",
    "model.mtp.weight",
    "data.global_batch_size",
)
for _key in PHASED:
    RANGES |= dict.fromkeys((f"{_key}.value", f"{_key}.until"), ("0 or more", 0, FINITE))
    RANGES[f"{_key}.multiple"] = RANGES["data.global_batch_size.value"] = ("1 or more", 1, FINITE)
# An empty text would be the folder in which the process was started.
FOLDERS = """run.root last_checkpoint.dirpath best_checkpoint.dirpath data.cache_dir samples.folder
numerics.folder goodput.folder diagnosis.folder preflight.folder trainer.default_root_dir
trainer.logger.save_dir""".split()
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, half of a pair: no file, path or log can have them
LIBRARY = __name__.partition(".")[0]
CHECKED = {LIBRARY, "torch", "lightning"}  # whose classes' arguments are checked
ANY = ("fewer digits", -(2**63), 2**63 - 1)  # integers of other keys: what C and torch hold


def check(settings: Namespace, **classes: object) -> None:
    """Checks the numbers and texts of a verb's configuration.

    Args:
        settings: The keys of the verb.
        classes: The classes of `model` and `data`. The keys of a class that is not derived from one
            of this library's have a meaning of their own.

    Raises InputError if a number is out of the range of its key, or nan, or a text is no text."""
    unchecked = set(classes)
    for section, kind in classes.items():
        if any(base.__module__.startswith(f"{LIBRARY}.") for base in getattr(kind, "__mro__", ())):
            unchecked.remove(section)
    if str(settings.trainer.get("devices")) == "0":  # in a list it is the first device
        raise InputError("trainer.devices is 0; give 1 or more, or auto")
    batches = settings.trainer.get("accumulate_grad_batches")  # null: data.global_batch_size
    if isinstance(batches, int) and batches < 1:
        raise InputError(f"trainer.accumulate_grad_batches is {batches}; give 1 or more")
    for key, value in _leaves(settings):
        if isinstance(value, str):
            if found := NO_TEXT.search(value):
                raise InputError(f"{key} has the character {found[0]!r}; give a text without it")
            if not value.strip() and key in FOLDERS:
                raise InputError(f"{key} is {value!r}; give a folder")
            if key not in RANGES or not value.isdecimal():
                continue
            value = int(value[:99])
        allowed, least, most = ANY if isinstance(value, int) else ("a number", -math.inf, math.inf)
        if key.partition(".")[0] not in unchecked:
            allowed, least, most = RANGES.get(key, (allowed, least, most))
        if key.startswith("model.architecture.num_"):  # transformers' configurations check few
            allowed, least, most = ("0 or more", 0, ANY[2])
        if not least <= value <= most:  # nan is not
            raise InputError(f"{key} is {value}; give {allowed}")


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, int | float | str]]:
    """Yields each number and text, and its key, without init_args and positions in lists. Of a
    user's class it yields only the arguments under `data` that have a range: the library's."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each, key)
    elif isinstance(value, Namespace | dict):
        items = vars(value) if isinstance(value, Namespace) else value
        if is_users := str(items.get("class_path", LIBRARY)).partition(".")[0] not in CHECKED:
            given, items = items.get("init_args"), {}
            if isinstance(given, Namespace | dict):  # else it is refused elsewhere
                items = dict(given)
        for name, each in items.items():
            inner = key if name == "init_args" else f"{key}.{name}".lstrip(".")
            if not is_users or (inner.startswith("data.") and inner in RANGES):
                yield from _leaves(each, inner)
