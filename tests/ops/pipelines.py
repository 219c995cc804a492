"""Small pipelines for tests of the fuser."""

from typing import Any

import torch

from mezzotint import ops
from tests.ops.user_ops import OPTIONS, mlp
from tests.recipes import sample

WIDTH = 32


def x32(seed: int = 0, rows: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return sample(rows, seed, dtype, WIDTH)


def linear(seed: int = 0, cls: Any = ops.BasicLinear, **options: Any) -> Any:
    torch.manual_seed(seed)
    return cls(WIDTH, WIDTH, **{**OPTIONS, **options})


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


def residual(*, to_caller: bool = False, in_place: bool = False, readers: int = 1) -> ops.Sequential:
    """x + f(x), with x by a channel."""
    make, inner = ops.MakeExtraOutput(in_place=in_place), list(mlp())
    make.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    adds = [ops.AddExtraInput(in_place=in_place) for _ in range(readers)]
    for add in adds:
        add.set_extra_input_channel(0, "residual")
    return ops.Sequential(make, *inner, *adds)
