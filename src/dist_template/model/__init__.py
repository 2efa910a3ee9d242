"""What a training module is built from: architecture, kernels, loss in chunks, balancing, optimizer, metrics, FLOPs."""
