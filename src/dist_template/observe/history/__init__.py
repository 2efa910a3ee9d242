"""Reads the files in a run's folder, for `diagnose` and `report`, without torch or Lightning."""
