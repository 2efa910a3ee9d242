"""A CUDA device that computes on the host, for torch's CPU build."""
