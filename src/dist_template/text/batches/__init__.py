"""From rows of tokens to a rank's batches: packing, order, and the loader."""
