"""`completion` prints a script that completes without starting Python."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from dist_template.cli.config_file import names
from dist_template.cli.verbs import verbs
from tests.support.line import PACKAGE, main
from tests.support.runs import refused

LINES = {  # what is typed, and what it is completed to
    "fi": {"fit"},
    "''": set(verbs()),
    "plan --trainer.max_": {"--trainer.max_epochs", "--trainer.max_steps", "--trainer.max_time"},
    "plan --mem": {"--memory"},
    "fit --trainer.strategy.tp_s": {"--trainer.strategy.tp_size"},
    "validate --run.plotly ''": {"shared", "inline", "cdn"},
    "sweep --run.plotly = i": {"inline"},
    "fit --config strategy/zer": {name for name in names() if name.startswith("strategy/zer")},
    "launch --on dee": {"deepspeed"},
    "fit --config conf": set(),  # left to the shell, which completes names of files
}
BEFORE = """earlier() { COMPREPLY=(of an earlier completion); }; complete -F earlier python
python() { echo Python was started; }
try() { COMP_WORDS=(python -m "$@"); COMP_CWORD=$(($#+1)); COMPREPLY=(); _NAME
  echo "${COMPREPLY[*]}"; }
. SCRIPT
"""


@pytest.mark.slow
def test_the_script_completes_verbs_keys_and_values(tmp_path: Path, capsys: Any) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    tried = "".join(f"try {PACKAGE} {line}\n" for line in LINES) + "try other fi\n"
    command = BEFORE.replace("NAME", PACKAGE).replace("SCRIPT", str(script)) + tried
    shell = ["bash", "--norc", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    *completed, other = done.stdout.splitlines()
    assert dict(zip(LINES, (set(line.split()) for line in completed), strict=True)) == LINES
    assert other == "of an earlier completion" and not done.stderr


def test_an_unknown_shell_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'fish'" in refused("completion", ["fish"], capfd)
