"""Proves a configuration on a few CPU processes before it uses GPU hours.

In the order of a rehearsal:

command.py            the verb: makes the configuration small, runs the checks, prints the report
shrink_config.py      makes a production configuration small: generated text, few steps
shrink_model.py       makes its model small: few narrow layers of the same structure
source_order.py       reads the user's data source twice, with different hash seeds
runs.py               the trainings; each runs once, when a check first needs it
workers.py            starts N CPU ranks, forked from a process that has imported everything
worker.py             one rank: runs one command
recorder.py           callback: records weights, losses, samples and state of each step
first_step.py         callback: records outputs and gradients of the first step
forward_hooks.py      hooks on every module
probes.py             callbacks of one process: what a token sees, what the loss predicts, who seeds
interventions.py      callbacks: kill all ranks, mask a different share of labels in each row
record.py             reads what the callbacks recorded
code_locations.py     file:line of functions, modules and stacks
compare.py            compares losses, tensors, samples and replicas of two trainings
root_cause.py         names the first difference of two trainings
checks.py             the checks and their tolerances
report.py             a line per check, and rehearsal.json
"""
