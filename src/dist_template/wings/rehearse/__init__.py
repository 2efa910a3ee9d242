"""Proves a configuration on a few CPU processes before it uses GPU hours.

command.py         the verb
shrink_config.py   makes a production configuration small, and shrink_model.py its model
runs.py            the trainings; workers.py starts their ranks, worker.py is one of them
recorder.py        callback: records each step; first_step.py the first outputs and gradients
interventions.py   callbacks that kill all ranks, mask labels, and change tokens
record.py          reads what the callbacks recorded
compare.py         compares two trainings, and names their first difference
checks.py          the checks and their tolerances; gpu/ has the ones on fake GPUs
report.py          a line per check, and rehearsal.json"""
