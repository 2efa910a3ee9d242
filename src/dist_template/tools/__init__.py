"""Verbs beside training. Each reads the same --config list as `fit`."""
