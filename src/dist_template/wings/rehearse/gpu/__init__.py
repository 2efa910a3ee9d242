"""A CUDA device that computes on the host, for `rehearse --gpu`. It cannot show kernels, speed, compilation, memory and
NCCL's scheduling.

devices.py     compiles the device once, and runs ranks on it, as workers.py does on CPUs
hooks.cpp      preloaded into a process: torch takes the device for its accelerator
device.cpp     operations, copies that arrive late, refusals; memory.hpp: memory, streams, generators
nccl.cpp       a process group that refuses what NCCL refuses
cuda.py        torch.cuda and the backend "nccl" over these, imported before Lightning
observer.py    callback, records what the device reports (events.py), which checks.py checks"""
