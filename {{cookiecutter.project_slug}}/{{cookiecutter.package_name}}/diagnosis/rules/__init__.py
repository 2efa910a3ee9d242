"""The rules, by what they look at. Importing this registers all of them with diagnosis/engine.py."""

from . import checkpoints, data, evaluation, experts, gradients, loss, memory, speed  # noqa: F401
