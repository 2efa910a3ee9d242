"""pytest plug-in: every Trainer of Lightning's own tests has this library's training loop."""

from functools import wraps
from typing import Any

import lightning.pytorch as pl

from dist_template.compat.loop import lighten


def pytest_configure() -> None:
    trainer_class: Any = pl.Trainer
    plain = trainer_class.__init__

    @wraps(plain)
    def with_our_loop(trainer: Any, *args: Any, **options: Any) -> None:
        plain(trainer, *args, **options)
        lighten(trainer)

    trainer_class.__init__ = with_our_loop
