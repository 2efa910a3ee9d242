"""Object storage of a run, `run.store`: <run.store>/<run.name>/<run id> has the files of a run's folder.

A checkpoint is valid there only if it has its manifest.json, which is written last and deleted first."""
