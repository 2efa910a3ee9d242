"""Pipeline parallelism, a dimension of MeshStrategy; run.py has the training step, from top to
bottom."""
