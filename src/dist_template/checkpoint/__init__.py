"""Checkpoints of every strategy, read by every other.

commit.py writes a folder with a manifest, also in the background; manifest.py verifies it.
formats.py opens and loads a checkpoint. protocol.py says what a format answers for; formats.py has
the one of a single file, and strategies have their own (parallel/mesh/format.py and
parallel/zero/format.py). stored.py reads a rank's slices of tensors from files, optimizer.py names
optimizer state by parameter, frozen.py describes the base of adapters, identity.py compares
settings, and untrusted.py keeps code in a file from running."""
