"""Train a mixture of experts whose experts are spread over ranks.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

A router sends each token to two of eight experts, wherever they are. How many rows a rank sends and gets differs from
step to step, and may be none.
"""

import os

import torch
import torch.distributed as dist

import mezzotint as mz
from mezzotint.distributed import combine, dispatch, plan_exchange
from mezzotint.moe.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

HIDDEN, FFN, TOKENS, EXPERTS, TOPK, STEPS = 64, 128, 48, 8, 2, 10


class Mixture(torch.nn.Module):
    """A `Mixture` maps x [tokens, hidden] to the sum of what two experts make of each token, and
    the loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        local = EXPERTS // dist.get_world_size()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.fc1 = mz.GroupedLinear(local, HIDDEN, FFN, bias=False, params_dtype=torch.bfloat16)
        self.fc2 = mz.GroupedLinear(local, FFN, HIDDEN, bias=False, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x.float())
        probs, mask = fused_topk_with_score_function(logits, TOPK, False, None, None, None, "softmax", None)
        _, scores = fused_compute_score_for_moe_aux_loss(logits, TOPK, "softmax")
        counts = mask.sum(0)
        balance = fused_moe_aux_loss(scores, counts, x.shape[0], EXPERTS, TOPK, 0.01)
        rows, row_id_map = mz.moe_permute(x, mask, x.shape[0] * TOPK)
        exchange = plan_exchange(counts, rows.shape[0])
        hidden = torch.nn.functional.silu(self.fc1(dispatch(rows, exchange), exchange.m_splits))
        back = combine(self.fc2(hidden, exchange.m_splits), exchange)
        return mz.moe_unpermute(back, row_id_map, probs), balance


if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start it over ranks: torchrun --nproc-per-node 2 examples/expert_parallel.py")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # each rank has experts and tokens of its own
model = Mixture().to(device)
dist.broadcast(model.router.weight.data, 0)  # the router is the same everywhere
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(TOKENS, HIDDEN).to(device, torch.bfloat16)
for step in range(STEPS):
    with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        y, balance = model(x)
    loss = (y.float() + x.float()).square().mean()  # the model learns to negate each token
    # The loss is the mean over ranks. The gradients that an expert gets from them have been summed on the way back.
    ((loss + balance) / size).backward()
    dist.all_reduce(model.router.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1:2d}  loss {mean.item():.4f}")
dist.destroy_process_group()
