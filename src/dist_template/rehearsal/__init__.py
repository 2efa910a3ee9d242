"""Proves a configuration on a few CPU processes before it uses GPU hours. Files, in the order of a rehearsal:

shrink_config.py     makes a production configuration small: mesh of size 2, generated text
shrink_model.py      makes its model small: few narrow layers of the same structure
runs.py              the trainings; each runs once, when a check first needs it
workers.py           starts N CPU ranks, forked from a process that has imported everything
job.py, worker.py    what a rank gets; how it runs one command
recorder.py          callback: records weights, losses, samples and random state of each step on every rank
first_step.py        callback: records outputs and gradients of the first step, and which modules draw random numbers
forward_hooks.py     hooks on every module; finds where two forward passes first differ
gradient_hooks.py    callback: records how each hook between backward and optimizer step changes the gradients
training_state.py    hashes state besides the weights: optimizer, learning rates, Python attributes
leakage.py           callback: tests whether a token depends on another document or a later token
source_order.py      reads the user's data source twice with different hash seeds
interventions.py     callbacks: kill all ranks, keep a checkpoint, mask a different share of labels per row
record.py            reads what recorder.py wrote
code_locations.py    file:line of functions, modules and stacks
compare.py           compares losses, tensors, samples and replicas of two trainings
root_cause.py        names the first difference of two trainings, in one sentence
exported_model.py    reads an exported model
checks.py            the checks and their tolerances
report.py            a line per check, and rehearsal.json
"""
