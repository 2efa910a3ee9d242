"""Everything that depends on private names of other libraries, or replaces a part of them; nothing
else may.

lightning.py             state of the Trainer and its strategies, the launcher, loggers
lightning_cli.py         LightningCLI and its parser
loop.py, hooks, epochs    Lightning's training loop with less overhead, and exact epochs
torch.py, torchrun.py    tensors, process groups, checkpoints; the elastic agent
deepspeed.py             ZeRO's optimizers and checkpoint files
transformers.py          attention masks, grouped products, sharding by a model's plans
transformers_serving.py  the handlers of OpenAI's API behind `transformers serve`
replicated_gradients.py  a fix of transformers' tensor parallelism
attributes.py            sets attributes and restores them

tests/compat/test_names.py fails when a new version has another name or signature.
"""
