"""The same training, in a hand-written loop, by the project and by each peer.

Each module has `train(task) -> Sample`: it builds the model, warms up, trains, and returns what an optimizer step took
after the warm-up. All do the same: rows of one token cache in a random order, AdamW (fused), cosine with warm-up,
gradients clipped at norm 1, and every `log_every` steps loss, gradient norm, learning rate and tokens per second in a
file and on the terminal; a checkpoint is due, but not within the steps.

task.py          what is trained, on what, for how long; the log of the hand-written loops
hand.py          torch alone; DDP and FSDP2 as a specialist sets them
hand_zero.py     DeepSpeed's ZeRO-2, whose engine reduces, clips and steps
project.py       `fit` as shipped
lightning.py     Lightning's Trainer with its defaults
trainer.py       Hugging Face's Trainer with its defaults
accelerate.py    a hand-written loop with Hugging Face's accelerate
fabric.py        a hand-written loop with Lightning's Fabric
"""
