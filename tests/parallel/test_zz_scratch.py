import os, pytest, sys
from tests.support import parity
from tests.support.parity import Trainings, train  # noqa
from tests.support.parity import *
EXTRA=os.environ.get("EXTRA","--model.optim.optimizer=muon").split()
@pytest.mark.parametrize("case", os.environ["CASES"].split())
def test_x(train, case):
    model, strategy = case.split(":")
    one = train(model,"one",*EXTRA); many=train(model,strategy,*EXTRA)
    print()
    for s in one.loss: print(case, s, one.loss[s], f"{many.loss[s]/one.loss[s]-1:.1e} {many.grad_norm[s]/one.grad_norm[s]-1:.1e}", one.grad_norm[s])
    d={n:(many.end[n].float()-t.float()).abs().max().item() for n,t in one.end.items()}
    print(sorted(((v,n) for n,v in d.items()), reverse=True)[:6])
parity.MODELS["odd"]="{model_type: qwen3_moe, hidden_size: 36, intermediate_size: 50, moe_intermediate_size: 12, num_hidden_layers: 3, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 6, num_experts: 5, num_experts_per_tok: 2, decoder_sparse_step: 1}"
parity.MODELS["oss"]="{model_type: gpt_oss, hidden_size: 32, intermediate_size: 20, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_local_experts: 4, num_experts_per_tok: 2}"
parity.MODELS["gpt2"]="{model_type: gpt2, n_embd: 30, n_layer: 2, n_head: 2, n_inner: 50, resid_pdrop: 0.0, attn_pdrop: 0.0, embd_pdrop: 0.0}"
