"""Lightning callbacks: what is measured, shown, saved and guarded during training.

cli/defaults.py has the order in which they run: measure, write, show, act.
"""
