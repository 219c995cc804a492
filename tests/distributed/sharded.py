"""The small model that is sharded in tests, one step of its training, and what the processes send."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint.recipe import Recipe

WIDTH, ROWS = 256, 16  # half of the width is one 128x128 block


def model(init: Recipe | None = None, out: int = WIDTH, **options: Any) -> nn.Sequential:
    """Norm, linear, norm, MLP; quantized weights where `init` is given."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cpu", **options}
    with nullcontext() if init is None else mz.quantized_model_init(recipe=init):
        blocks = mz.LayerNormLinear(WIDTH, WIDTH, **options), mz.LayerNormMLP(WIDTH, WIDTH, **options)
    return nn.Sequential(*blocks, mz.Linear(WIDTH, out, **options))


def sharded(made: nn.Sequential, **options: Any) -> nn.Sequential:
    """Each block on its own, gathered again for backward."""
    for block in made:
        fully_shard(block, reshard_after_forward=True, **options)
    return fully_shard(made, **options)


def batch(step: int) -> torch.Tensor:
    """Rows of very different size: formats differ in what they make of them."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return (x * 2.0 ** torch.randint(-8, 8, (ROWS, WIDTH), generator=generator)).bfloat16()


def loss_of(y: torch.Tensor, step: int) -> torch.Tensor:
    target = torch.randn(y.shape, generator=torch.Generator().manual_seed(1000 + step))
    return (y.float() - target).square().mean()


def optimizer(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=2e-3)


def train(
    made: nn.Module,
    recipe: Recipe | None,
    steps: int,
    call: Callable[..., Any] | None = None,
    microbatches: int = 1,
    first: int = 0,
    optim: Any = None,
) -> list[float]:
    """Losses of each step; the same batch on every process, so that the mean of gradients over two is exact."""
    optim = optimizer(made) if optim is None else optim
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)  # stochastic rounding
        for i in range(microbatches):
            kwargs = {} if microbatches == 1 else {"is_first_microbatch": i == 0}
            with mz.autocast(enabled=recipe is not None, recipe=recipe):
                loss = loss_of((made if call is None else call)(batch(step + 100 * i), **kwargs), step)
            (loss / microbatches).backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    return losses


class _Sent(TorchDispatchMode):
    """Counts the bytes that this process puts into all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func._schema.name:
            self.gathers.append(args[1].numel() * args[1].itemsize)
        return func(*args, **(kwargs or {}))


@contextmanager
def sent() -> Iterator[list[int]]:
    """Bytes of each all-gather inside."""
    with _Sent() as mode:
        yield mode.gathers
