"""`promote`: evaluates a trained model, exports it, compares the two, and registers the export."""
