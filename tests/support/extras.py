"""A Python with the core's dependencies alone: the extras' packages cannot be imported."""

from pathlib import Path

EXTRAS = """bitsandbytes datasets deepspeed fastapi openai peft plotly optuna s3fs tensorboard
uvicorn wandb""".split()


def without_extras(folder: Path) -> str:
    """Writes into `folder` what hides the packages, and returns it as an entry of PYTHONPATH."""
    hides = f"import sys\nsys.modules |= dict.fromkeys({EXTRAS})\n"
    (folder / "sitecustomize.py").write_text(hides)
    return str(folder)
