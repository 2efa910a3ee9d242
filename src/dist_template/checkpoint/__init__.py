"""Checkpoints of every strategy, read by every other.

    what a path holds           format_of      written by
    a file, or folder with one  "file"         a single process, DDP: torch.save of Lightning's dict
    folder with .metadata       "distributed"  MeshStrategy: torch's distributed format, Lightning's rest in meta.pt
    folder with latest          "zero"         ZeroStrategy: DeepSpeed's partitions, Lightning's rest inside

Those of this project are folders with a manifest: commit.py writes and verifies them, manifest.py says what is in it.
formats.py reads any of them whole, in one process; zero.py knows DeepSpeed's partitions; optimizer.py finds optimizer
state by the parameters' names; resume.py brings a checkpoint into a strategy that did not write it.
"""
