"""What is not needed to train: verbs, each with its code. The core imports none of them."""
