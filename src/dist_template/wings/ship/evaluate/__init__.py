"""`evaluate`: whether a model is better than a baseline, on the same documents and tasks."""
