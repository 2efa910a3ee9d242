"""Object storage of a run, `run.store`: any address that fsspec knows.

    <run.store>/<run.name>/<run id>/config.yaml, metrics.jsonl, …
    <run.store>/<run.name>/<run id>/checkpoints/step00000040.ckpt/manifest.json and the files

A checkpoint is valid there only if its manifest.json exists, which is written last and deleted first.

remote.py       addresses, verified transfers, errors in a sentence, without credentials
callback.py     uploads during training
hooks.py        before a start: what the store has and this disk lacks; after the end: the last files
local.py        copies of a run or a checkpoint for other verbs
rule.py         a rule of diagnosis
"""
