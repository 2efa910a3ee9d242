"""Prove a configuration on a few CPU processes before it costs GPU hours. In the order in which it happens:

shrink.py        makes a production configuration small: a folded mesh, generated text
architecture.py  makes its model small: few layers, narrow, of the same structure
runs.py          the trainings, each run once when a check asks for it
workers.py       the parent's side of one: N CPU processes, fresh, forked from one that has imported everything
worker.py        the child's side: one rank of one command
recorder.py      callback: records weights, losses, rows and random state of each step, on every rank
details.py       callback: records the first step's outputs and gradients, and what draws random numbers
forward.py       hooks on every module, and where two forward passes first differ
stages.py        callback: records what each hook between backward and the step does to the gradients
state.py         hashes what a training keeps besides its weights
probe.py         callback: does a token see another document, or a later token?
source_order.py  reads the user's source twice, with other hashes
acts.py          what a training must survive, or what makes a fault visible: kills, ragged labels
record.py        what was recorded, read again
locations.py     where code is defined
compare.py       compares the numbers of two trainings
trace.py         the first difference of two trainings, in one sentence
exported.py      reads an exported model
checks.py        what must be equal
report.py        the table, JSON and JUnit XML
"""
