"""Where text comes from: each source yields documents, conversations or pairs."""
