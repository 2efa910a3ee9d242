"""What `data.py` stands on: sources of documents, tokenizers, the token cache, the order of samples."""
