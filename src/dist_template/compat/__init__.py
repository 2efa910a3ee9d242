"""Everything that depends on private names of other libraries, or replaces a part of them; nothing
else may.

    lightning.py             state of the Trainer and its strategies, `self.log`, launcher, loggers
    lightning_cli.py         LightningCLI and its parser
    loop.py, epochs.py       Lightning's training loop with less overhead, and exact epochs
    torch.py, torchrun.py    tensors, process groups, checkpoints; the elastic agent
    fake_tensors.py          tensors without memory, for `plan`
    stacks.py                names of functions in stacks, by which a hang's phase is known
    deepspeed.py             ZeRO's optimizers and checkpoint files
    transformers.py          attention masks, grouped products, sharding by a model's plans
    published.py             the conversion of published weights
    recording.py             what a constructor does on the meta device
    transformers_serving.py  the handlers of OpenAI's API behind `transformers serve`
    uvicorn.py               deadlines of the service's connections
    parallel_styles.py       transformers' tensor and expert parallelism: two fixes
    randomness.py            dropout that is off

tests/compat/test_names.py fails when a new version has another name or signature."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Generator[None]:
    """Inside, `owner` has these attributes; afterwards the ones that it had before. Raises
    AttributeError if it has no such attribute, so that another version of its library would not
    read it."""
    before = [(name, name in vars(owner), getattr(owner, name)) for name in values]
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, is_own, value in before:
            if is_own:
                setattr(owner, name, value)
            else:  # of its class
                delattr(owner, name)


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method of this instance by `wrapper`, which gets the method before its arguments.

    The class, its names and an instance's hooks stay: nn.Module calls `self.forward`, an instance's
    first (torch 2.13).
    """
    method = getattr(owner, name)
    setattr(owner, name, wraps(method)(partial(wrapper, method)))
