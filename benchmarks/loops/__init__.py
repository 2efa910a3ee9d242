"""The same training, in a hand-written loop (hand.py), by the project and by Hugging Face's
Trainer.

Each module has `train(task) -> Sample`: it builds the model, warms up, trains, and returns what an
optimizer step took after the warm-up. All do the same: rows of one token cache in a random order,
AdamW (fused), cosine with warm-up, gradients clipped at norm 1, and every `log_every` steps loss,
gradient norm, learning rate and tokens per second in a file and on the terminal; a checkpoint is
due, but not within the steps.
"""
