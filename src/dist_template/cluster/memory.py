"""How much memory the processes of this job may use."""

import re
from pathlib import Path

from ..records import text_of

CGROUPS = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Returns the bytes that this control group's (version 2), or the machine's, processes may
    use."""
    import psutil

    limits = [psutil.virtual_memory().total]
    found = re.search(r"^0::/?(.*)$", text_of(Path("/proc/self/cgroup")), re.MULTILINE)
    group = CGROUPS / found.group(1) if found else CGROUPS
    for folder in (group, *group.parents):  # a parent's limit applies to its children
        if not folder.is_relative_to(CGROUPS):
            break
        text = text_of(folder / "memory.max").strip()
        if text.isdigit():  # not "max", which is no limit
            limits.append(int(text))
    return min(limits)
