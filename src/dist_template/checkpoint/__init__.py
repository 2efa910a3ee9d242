"""Checkpoints of every strategy, read by every other.

commit.py writes a folder with a manifest, also in the background; manifest.py verifies it.
formats.py opens and loads a checkpoint. protocol.py says what a format answers for; formats.py (one
file), sharded.py and zero.py have the three. stored.py reads a rank's slices of tensors from files,
planning.py divides the writing of them, optimizer.py names optimizer state by parameter, frozen.py
describes the base of adapters, identity.py compares settings, and untrusted.py keeps code in a file
from running."""
