"""A CUDA device that computes on the host, on which a rehearsal's ranks train: a GPU's rules without a GPU.

build.py       compiles the device once; where it cannot work, a sentence says why
hooks.cpp      preloaded into a process: torch takes the device for its accelerator
device.cpp     operations, copies that arrive late, refusals; memory.hpp: memory, streams, generators
nccl.cpp       a process group that refuses what NCCL refuses
cuda.py        torch.cuda and the backend "nccl" over these, imported before Lightning
events.py      what a rank's device has reported, by phase and line
devices.py     runs ranks on devices, as workers.py does on CPUs
checks.py      what `rehearse --gpu` checks

It cannot show kernels, speed, compilation, memory and NCCL's scheduling."""
