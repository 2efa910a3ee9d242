"""One job per file. A callback never raises into training, and resumes by its `state_dict`."""
