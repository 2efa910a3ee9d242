"""What a run trained is found by its folder, a checkpoint or an exported folder, with its own config.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_template import InputError
from tests.support.runs import OURS, newest, only_run, run
from tests.support.wings import Trained, export, load_trained


def logits(found: Trained) -> torch.Tensor:
    assert not found.model.training and found.tokenizer.decode([72, 105]) == "Hi"
    with torch.no_grad():
        return found.model(torch.arange(60).view(2, 30)).logits


def test_a_run_a_checkpoint_and_a_folder_name_the_same_model(
    flags: list[str], tmp_path: Path
) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    folder, output = only_run(tmp_path), tmp_path / "out"
    ours = [flag for flag in flags if not flag.startswith("--trainer.")]
    export.main(["export", *ours, "--checkpoint=last", f"--output={output}"], OURS)
    names = [tmp_path / "runs", folder, newest(folder), newest(folder) / "checkpoint.pt", output]
    found = [load_trained(str(name), OURS) for name in names]
    assert [one.run for one in found] == [*[folder] * 4, None]
    assert found[0].path == str(newest(folder)) and found[0].data.seq_len == 32
    for one in found[1:]:
        assert torch.equal(logits(one), logits(found[0])), one.path


def test_a_runs_own_config_file_is_accepted_by_every_verb(flags: list[str], tmp_path: Path) -> None:
    """It has keys of `fit`, such as ckpt_path, that other verbs do not have."""
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    config, checkpoint = only_run(tmp_path) / "config.yaml", newest(only_run(tmp_path))
    given = f"--config={config}"
    assert run("export", given, f"--checkpoint={checkpoint}", f"--output={tmp_path / 'out'}") == 0
    assert run("doctor", given) in (0, 1) and run("prepare", given) == 0
    assert run("test", given, f"--ckpt_path={checkpoint}", "--trainer.limit_test_batches=1") == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "{tmp}/runs/nowhere",
            "MODEL '.*/runs/nowhere' does not exist: give the folder of a run, a checkpoint, or",
        ),
        ("{tmp}/empty", "is not a run folder and contains none"),
        ("{tmp}/alone.ckpt", r"'.*/alone.ckpt' is not in a run's folder, with its config.yaml"),
        ("{tmp}/broken", "'.*/broken' cannot be loaded: "),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(
    name: str, message: str, tmp_path: Path
) -> None:
    for folder in ("runs", "empty", "broken"):
        (tmp_path / folder).mkdir()
    torch.save({"state_dict": {}}, tmp_path / "alone.ckpt")
    (tmp_path / "broken/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=message) as error:
        load_trained(name.format(tmp=tmp_path), OURS)
    assert "\n" not in str(error.value)
