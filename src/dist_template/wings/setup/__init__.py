"""Verbs around a project: check a machine, prepare its data, read the documentation, upgrade."""
