"""Pipeline parallelism: a dimension of MeshStrategy.

partition.py    where a model is cut: its blocks, and how many each stage gets
balance.py      divides the costs of blocks
division.py     puts a stage's part in place of the model
schedule.py     torch's schedules and their stage
forward.py      forward passes alone: validation, generate
run.py          the training step
"""
