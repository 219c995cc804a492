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

ROWS = 16


def width_of(recipe: str) -> int:
    """Of the model for a recipe: half of it, a shard's rows, are whole blocks."""
    return 256 if recipe == "block" else 64


def spread_out(weight: torch.Tensor) -> torch.Tensor:
    """Initial values of very different size, within blocks and between them: formats differ in what they make of it."""
    exponents = torch.randint(-12, 3, weight.shape)
    exponents[:, : weight.shape[1] // 2] -= 8
    return weight.normal_(0.0, 0.05).mul_(2.0**exponents)


def model(width: int = 64, init: Recipe | None = None, head: int = 0, **options: Any) -> nn.Sequential:
    """Norm and linear, norm and MLP, a head where it has outputs; quantized weights where `init` is given."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cpu", "init_method": spread_out, **options}
    with nullcontext() if init is None else mz.quantized_model_init(recipe=init):
        made = nn.Sequential(mz.LayerNormLinear(width, width, **options), mz.LayerNormMLP(width, width, **options))
    if head:
        made.append(mz.Linear(width, head, **options))
    return made


def sharded(made: nn.Sequential, reshard_after_forward: bool = True, **options: Any) -> nn.Sequential:
    """Each block on its own, gathered again for backward."""
    for block in made:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(made, **options)


def batch(step: int, width: int) -> torch.Tensor:
    """Of elements as different in size."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, width, generator=generator)
    return (x * 2.0 ** torch.randint(-8, 8, x.shape, generator=generator)).bfloat16()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Against values that a bias alone can learn."""
    target = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(1000))
    return (y.float() - target).square().mean()


def optimizer(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=5e-3)


class Steps(nn.Module):
    """The blocks one after the other, each told which micro-batch it is, or recomputed in backward."""

    def __init__(self, blocks: nn.Sequential, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = blocks, reentrant

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x, **kwargs)
            else:
                x = mz.checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


class Again(nn.Module):
    """A block that is recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mz.checkpoint(self.block, x, use_reentrant=False)


def train(
    made: nn.Module,
    recipe: Recipe | None,
    steps: int,
    *,
    width: int = 64,
    call: Callable[..., Any] | None = None,
    microbatches: int = 1,
    first: int = 0,
    optim: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Losses of each step; the same batch on every process, so that the mean of gradients over two is exact."""
    optim = optimizer(made) if optim is None else optim
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)  # stochastic rounding
        for i in range(microbatches):
            kwargs = {} if microbatches == 1 else {"is_first_microbatch": i == 0}
            with mz.autocast(enabled=recipe is not None, recipe=recipe):
                loss = loss_of((made if call is None else call)(batch(step + 100 * i, width), **kwargs))
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
        if "allgather_base" in func._schema.name:  # of one tensor, not of objects
            self.gathers.append(args[1].numel() * args[1].itemsize)
        return func(*args, **(kwargs or {}))


@contextmanager
def sent() -> Iterator[list[int]]:
    """Bytes of each all-gather inside."""
    with _Sent() as mode:
        yield mode.gathers
