"""Prove a configuration on a few CPU processes before it costs GPU hours. In the order in which it happens:

shrink.py        a production configuration made small: a folded mesh, generated text
architecture.py  its model made small: few layers, narrow, of the same structure
runs.py          the trainings, each run once when a check asks for it
workers.py       the parent's side of one: N CPU processes, fresh, forked from one that has imported everything
worker.py        the child's side: one rank of one command
recorder.py      the callback by which each rank writes down weights, losses, rows and random state as it goes
details.py       the first step looked at closely: outputs, gradients; and the trained module's logits
acts.py          what a training must survive, or what makes a fault visible: kills, ragged labels
record.py        what was written, read again
compare.py       where two trainings begin to differ
checks.py        what must be equal
report.py        the table, JSON and JUnit XML
"""
