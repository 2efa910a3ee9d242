"""Measures every rank before the first step, and the best interval of checkpoints."""
