"""The registry: versions, `latest`, roll-back, and what a killed promotion leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from tests.support.wings import Registry


def exported(registry: Registry, text: str) -> Path:
    folder = registry.folder / f".{text}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(text)
    return folder


def promoted(registry: Registry, *texts: str) -> list[Path]:
    return [registry.add(exported(registry, text), {"run": text}) for text in texts]


def test_versions_are_counted_and_the_newest_is_the_latest(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    assert registry.latest is None
    assert [path.name for path in promoted(registry, "a", "b")] == ["v1", "v2"]
    assert registry.latest == registry.folder / "v2"
    found = [
        json.loads((registry.folder / name / "version.json").read_text()) for name in ("v1", "v2")
    ]
    assert [each["run"] for each in found] == ["a", "b"]
    assert found[0]["sha256"]["model.safetensors"].startswith(
        "ca978112ca1bbdca"
    )  # of "a", FIPS 180-2


def test_a_roll_back_withdraws_the_latest_version_and_its_number_is_not_used_again(
    tmp_path: Path,
) -> None:
    registry = Registry(tmp_path)
    promoted(registry, "a", "b", "c")
    assert registry.roll_back() == (tmp_path / "v3", tmp_path / "v2")
    assert promoted(registry, "d") == [tmp_path / "v4"]
    assert registry.roll_back() == (tmp_path / "v4", tmp_path / "v2"), "v3 stays withdrawn"
    registry.roll_back()
    with pytest.raises(InputError, match="v1 is the first version that is not withdrawn"):
        registry.roll_back()
    assert registry.latest == tmp_path / "v1" and (tmp_path / "v4" / "model.safetensors").exists()


def test_a_roll_back_of_an_empty_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no version: promote a run first"):
        Registry(tmp_path / "nothing").roll_back()


def test_a_killed_promotion_leaves_the_latest_version_as_it_was(
    tmp_path: Path, monkeypatch: Any
) -> None:
    registry = Registry(tmp_path)
    promoted(registry, "a")

    def killed(*args: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_point_to", killed)
        with pytest.raises(KeyboardInterrupt):
            promoted(registry, "b")
    assert registry.latest == tmp_path / "v1"
    promoted(registry, "c")
    assert registry.latest is not None and registry.latest == tmp_path / "v3"
    assert (registry.latest / "model.safetensors").read_text() == "c"
