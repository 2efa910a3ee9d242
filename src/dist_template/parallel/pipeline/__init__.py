"""Pipeline parallelism: a dimension of MeshStrategy.

run.py          the training step, from top to bottom; forward passes alone: validation, generate
division.py     divides a model into stages, in place
partition.py    finds the blocks, the embedding and head, and the blocks of each stage
schedule.py     wraps torch's schedules with a stage that calls a function in place of a module
costs.py        bubble, activations in flight, even stages; no torch
"""
