"""`make lock`: writes the files of this folder from constraints.txt, with the hash of every file of every version."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path("requirements")
PIN = re.compile(r"^([\w.-]+)==([^\s,;]+)", re.MULTILINE)
BLOCK = re.compile(r"^[\w.-]+==.*\n(?: .*\n)*", re.MULTILINE)
# blocked.txt: versions that are never installed.
COMPILE = "pip compile -q --no-config --universal --python-version 3.11 --generate-hashes --no-annotate --no-header"
TOOLS = "cyclonedx-bom\ndetect-secrets\npip-audit\nuv\n"

parser = argparse.ArgumentParser(prog="lock", description=__doc__)
parser.add_argument("uv", help="the uv to call")
parser.add_argument("--cool-down", default="7 days", help="a version that was uploaded later does not enter a lock")
parser.add_argument("--torch-index", default="", help="address of the index with torch's CPU builds")
parser.add_argument("--header", default="", help="first line of locked.txt")
given = parser.parse_args()
YOUNG = ("--exclude-newer", given.cool_down)


def compiled(requirements: str, *options: str) -> dict[str, str]:
    """Returns package -> its pin, marker and hashes; ends the process if uv finds no such versions."""
    command = [given.uv, *COMPILE.split(), "-c", str(FOLDER / "blocked.txt"), *options, "-"]
    done = subprocess.run(command, input=requirements, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"lock: nothing was written: no such versions.\n{done.stderr}")
    return {block.split("==")[0]: block for block in BLOCK.findall(done.stdout)}


pins = {name: version for name, version in PIN.findall(Path("constraints.txt").read_text()) if name != "dist-template"}
every = compiled("".join(f"{name}=={version}\n" for name, version in pins.items()), *YOUNG)
cuda = compiled("torch\nsetuptools\n", *YOUNG, "-c", "constraints.txt")
gpu = {"torch", *(name for name, block in cuda.items() if "sys_platform == 'linux'" in block)}
tools = compiled(TOOLS, *YOUNG)

# The CPU builds for Linux are in an index of their own, under another version (2.13.0+cpu); macOS has PyPI's builds.
version = pins["torch"]
if given.torch_index:
    cpu = compiled(f"torch=={version}+cpu", "--no-deps", "--default-index", given.torch_index)["torch"]
    cpu = cpu.replace("+cpu", "+cpu ; sys_platform != 'darwin'", 1)
elif old := re.search(rf"^torch=={version}\+cpu.*\n(?: .*\n)*", (FOLDER / "torch-cpu.txt").read_text(), re.MULTILINE):
    cpu = old.group()
else:
    why = f"torch {version} is new, and its CPU builds are in an index of their own"
    sys.exit(f"lock: nothing was written: {why}; give its address, make lock TORCH_INDEX=<address>.")
mac = cuda["torch"].replace(version, f"{version} ; sys_platform == 'darwin'", 1)

texts = {
    "locked": given.header + "\n" + "".join(block for name, block in every.items() if name not in gpu),
    "torch-cpu": "".join(block for name, block in cuda.items() if name not in gpu) + cpu + mac,
    "torch-cuda": "".join(cuda.values()),
    "tools": "".join(tools.values()),
}
for name, text in texts.items():
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"lock: {len(BLOCK.findall(text))} packages in requirements/{name}.txt")
