"""`make lock`: writes this folder, with hashes, from constraints.txt. Without --upgrade other pins stay."""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path("requirements")
PIN = re.compile(r"^([\w.-]+)==([^\s,;]+)", re.MULTILINE)
BLOCK = re.compile(r"^[\w.-]+==.*\n(?: .*\n)*", re.MULTILINE)
COMPILE = "pip compile -q --no-config --universal --python-version 3.11 --generate-hashes --no-annotate --no-header"
TOOLS = "cyclonedx-bom\ndetect-secrets\npip-audit\nuv\n"

parser = argparse.ArgumentParser(prog="lock", description=__doc__)
parser.add_argument("uv", help="the uv to call")
parser.add_argument("--cool-down", default="7 days", help="a version that was uploaded later does not enter a lock")
parser.add_argument("--torch-index", default="", help="address of the index with torch's CPU builds")
parser.add_argument("--header", default="", help="first line of locked.txt")
parser.add_argument("--upgrade", action="store_true", help="the newest allowed version of every other package")
given = parser.parse_args()
YOUNG = ("--exclude-newer", given.cool_down)


def compiled(requirements: str, *options: str, before: str = "") -> dict[str, str]:
    """Returns package -> its pin, marker and hashes, preferably of `before`; exits if uv finds no such versions."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as lock:  # uv keeps its output's versions
        kept = (FOLDER / f"{name}.txt" for name in before.split() if not given.upgrade)
        Path(lock.name).write_text("".join(path.read_text() for path in kept))
        command = [given.uv, *COMPILE.split(), "-c", str(FOLDER / "blocked.txt"), "-o", lock.name, *options, "-"]
        done = subprocess.run(command, input=requirements, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"lock: nothing was written: no such versions.\n{done.stderr}")
        return {block.split("==")[0]: block for block in BLOCK.findall(Path(lock.name).read_text())}


pins = {name: version for name, version in PIN.findall(Path("constraints.txt").read_text()) if name != "dist-template"}
every = compiled("".join(f"{name}=={version}\n" for name, version in pins.items()), *YOUNG, before="locked torch-cuda")
cuda = compiled("torch\nsetuptools\n", *YOUNG, "-c", "constraints.txt", before="torch-cuda")
gpu = {"torch", *(name for name, block in cuda.items() if "sys_platform == 'linux'" in block)}

# The CPU builds for Linux are in an index of their own, under another version (2.13.0+cpu); macOS has PyPI's builds.
version = pins["torch"]
if given.torch_index:
    only = compiled(f"torch=={version}+cpu", "--no-deps", "--default-index", given.torch_index)
    cpu = only["torch"].replace("+cpu", "+cpu ; sys_platform != 'darwin'", 1)
elif old := re.search(rf"^torch=={version}\+cpu.*\n(?: .*\n)*", (FOLDER / "torch-cpu.txt").read_text(), re.MULTILINE):
    cpu = old.group()
else:
    sys.exit(f"lock: nothing was written: torch {version} needs make lock TORCH_INDEX=<index of its CPU builds>.")
mac = cuda["torch"].replace(version, f"{version} ; sys_platform == 'darwin'", 1)
texts = {
    "locked": given.header + "\n" + "".join(block for name, block in every.items() if name not in gpu),
    "torch-cpu": "".join(block for name, block in cuda.items() if name not in gpu) + cpu + mac,
    "torch-cuda": "".join(cuda.values()),
    "tools": "".join(compiled(TOOLS, *YOUNG, before="tools").values()),
}
for name, text in texts.items():
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"lock: {len(BLOCK.findall(text))} packages in requirements/{name}.txt")
