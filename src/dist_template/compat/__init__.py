"""Code that depends on private parts of Lightning: its training loop with less overhead, and exact epochs."""
