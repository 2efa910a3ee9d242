"""Training modules: architecture, kernels, chunked loss, balancing, optimizer, metrics, FLOPs."""
