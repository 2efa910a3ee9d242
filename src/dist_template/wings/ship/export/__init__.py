"""`export`: converts a checkpoint to a folder of another library, and verifies it."""
