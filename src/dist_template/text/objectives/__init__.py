"""What a language model learns: one class for each objective.

objective.py       `Objective`: what the module, the data and the verbs ask
next_token.py      the next token; a base class for losses of tokens
mtp.py             later tokens too, by modules beside the model
distillation.py    a frozen teacher's distribution
pairs.py           DPO, IPO, SimPO, ORPO; a base class for losses of two answers
ratings.py         KTO
reward.py          reward models
frozen.py          a frozen model beside the trained one
keys.py            the keys of YAML, and which objective a training has"""
