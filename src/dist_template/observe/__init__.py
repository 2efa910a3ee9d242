"""Reads and writes what a run records in its folder.

history/     reads a run's folder, without torch
loggers/     metrics.jsonl, TensorBoard, W&B
crash.py     crash records: prints them, exit codes
"""
