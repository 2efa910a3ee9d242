"""What a run trained is found by its folder, a checkpoint or an exported folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_template import InputError, Project
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
    names = [tmp_path / "runs", folder, newest(folder), newest(folder) / "checkpoint.pt"]
    found = [load_trained(str(name), OURS) for name in names]
    assert {one.run for one in found} == {folder} and found[0].path == str(newest(folder))
    found.append(load_trained(str(output), Project("no_such_package")))
    assert found[-1].run is None
    for one in found[1:]:
        assert torch.equal(logits(one), logits(found[0])), one.path
    # its config.yaml has keys of `fit` that other verbs do not have
    given = f"--config={folder / 'config.yaml'}"
    assert run("doctor", given) in (0, 1) and run("prepare", given) == 0
    checkpoint = f"--ckpt_path={newest(folder)}"
    assert run("test", given, checkpoint, "--trainer.limit_test_batches=1") == 0


NONE = {
    "runs/nowhere": "MODEL '.*/nowhere' does not exist: give the folder of a run, a checkpoint",
    "empty": "is not a run folder and contains none",
    "alone.ckpt": r"'.*/alone.ckpt' is not in a run's folder, with its config.yaml",
    "broken": "'.*/broken' cannot be loaded: ",
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_model_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    for folder in ("runs", "empty", "broken"):
        (tmp_path / folder).mkdir()
    torch.save({"state_dict": {}}, tmp_path / "alone.ckpt")
    (tmp_path / "broken/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=NONE[name]) as error:
        load_trained(str(tmp_path / name), OURS)
    assert "\n" not in str(error.value)
