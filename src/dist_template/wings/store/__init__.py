"""Object storage of a run, `run.store`: any address that fsspec knows.

    <run.store>/<run.name>/<run id>/config.yaml, metrics.jsonl, …
    <run.store>/<run.name>/<run id>/checkpoints/step00000040.ckpt/manifest.json and the files

A checkpoint is valid there only if it has its manifest.json, which is written last and deleted first."""
