"""Checkpoints of every strategy, read by every other.

commit.py writes a folder with a manifest, asynchronous.py in the background; manifest.py verifies
it. formats.py opens and loads a checkpoint; protocol.py says what a format answers for, and
plain.py, sharded.py and zero.py are the three formats. optimizer.py names optimizer state by
parameter, frozen.py describes the base of adapters, identity.py compares settings, and untrusted.py
keeps code in a file from running."""
