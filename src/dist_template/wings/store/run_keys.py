"""The key of `run` that turns the store on."""

from dataclasses import dataclass


@dataclass
class StoreKeys:
    """The store of a run.

    Args:
        store: Address of fsspec, such as s3://bucket/prefix, to which checkpoints and the run's
            files are uploaded; a run that has lost its disks resumes from there. null: none."""

    store: str | None = None
