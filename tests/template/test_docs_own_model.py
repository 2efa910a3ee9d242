"""The model of docs/models.md, pasted into module.py, trains alike under DDP, FSDP2 and ZeRO."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.support.runs import logged

from .conftest import ROOT, copied_project, fit

PAGE = ROOT / "docs" / "models.md"


def pasted(module: str, page: str) -> str:
    """`module` with the page's classes, and its methods in a subclass of the same name."""
    classes, methods = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    changed = f"class LanguageModule(LanguageModule):\n{textwrap.indent(methods, '    ')}"
    return f"{module}\n{classes}\n{changed}"


def losses(project: Path, strategy: str) -> list[float]:
    sizes = r"{width:\ 32,num_layers:\ 2,num_heads:\ 2}"
    flags = f"--model.architecture {sizes} --trainer.max_steps 4 --run.name {strategy}"
    fit(project, f"--config strategy/{strategy} {flags}")
    (folder,) = (project / "runs" / strategy).iterdir()
    return [*logged(folder, "train/loss").values()]


# a minute; test_any_module.py trains models that are not of transformers in `make test`
@pytest.mark.nightly
def test_the_model_of_the_docs_trains_alike_under_ddp_fsdp2_and_zero(tmp_path: Path) -> None:
    project = copied_project(tmp_path)
    module = project / "trainer_dev" / "module.py"
    module.write_text(pasted(module.read_text("utf-8"), PAGE.read_text("utf-8")), "utf-8")
    expected = losses(project, "ddp")
    assert len(expected) == 4 and expected[-1] < expected[0]
    for strategy in ("fsdp2", "zero2", "zero3"):
        assert losses(project, strategy) == pytest.approx(expected, rel=1e-5), strategy
