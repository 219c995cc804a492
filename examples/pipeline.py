"""Run a pipeline without bubbles: weight gradients wait until a rank has nothing else to do.

    torchrun --nproc-per-node 2 examples/pipeline.py

The schedule is PyTorch's. It computes what the previous stage waits for, the gradient of a stage's input, as soon as it
can, and asks for weight gradients later. Modules with `delay_wgrad_compute=True` leave these out of backward, and
`backward_dw()` computes them. They equal the gradients of one rank, bit for bit.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import mezzotint as mz

HIDDEN, FFN, ROWS, MICRO_BATCHES, STAGES = 64, 128, 32, 4, 4


class Block(torch.nn.Module):
    """A `Block` computes x + MLP(x), in MXFP8."""

    def __init__(self, number: int, delayed: bool) -> None:
        super().__init__()
        torch.manual_seed(number)
        options = {"params_dtype": torch.bfloat16, "delay_wgrad_compute": delayed}
        self.mlp = mz.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
            return x + self.mlp(x)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y.float() - target).square().mean()


if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start it over ranks: torchrun --nproc-per-node 2 examples/pipeline.py")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)  # modules are made on the current device
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
x = torch.randn(MICRO_BATCHES * ROWS, HIDDEN).to(device, torch.bfloat16)
target = torch.randn(MICRO_BATCHES * ROWS, HIDDEN).to(device)

# Stages 0, 2, … belong to rank 0, and 1, 3, … to rank 1. After a backward, PyTorch asks `dw_builder` for the function
# that computes its weight gradients, and calls it when there is time.
blocks = {number: Block(number, delayed=True) for number in range(rank, STAGES, size)}
like = torch.empty_like(x[:ROWS]).requires_grad_()  # what stages hand on
stages = [
    PipelineStage(
        block,
        number,
        STAGES,
        device,
        input_args=x[:ROWS] if number == 0 else like,
        output_args=like,
        dw_builder=lambda block=block: block.mlp.backward_dw,
    )
    for number, block in blocks.items()
]
schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_of, scale_grads=False)
schedule.step(*[x] if rank == 0 else [], target=target if STAGES - 1 in blocks else None)

alone = [Block(number, delayed=False) for number in range(STAGES)]
for rows, wanted in zip(x.split(ROWS), target.split(ROWS), strict=True):
    loss_of(torch.nn.Sequential(*alone)(rows), wanted).backward()
for number, block in blocks.items():
    for (name, parameter), other in zip(block.named_parameters(), alone[number].parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), f"stage {number}, {name}"
print(f"rank {rank}: gradients of stages {[*blocks]} are those of one process, bit for bit")
dist.destroy_process_group()
