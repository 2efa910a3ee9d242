"""A CUDA device that computes on the host, for `rehearse --gpu`. It cannot show kernels, speed,
compilation, memory and NCCL's scheduling.

devices.py     compiles the device once, and runs ranks on it, as workers.py does on CPUs hooks.cpp
preloaded into a process: torch takes the device for its accelerator device.cpp     operations,
copies that arrive late, refusals; memory.hpp: memory, streams, generators nccl.cpp       a process
group that refuses what NCCL refuses; fake_cuda/runtime.py is torch.cuda over these observer.py
callback, records what the device reports (events.py), which checks.py checks"""
