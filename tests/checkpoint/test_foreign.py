"""Names of files and files that somebody else gives: where they lead, and what they are."""

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from dist_template.checkpoint import manifest
from dist_template.errors import InputError
from dist_template.foreign import (
    check_tree,
    end_of,
    inside,
    name_fault,
    refuse_links,
    size_of,
    text_of,
)
from dist_template.observe.history.run import read_lines
from dist_template.wings.store import hooks
from dist_template.wings.store.remote import Remote, is_below

WRONG = """/etc/passwd|//etc/passwd|a//b|a/|/|.|..|./a|a/.|a/./b|a/../b|../a|a/..|a\\b|..\\a|C:\\a
|a\0b|a\nb|a\x1bb|a\x7f""".split("|")
WRONG = [name.strip("\n") if name.startswith("\n") else name for name in WRONG]
WRONG += ["", "x" * 256, "a/" + "ä" * 128, "\ud800"]
RIGHT = ["a", "a/b/c.pt", "__0_0.distcp", ".metadata", "a..b", "...", "ä ö", "x" * 255, "C:a"]


@pytest.mark.parametrize("name", WRONG, ids=ascii)
def test_a_wrong_name_is_refused_wherever_it_enters(name: str, tmp_path: Path) -> None:
    assert name_fault(name)
    with pytest.raises(InputError, match="is not the name of a file in a run"):
        inside(tmp_path, name)
    with pytest.raises(InputError, match="is not the name of a file in a run"):
        Remote("memory://bucket").get(name, tmp_path)
    entries = {"format": manifest.FORMAT, "step": 1, "time": 1.0, "files": {name: [0, 0]}}
    (path := tmp_path / manifest.name(1)).mkdir()
    (path / "manifest.json").write_text(manifest.rendered(entries))
    assert "its manifest.json has a file" in str(manifest.torn(path))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_name_is_taken(name: str, tmp_path: Path) -> None:
    assert name_fault(name) is None and inside(tmp_path, name) == tmp_path / name


@given(st.text(max_size=40))
def test_no_name_that_passes_leaves_the_folder(name: str) -> None:
    if name_fault(name) is None:
        path = os.path.normpath(f"/a/b/{name}")
        assert path.startswith("/a/b/") and len(path) == len(f"/a/b/{name}")


def test_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    (folder / "below").symlink_to(outside)
    fsspec.filesystem("memory").pipe_file("/bucket/below/x", b"x")
    with pytest.raises(InputError, match="'below/x' leads out of .*run: remove the link"):
        Remote("memory://bucket").get("below/x", folder)
    assert not [*outside.iterdir()]
    (tmp_path / "link").symlink_to(folder)  # a user's own, to the whole run
    Remote("memory://bucket/below").get("x", tmp_path / "link")
    assert (folder / "x").read_bytes() == b"x"
    MemoryFileSystem.store.clear()


def test_a_file_that_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zero", "folder"):
        for read in (size_of, text_of):
            with pytest.raises(OSError, match=f"{name} is not a regular file"):
                read(tmp_path / name)
        path = tmp_path / name / manifest.name(1)
        assert manifest.torn(path) == "it has no manifest.json"
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    with pytest.raises(OSError, match="at most 67108864 are read"):
        text_of(tmp_path / "large")


def test_a_file_of_a_checkpoint_that_never_ends_is_damage(tmp_path: Path) -> None:
    (path := tmp_path / manifest.name(1)).mkdir()
    entries = {"format": manifest.FORMAT, "step": 1, "time": 1.0, "files": {"x": [0, 0]}}
    (path / "manifest.json").write_text(manifest.rendered(entries))
    (path / "x").symlink_to("/dev/zero")
    assert manifest.damage(path) == "its x cannot be read: x is not a regular file"
    (path / "x").unlink()
    os.mkfifo(path / "x")
    assert manifest.damage(path) == "its x cannot be read: x is not a regular file"


