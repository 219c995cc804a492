"""This example moves over from Transformer Engine: the imports change, the code below them does not."""

import torch

# import transformer_engine.pytorch as te
# from transformer_engine.common import recipe
import mezzotint as te
from mezzotint import recipe

layer = te.TransformerLayer(256, 1024, 8, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0)
linear = te.Linear(256, 512, bias=True, params_dtype=torch.bfloat16)
scaling = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
x = torch.randn(64, 2, 256, dtype=torch.bfloat16, device=linear.weight.device)  # [s, b, hidden]

with te.fp8_autocast(enabled=True, fp8_recipe=scaling):  # or te.autocast(recipe=scaling)
    y = linear(layer(x))
y.float().pow(2).mean().backward()
print(y.shape, linear.weight.grad.norm().item())
