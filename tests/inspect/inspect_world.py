"""What two processes see: halves of a weight (tensor parallelism), of tokens, and shards of parameters (FSDP2)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import mezzotint as mz
from mezzotint.inspect.figures import as_plain
from tests.worlds import Result

SIZE = 2


def tokens() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def seen_of(model: Any, x: torch.Tensor) -> dict[str, Any]:
    inspector = mz.inspect(model, every=1)
    with inspector:
        with mz.autocast("mxfp8"):
            y = model(x.requires_grad_())
        y.float().square().sum().backward()
    return {each.name: as_plain(each.figures) for each in inspector.last}


def fully_sharded(rank: int) -> Result:
    """Half of the tokens each: inputs and gradients are those of one process that has them all."""
    torch.manual_seed(0)
    model = mz.LayerNormMLP(64, 128, device="cpu", params_dtype=torch.bfloat16)
    return {"seen": seen_of(fully_shard(model), tokens().chunk(SIZE)[rank].clone())}


def tensor_parallel(rank: int) -> Result:
    """Rows of the weight on each process, and with sequence parallelism half of the tokens."""
    found: Result = {}
    for sequence_parallel in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"parallel_mode": "column", "sequence_parallel": sequence_parallel}
        model = mz.Linear(
            64, 128, bias=False, tp_group=dist.group.WORLD, device="cpu", params_dtype=torch.bfloat16, **options
        )
        torch.manual_seed(2)
        with torch.no_grad():
            model.weight.copy_(torch.randn(128, 64).chunk(SIZE)[rank])
        x = tokens().chunk(SIZE)[rank].clone() if sequence_parallel else tokens()
        found[str(sequence_parallel)] = seen_of(model, x)
    return found


CHECKS = (fully_sharded, tensor_parallel)
