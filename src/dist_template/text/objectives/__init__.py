"""What a language model is trained for."""
