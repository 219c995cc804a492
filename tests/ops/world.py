"""What each of two processes computes with collective operations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from mezzotint.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mezzotint.ops.fused import ForwardLinearReduceScatter
from tests.ops.chains import only, seed, spread
from tests.recipes import RECIPES
from tests.worlds import Result

SIZE, ROWS, WIDTH, OUT = 2, 4, 64, 192


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def input_of(rank: int, rows: int = ROWS) -> torch.Tensor:
    return draw((rows, 2, WIDTH), rank, torch.bfloat16)


def gradient_of(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return draw(tuple(shape), 10 + rank, dtype)


def linear_of(rank: int, bias: bool = True) -> ops.Linear:
    """Its parameters are this rank's part."""
    torch.manual_seed(rank)
    return spread(ops.Linear(WIDTH, OUT, bias=bias, device="cpu", dtype=torch.bfloat16), rank)


def forward_backward(
    op: Any, x: torch.Tensor, rank: int, *, dy: torch.Tensor | None = None, call: Any = None, recipe: Any = None
) -> Result:
    """Output, the gradients of the input and the parameters for a given one, or that of the rank, and scales."""
    leaf = x.detach().requires_grad_()
    seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = (op if call is None else call)(leaf)
    gradient = gradient_of(rank, y.shape, y.dtype) if dy is None else dy
    names = ["input", *[name for name, _ in op.named_parameters()]]
    grads = torch.autograd.grad(y, (leaf, *op.parameters()), gradient)
    scales = {name: buffer.clone() for name, buffer in op.named_buffers() if "scale" in name}
    return {"output": y.detach(), **dict(zip(names, grads, strict=True)), **scales}


def collectives(rank: int) -> Result:
    return {
        f"{name} {dtype}": forward_backward(op, input_of(rank).to(dtype), rank)
        for name, op in (
            ("gather", ops.AllGather()),
            ("reduce", ops.AllReduce()),
            ("reduce forward", ops.AllReduce(reduce_in_backward=False)),
            ("scatter", ops.ReduceScatter()),
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def one_at_a_time(rank: int) -> Result:
    """What has been started is not under way: of gloo's functional collectives several at once corrupt memory."""
    x, group = input_of(rank), dist.group.WORLD
    started = [start(x, group) for start in (start_all_gather, start_all_reduce, start_reduce_scatter)]
    return {
        "kinds": {type(each).__name__ for each in started},
        "waits": [each for each in started if wait(each) is not each],
    }


def strides(rank: int) -> Result:
    """Inputs and gradients as autograd may have them."""
    x = input_of(rank).transpose(0, 1)
    op = ops.ReduceScatter()
    dense, other = (forward_backward(op, value, rank) for value in (x.contiguous(), x))
    return {"dense": dense, "other": other, "summed": torch.autograd.grad(op(x.requires_grad_()).sum(), x)[0]}


def group_of_one(rank: int) -> Result:
    groups = [dist.new_group([i]) for i in range(SIZE)]
    x = input_of(rank)
    return {
        cls.__name__: forward_backward(cls(groups[rank]), x, rank)
        for cls in (ops.AllGather, ops.AllReduce, ops.ReduceScatter)
    }


def does_not_divide(rank: int) -> Result:
    found = {}
    behind = ops.Sequential(linear_of(rank), ops.ReduceScatter())
    for name, op in (("scatter", ops.ReduceScatter()), ("linear", behind)):
        try:
            op(input_of(rank, 3))
        except ValueError as error:
            found[name] = str(error)
    return found


def chain(rank: int, recipe: str, fused: bool, bias: bool = True) -> Result:
    """Rows gathered before a linear, summed and scattered behind it: tensor and sequence parallelism."""
    made = ops.Sequential(ops.AllGather(), linear_of(rank, bias), ops.ReduceScatter())
    if fused:
        result = forward_backward(made, input_of(rank), rank, recipe=RECIPES[recipe])
        (fuser,) = made._module_groups
        assert any(isinstance(op, ForwardLinearReduceScatter) for op, _ in fuser._forward_ops)
        return result
    with only():
        return forward_backward(made, input_of(rank), rank, recipe=RECIPES[recipe])


def chains(rank: int) -> Result:
    return {
        f"{recipe} {'bias' if bias else 'no bias'} {'fused' if fused else 'apart'}": chain(rank, recipe, fused, bias)
        for recipe, bias in (("none", True), ("none", False), ("delayed", True), ("mxfp8", True), ("nvfp4", False))
        for fused in (True, False)
    }


def compiled(rank: int) -> Result:
    found: Result = {}
    for recipe in ("none", "mxfp8"):
        made = ops.Sequential(ops.AllGather(), linear_of(rank), ops.ReduceScatter(), ops.GELU(), ops.AllReduce())
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(made, fullgraph=True, backend=counter)
        for step in range(2):
            x, chosen = input_of(rank) * (1 + step), RECIPES[recipe]
            found[f"{recipe} {step} compiled"] = forward_backward(made, x, rank, call=call, recipe=chosen)
            found[f"{recipe} {step} eager"] = forward_backward(made, x, rank, recipe=chosen)
        found[f"{recipe} graphs"] = counter.frame_count
    return found


CHECKS: tuple[Callable[[int], Result], ...] = (
    collectives,
    one_at_a_time,
    strides,
    group_of_one,
    does_not_divide,
    chains,
    compiled,
)
