"""Operations as users write them, in both forms, and a training step of a pipeline."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops import fusion
from mezzotint.recipe import Recipe
from tests.recipes import gradient

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}


class Square(ops.BasicOperation):
    """x² · factor, whole; it can be told a factor."""

    def op_forward(self, ctx: Any, input_: Any, *, factor: float = 1.0, **given: Any) -> Any:
        ctx.save_for_backward(input_)
        ctx.factor = factor
        return input_ * input_ * factor

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output * ctx.factor, ()


class SplitSquare(ops.BasicOperation):
    """The same, split."""

    def op_forward_compute(self, input_: Any, *, factor: float = 1.0, **given: Any) -> Any:
        return input_ * input_ * factor, (input_,)

    def op_forward_save_ctx(
        self, ctx: Any, input_: Any, tensors_to_save: Any, *, factor: float = 1.0, **given: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.factor = factor

    op_backward = Square.op_backward


class Gate(ops.BasicOperation):
    """x · gate as the output, gate once more as an extra output; whole."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **given: Any) -> Any:
        gate = basic_op_extra_inputs[0][0]
        basic_op_ctxs[0].save_for_backward(input_, gate)
        return input_ * gate, [(gate,)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        x, gate = basic_op_ctxs[0].saved_tensors
        extra = basic_op_grad_extra_outputs[0][0]  # None where it went into a channel that nobody read
        return grad_output * gate, [()], [(grad_output * x if extra is None else grad_output * x + extra,)]


class SplitGate(ops.BasicOperation):
    """The same, split."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward_compute(self, input_: Any, *, basic_op_extra_inputs: Any, **given: Any) -> Any:
        gate = basic_op_extra_inputs[0][0]
        return input_ * gate, [(gate,)], (input_, gate)

    def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    fuser_backward = Gate.fuser_backward


class CountingLinear(ops.BasicLinear):
    """Counts its backwards."""

    backwards = 0

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        self.backwards += 1
        return super().op_backward(ctx, grad_output)


@contextmanager
def registries(*, empty: bool = False) -> Iterator[None]:
    """What is registered inside is forgotten behind; `empty` hides what is shipped."""
    lists = (fusion.FORWARD_BACKWARD_FUSIONS, fusion.FORWARD_FUSIONS, fusion.BACKWARD_FUSIONS)
    kept = [list(functions) for functions in lists]
    try:
        if empty:
            for functions in lists:
                functions.clear()
        yield
    finally:
        for functions, before in zip(lists, kept, strict=True):
            functions[:] = before


def names(groups: Any) -> list[str]:
    """Of the operations of one pipeline, as `Sequential.fused_ops()` gives them."""
    return [type(op).__name__ for op in groups]


def mlp(*, bias: bool = True, norm: Any = ops.RMSNorm, **options: Any) -> ops.Sequential:
    """Norm, linear, SwiGLU, linear: 32 → 32, the same weights each time."""
    torch.manual_seed(0)
    settings = {**OPTIONS, **options}
    model = ops.Sequential(
        norm(32, **settings),
        ops.Linear(32, 64, bias=bias, **settings),
        ops.SwiGLU(),
        ops.Linear(32, 32, bias=bias, **settings),
    )
    return shaken(model)


def shaken(model: Any) -> Any:
    """Biases and norms away from their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def twin(model: Any) -> Any:
    return copy.deepcopy(model)


def step(
    model: Any,
    x: torch.Tensor,
    recipe: Recipe | None = None,
    *extra: torch.Tensor,
    call: Any = None,
    needs_grad: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Forward and backward: outputs, gradients by name, delayed scaling's state."""
    leaf = x.detach().clone().requires_grad_(needs_grad)
    extras = [e.detach().clone().requires_grad_() for e in extra]
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        made = (model if call is None else call)(leaf, *extras, **kwargs)
    outputs = made if isinstance(made, tuple) else (made,)
    sum(gradient(y) for y in outputs).backward()  # type: ignore[union-attr]
    result: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    result |= {"input": leaf.grad} | {f"extra {i}": e.grad for i, e in enumerate(extras)}
    result |= results(model)
    model.zero_grad()
    return result


def results(model: nn.Module) -> dict[str, Any]:
    """Gradients and state by name."""
    made: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    made |= {name: buffer.clone() for name, buffer in model.named_buffers() if "scale" in name or "amax" in name}
    return made
