"""Object storage of a run, `run.store`: <run.store>/<run.name>/<run id> has the files of a run's
folder.

A checkpoint is valid there with all files of its manifest.json, which is uploaded last and deleted
first."""