TREES: dict[str, str | None] = {
    "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n": None,
    "\n".join(["a0: &a0 [1, 1]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]): (
        "it has more than 1000000 values"
    ),
    "a: &a {x: [*a]}": "it has more than 100 levels|it contains itself",
    "[" * 150 + "]" * 150: "it has more than 100 levels|it contains itself",
}


@pytest.mark.parametrize("text", TREES, ids=range(len(TREES)))
def test_a_tree_that_explodes_is_refused(text: str) -> None:
    if why := TREES[text]:
        with pytest.raises(ValueError, match=why):
            check_tree(yaml.safe_load(text))
    else:
        check_tree(yaml.safe_load(text))


def test_links_out_of_a_run_are_refused_and_a_users_own_are_not(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "wandb" / "run-1").mkdir(parents=True), elsewhere.mkdir()
    (run / "wandb" / "latest").symlink_to("run-1")
    (run / "debug.log").symlink_to("wandb/run-1/debug.log")  # as W&B makes them
    (run / "checkpoints").symlink_to(elsewhere)  # a larger disk
    (tmp_path / "newest").symlink_to("run")
    refuse_links(run)
    refuse_links(tmp_path / "newest")
    for name in ("metrics.jsonl", "evaluation", "crash/rank0.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(elsewhere / "x")
        with pytest.raises(InputError, match=f"{name} is a link to .*elsewhere/x, outside of the"):
            refuse_links(run)
        (run / name).unlink()


def test_only_a_store_that_the_user_gave_is_asked(tmp_path: Path, monkeypatch: Any) -> None:
    """A manifest names one, which may be a stranger's."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/one/checkpoints/step00000001.ckpt/x", b"x")
    address = "memory://bucket/one/checkpoints/step00000001.ckpt"
    monkeypatch.setattr(hooks, "OWN", {"memory://bucket/other", "memory://bucket/on"})
    why = str(hooks.fetch(address, ["x"], tmp_path))
    assert f"{address}, is not one that you gave" in why and not [*tmp_path.iterdir()]
    assert "as --run.store" in why
    hooks.OWN.add("memory://bucket/one")
    assert hooks.fetch(address, ["x"], tmp_path) is None
    assert (tmp_path / "x").read_bytes() == b"x"
    assert not is_below("memory://bucket/ones", {"memory://bucket/one"})
    MemoryFileSystem.store.clear()


def test_keys_without_names_of_files_are_skipped(capsys: Any) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/run/config.yaml", json.dumps({}).encode())
    for name in ("//etc/x", "a//b", "../x", "a\\b"):
        MemoryFileSystem.store[f"/bucket/run/{name}"] = MemoryFileSystem.store[
            "/bucket/run/config.yaml"
        ]
    assert Remote("memory://bucket/run").sizes() == {"config.yaml": 2}
    assert "4 objects below memory://bucket/run have no names of files" in capsys.readouterr().err
    MemoryFileSystem.store.clear()


def test_a_file_of_a_tebibyte_of_zeros_is_read_in_part(tmp_path: Path) -> None:
    """A sparse file takes no space in an archive."""
    log, lines = tmp_path / "a.log", tmp_path / "metrics.jsonl"
    lines.write_text('{"step": 1}\n')
    for path in (log, lines):
        path.touch()
        os.truncate(path, 2**40)
    with log.open("r+b") as file:
        file.seek(2**40 - 4)
        file.write(b"end\n")
    text = end_of(log)
    assert text.endswith("\0end\n") and text.startswith("(the last 8388608 of 1099511627776 bytes)")
    assert read_lines(lines) == [{"step": 1}]
    log.write_text("short\n")
    assert end_of(log) == "short\n"


def test_an_object_of_a_tebibyte_is_refused_and_not_read(tmp_path: Path) -> None:
    """As the lock or a manifest in a store, which are read into memory."""
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 2**40)
    with pytest.raises(InputError, match="it has 1099511627776 bytes, and at most 67108864 are"):
        (Remote(f"file://{tmp_path}", waits_for_answers=True) / "a").read()
    assert (Remote(f"file://{tmp_path}") / "b").read() == b""


def test_a_store_on_a_disk_is_found_by_a_path(tmp_path: Path, monkeypatch: Any) -> None:
    """`diagnose` reads its argument as a Path, in which /// is one slash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "a" / "b"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: a}\n")
    for address in (Path(f"file://{run}"), f"file://{run}"):
        copy = Path(hooks.local_copy(address))
        assert (copy / "config.yaml").read_text() == "run: {name: a}\n" and copy != run


def test_a_run_that_has_no_room_here_fills_no_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "a" / "b"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: a}\n")
    (run / "metrics.jsonl").touch()
    os.truncate(run / "metrics.jsonl", 2**43)
    with pytest.raises(InputError, match="metrics.jsonl has 8796093022208 bytes, and the disk of"):
        hooks.local_copy(f"file://{run}")
    assert not list((tmp_path / "cache").rglob("metrics*"))


@pytest.mark.parametrize("address", ["file:///", "memory://", "file:////"])
def test_an_address_of_no_run_is_not_searched(address: str) -> None:
    """It would be the whole disk."""
    with pytest.raises(InputError, match="names no run in the store|no run with a config.yaml"):
        hooks.local_copy(address)
