"""What a run has written down, read again: by `diagnose`, `report` and `audit`, without torch or Lightning."""
