"""Chains of operations that tests run over, and one training step of a chain."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import fusion
from mezzotint.recipe import Recipe
from tests.recipes import gradient, sample

WIDTH, HIDDEN, EXPERTS = 64, 48, 2
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
Result = dict[str, Any]


class Widen(nn.Module):
    """A module that is no operation; it doubles the width that a gated activation halves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((1 + x, 1 - x), -1)


def linear(in_features: int, out_features: int, bias: bool = True) -> ops.Linear:
    return ops.Linear(in_features, out_features, bias=bias, **OPTIONS)


def mlp() -> ops.Sequential:
    return ops.Sequential(ops.LayerNorm(WIDTH, **OPTIONS), linear(WIDTH, HIDDEN), ops.GELU(), linear(HIDDEN, WIDTH))


def residual() -> ops.Sequential:
    """The branch is given out, and added again by a channel."""
    branch, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    branch.set_extra_output_channel(0, "skip")
    join.set_extra_input_channel(0, "skip")
    return ops.Sequential(
        branch,
        ops.RMSNorm(WIDTH, **OPTIONS),
        linear(WIDTH, HIDDEN),
        ops.SiLU(),
        linear(HIDDEN, WIDTH, bias=False),
        ops.ConstantScale(0.5),
        join,
    )


def experts() -> ops.Sequential:
    return ops.Sequential(
        ops.GroupedLinear(EXPERTS, WIDTH, 2 * HIDDEN, **OPTIONS),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(EXPERTS, HIDDEN, WIDTH, **OPTIONS),
    )


def mix() -> ops.Sequential:
    """What else meets quantized tensors, sums in place, a module that is no operation."""
    return ops.Sequential(
        ops.Reshape((-1, 32)),
        linear(32, WIDTH),
        nn.Identity(),
        ops.Bias(WIDTH, **OPTIONS),
        ops.SwiGLU(cache_quantized_input=True),
        ops.MakeExtraOutput(in_place=True),
        ops.BasicLinear(32, 32, **OPTIONS),
        ops.AddExtraInput(in_place=True),
        ops.Quantize(True, True),
        ops.BasicLinear(32, WIDTH, **OPTIONS),
    )


def activations() -> ops.Sequential:
    """All of them and what is left, with modules between them."""
    return ops.Sequential(
        linear(WIDTH, WIDTH),
        ops.Identity(),
        ops.Dropout(0.2),
        ops.L2Normalization(),
        ops.ConstantScale(8.0),
        ops.GELU(),
        ops.ReLU(),
        Widen(),
        ops.GLU(),
        ops.SReLU(),
        Widen(),
        ops.GEGLU(),
        ops.QGELU(),
        Widen(),
        ops.QGEGLU(),
        ops.SiLU(),
        Widen(),
        ops.ReGLU(),
        Widen(),
        ops.SReGLU(),
        Widen(),
        ops.SwiGLU(),
        Widen(),
        ops.ClampedSwiGLU(limit=3.0, glu_interleave_size=8),
        Widen(),
        ops.ScaledSiTUGLU(),
        Widen(),
        ops.SiTUGLU(),
        ops.ScaledSReLU(),
        Widen(),
        ops.ScaledClampedQGeGLU(),
        Widen(),
        ops.ScaledSwiGLU(),
        linear(WIDTH, WIDTH, bias=False),
    )


CHAINS: dict[str, Callable[[], ops.Sequential]] = {
    "mlp": mlp,
    "residual": residual,
    "experts": experts,
    "mix": mix,
    "activations": activations,
}


def spread(module: nn.Module, seed: int = 0) -> Any:
    """The module with parameters that matter: none is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return module


def build(name: str) -> ops.Sequential:
    torch.manual_seed(0)
    return spread(CHAINS[name]())


def twins(name: str) -> tuple[ops.Sequential, ops.Sequential]:
    chain = build(name)
    return chain, copy.deepcopy(chain)


def routing(rows: int) -> list[int]:
    """Ragged."""
    return [rows // 3, rows - rows // 3]


def extras(name: str, rows: int, seed: int = 0, splits: Any = None) -> tuple[Any, ...]:
    """The extra inputs of a chain for an input (rows, WIDTH)."""
    generator = torch.Generator().manual_seed(100 + seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    if name == "experts":
        splits = routing(rows) if splits is None else splits
        return splits, rand(rows), splits
    if name == "mix":
        return (sample(2 * rows, 50 + seed, width=32),)
    if name == "activations":
        return rand(rows), rand(rows), rand(rows), rand(rows)
    return ()


def step(
    chain: Any,
    x: torch.Tensor,
    extra: Sequence[Any] = (),
    recipe: Recipe | None = None,
    call: Any = None,
    *,
    input_grad: bool = True,
    extra_grad: bool = True,
    **kwargs: Any,
) -> Result:
    """Forward and backward: outputs, gradients of all that goes in, and every buffer, by name."""
    leaf = x.detach().clone().requires_grad_(input_grad)
    leaves = [
        value.detach().clone().requires_grad_(extra_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in extra
    ]
    seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        made = (chain if call is None else call)(leaf, *leaves, **kwargs)
    made = made if isinstance(made, tuple) else (made,)
    result: Result = {f"output {i}": plain(y) for i, y in enumerate(made)}
    torch.stack([gradient(y) for y in made]).sum().backward()
    result["input"] = leaf.grad
    result |= {f"extra input {i}": e.grad for i, e in enumerate(leaves) if isinstance(e, torch.Tensor)}
    for name, parameter in chain.named_parameters():
        result[name] = parameter.grad
        parameter.grad = None
    # A clone of each: later steps write the buffers, and a replayed graph its outputs.
    result |= dict(chain.named_buffers())
    return {name: None if value is None else value.detach().clone() for name, value in result.items()}


def seed(value: int) -> None:
    """As `torch.manual_seed`, which formats its stack for each kind of device that is not there."""
    generators = (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))
    for generator in generators:
        generator.manual_seed(value)


def plain(y: torch.Tensor) -> torch.Tensor:
    return y.dequantize() if isinstance(y, mz.QuantizedTensor) else y


class OneByOne(nn.ModuleList):
    """Operations, each in a pipeline of its own; at most one of them takes extra inputs, or has extra outputs."""

    def forward(self, x: torch.Tensor, *extra: Any) -> Any:
        more: list[Any] = []
        for op in self:
            first = op.basic_ops[0] if isinstance(op, ops.FusedOperation) else op
            x = op(x, *(extra if first.num_extra_inputs else ()))
            if isinstance(x, tuple):
                x, *more = x
        return (x, *more) if more else x


REGISTRIES = (fusion.FORWARD_BACKWARD_FUSIONS, fusion.FORWARD_FUSIONS, fusion.BACKWARD_FUSIONS)


@contextmanager
def only(*fusions: Any) -> Iterator[None]:
    """No other fusions than these: with none of them, operations run one by one."""
    held = [list(registry) for registry in REGISTRIES]
    try:
        for registry, functions in zip(REGISTRIES, held, strict=True):
            registry[:] = [function for function in functions if function in fusions]
        yield
    finally:
        for registry, functions in zip(REGISTRIES, held, strict=True):
            registry[:] = functions
