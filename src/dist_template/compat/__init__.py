"""Everything that depends on private names of other libraries, or replaces a part of them; nothing
else may.

lightning.py             state of the Trainer and its strategies, the launcher, loggers
lightning_cli.py         LightningCLI and its parser
loop.py, hooks, epochs    Lightning's training loop with less overhead, and exact epochs
torch.py, torchrun.py    tensors, process groups, checkpoints; the elastic agent
stacks.py                names of functions in stacks, by which a hang's phase is known
deepspeed.py             ZeRO's optimizers and checkpoint files
transformers.py          attention masks, grouped products, sharding by a model's plans
replicated_gradients.py  a fix of transformers' tensor parallelism
attributes.py            sets attributes and restores them

tests/compat/test_names.py fails when a new version has another name or signature.
"""
