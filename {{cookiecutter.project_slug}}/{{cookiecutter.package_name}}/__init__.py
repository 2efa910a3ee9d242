"""Train a transformers model with Lightning: `python -m <this package> --help`."""
