"""The rules, by what they look at."""

# diagnosis/engine.py asks them in this order; of equally bad and sure findings the earlier one is told first.
ORDER = (
    "crashes", "numbers", "loss", "level", "gradients", "data", "evaluation", "experts", "memory", "speed",
    "communication", "checkpoints",
)  # fmt: skip
