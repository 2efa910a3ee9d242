"""`docs` finds the installed pages; `completion` prints a script that completes without starting Python."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from dist_template.cli.verbs import verbs
from dist_template.wings.setup import docs
from tests.support.line import OURS, PACKAGE, main

DOCS = Path(__file__).parents[2] / "docs"
LINES = {  # what is typed, and what it is completed to
    "fi": {"fit"},
    "''": set(verbs()),
    "plan --trainer.max_": {"--trainer.max_epochs", "--trainer.max_steps", "--trainer.max_time"},
    "plan --mem": {"--memory"},
    "fit --trainer.strategy.tp_s": {"--trainer.strategy.tp_size"},
    "validate --run.plotly ''": {"shared", "inline", "cdn"},
    "sweep --run.plotly = i": {"inline"},
    "docs zer": {"zero"},
    "fit --config conf": set(),  # left to the shell, which completes names of files
}
BEFORE = """earlier() { COMPREPLY=(of an earlier completion); }; complete -F earlier python
python() { echo Python was started; }
try() { COMP_WORDS=(python -m "$@"); COMP_CWORD=$(($#+1)); COMPREPLY=(); _NAME; echo "${COMPREPLY[*]}"; }
. SCRIPT
"""


@pytest.mark.slow
def test_the_script_completes_verbs_keys_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    tried = "".join(f"try {PACKAGE} {line}\n" for line in LINES) + "try other fi\n"
    command = BEFORE.replace("NAME", PACKAGE).replace("SCRIPT", str(script)) + tried
    done = subprocess.run(["bash", "--norc", "-c", command], capture_output=True, text=True, check=True)
    *completed, other = done.stdout.splitlines()
    assert dict(zip(LINES, (set(line.split()) for line in completed), strict=True)) == LINES
    assert other == "of an earlier completion" and not done.stderr


def test_pages_are_listed_found_by_the_end_of_their_name_and_read_from_a_wheels_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs"]) == 0
    listed = "\n" + capsys.readouterr().out
    assert all(f"\n{page.relative_to(DOCS).with_suffix('')} " in listed for page in DOCS.rglob("*.md"))
    for name in ("strategies/zero", "zero", "docs/strategies/zero.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out.startswith((DOCS / "strategies" / "zero.md").read_text())
    assert main(["docs", "zer"]) == 2 and "did you mean zero?" in capsys.readouterr().err
    monkeypatch.setattr(docs, "__file__", str(tmp_path / "lib" / "dist_template" / "wings" / "setup" / "docs.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(docs.InputError, match="no page is installed here; .* README.md has"):
        docs.main(["docs"], OURS)
    place = tmp_path / "share" / "doc" / "dist-template"
    place.mkdir(parents=True)
    (place / "index.md").write_text("# What it is\n")
    docs.main(["docs"], OURS)
    assert capsys.readouterr().out.startswith(f"{'index':<26} What it is\n\n")
