"""A CUDA device that computes on the host, for torch's CPU build: tests of a GPU's rules on a
laptop.

    import fake_cuda
    fake_cuda.install(gpus=2)      # torch.cuda now has two devices
    step(batch.to("cuda"))
    fake_cuda.events()             # what the host waited for, copies, kernels, collectives

The device refuses what CUDA and NCCL refuse, lets copies arrive late, and reports what happened. It
cannot show a GPU's own kernels, speed, compilation, limits of memory and NCCL's scheduling.
README.md has examples and limits.

    build.py       compiles the device, once for each torch, Python and text of the sources
    device.cpp     the device: operations, late copies, refusals; memory.hpp: memory, streams
    nccl.cpp       a process group over gloo that refuses what NCCL refuses
    runtime.py     `install`: torch.cuda and torch.distributed over these
    event_log.py   what they report"""

from .build import VERIFIED, Unsupported, build, refusal
from .event_log import Event, Kind, clear_events, events
from .runtime import install, is_installed

__all__ = [
    "VERIFIED",
    "Event",
    "Kind",
    "Unsupported",
    "build",
    "clear_events",
    "events",
    "install",
    "is_installed",
    "refusal",
]
