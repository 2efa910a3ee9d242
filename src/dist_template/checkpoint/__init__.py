"""Checkpoints of every strategy, read by every other.

    what a path holds           format_of      written by
    a file, or folder with one  "file"         a single process, DDP: torch.save of Lightning's dict
    folder with .metadata       "distributed"  MeshStrategy: torch's format, the rest in meta.pt
    folder with latest          "zero"         ZeroStrategy: DeepSpeed's partitions with the rest

This package writes folders with a manifest: commit.py writes and verifies them, manifest.py
describes their files, and asynchronous.py writes them in the background. formats.py reads any
format as full tensors in one process; sharded.py and zero.py know the sharded formats; optimizer.py
names optimizer state by parameter; resume.py loads a checkpoint into a strategy that did not write
it; untrusted.py keeps code in a file from running."""
