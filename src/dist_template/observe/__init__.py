"""Reads and writes what a run records in its folder.

history/     names of the files in a run's folder; where its time went. Without torch
loggers/     metrics.jsonl, TensorBoard, W&B
crash.py     crash records: prints them, exit codes"""
