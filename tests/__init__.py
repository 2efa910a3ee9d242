"""Tests of the library, of the template and of the un-rendered project, linked into build/dev.

Every process that a test starts finds the library, these tests and the linked project."""

import contextlib
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "build" / "dev"
_SOURCE = ROOT / "{{cookiecutter.project_slug}}"
_PACKAGE = "{{cookiecutter.package_name}}"

PROJECT.mkdir(parents=True, exist_ok=True)
for _entry in _SOURCE.iterdir():
    _link = PROJECT / ("trainer_dev" if _entry.name == _PACKAGE else _entry.name)
    with contextlib.suppress(FileExistsError):  # by an earlier run, or another process of this one
        _link.symlink_to(os.path.relpath(_entry, PROJECT))

# in a fresh checkout build/dev was missing when pytest put it into sys.path
importlib.invalidate_caches()
_PATHS = [str(ROOT / "src"), str(ROOT), str(PROJECT)]
sys.path[:0] = [path for path in _PATHS if path not in sys.path]
_INHERITED = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_PATHS, *_INHERITED]))  # each once
