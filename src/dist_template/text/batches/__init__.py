"""From rows of tokens to a rank's batches: packing, order, equal work, and the loader."""
