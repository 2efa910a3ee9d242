"""Prove a configuration on a few CPU processes before it costs GPU hours; `tools/rehearse.py` is its command.

workers.py   parent's side: trainings on N CPU processes, fresh ones for each, forked from one that has imported all
worker.py    child's side: one rank of one training
recorder.py  the callback by which every rank writes down what it does: weights, losses, rows, random state
record.py    reads that again
shrink.py    a production configuration made small: few layers, small widths, a folded mesh, generated text
checks.py    what must be equal, and where it begins to differ
report.py    the table, JSON and JUnit XML
"""
