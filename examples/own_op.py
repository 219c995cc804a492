"""This example adds an operation and a fusion of your own to `mezzotint.ops`.

    python examples/own_op.py [backend of torch.compile]

`ScaledTanh` is tanh(x · w), with a trained factor for each channel; if a constant factor follows it, `fuse` lets one
operation compute both. A pipeline of them trains like any module, quantizes its linears, and compiles as one graph.
"""

import sys
from typing import Any

import torch

import mezzotint as mz
from mezzotint import ops
from mezzotint.ops.fusion import replace_windows
from mezzotint.ops.quantizing import plain


class ScaledTanh(ops.BasicOperation):
    """A `ScaledTanh` computes tanh(x · weight) of x (…, width).

    Forward is split in two: the method that computes is pure, and the one that writes the context computes
    nothing. That is what lets a pipeline compile whole. (`op_forward(self, ctx, input_, ...)`, one method for
    both, works too, in eager code.)
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def op_forward_compute(self, input_: Any, **given: Any) -> Any:
        # Neighbours may hand quantized tensors over (`Quantize` does); `plain` returns them in high precision.
        x = plain(input_)
        y = torch.tanh(x * self.weight)
        return y, (x, y)  # the output, and the tensors that backward will need

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
        # What backward reads goes into the context: parameters and attributes may have changed by then.
        ctx.save_for_backward(*tensors_to_save, self.weight)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        x, y, weight = ctx.saved_tensors
        grad = plain(grad_output) * (1 - y * y)
        grad_weight = (grad * x).flatten(0, -2).sum(0)
        return grad * weight, (grad_weight,)  # gradients of the input, and of the parameters in their order


class TanhScale(ops.FusedOperation):
    """A `TanhScale` runs the forward of ScaledTanh and ConstantScale as one. Backward stays with the two, so they
    find their contexts as usual."""

    def fuser_forward_compute(self, input_: Any, **given: Any) -> Any:
        tanh, scale = self.basic_ops
        y, saved = tanh.op_forward_compute(input_)
        return y * scale.scale, [(), ()], saved  # neither of the two has extra outputs

    def fuser_forward_save_ctx(self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **given: Any) -> None:
        # There is one context for each basic operation, which knows what its backward needs.
        tanh, scale = self.basic_ops
        tanh.op_forward_save_ctx(basic_op_ctxs[0], input_, tensors_to_save)
        scale.op_forward_save_ctx(basic_op_ctxs[1], None, ())


def fuse(pipeline: list[Any], *, recipe: Any) -> list[Any]:
    """Return the operations of a pipeline with pairs replaced; `recipe` is None if nothing is quantized."""

    def fuse_pair(first: Any, second: Any) -> Any:
        is_pair = isinstance(first, ScaledTanh) and isinstance(second, ops.ConstantScale)
        return TanhScale([first, second]) if is_pair else None

    return replace_windows(pipeline, 2, fuse_pair)


def main(backend: str = "inductor") -> None:
    """Train a step in eager code and compiled, check the gradients against plain PyTorch, and print what was fused."""
    torch.manual_seed(0)
    ops.register_forward_fusion(fuse)
    model = ops.Sequential(
        ops.Linear(64, 128, device="cpu"), ScaledTanh(128), ops.ConstantScale(0.5), ops.Linear(128, 64, device="cpu")
    )
    x = torch.randn(32, 64)

    def gradients(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        call(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    def reference(x: torch.Tensor) -> torch.Tensor:
        up, tanh, scale, down = model
        hidden = torch.tanh(torch.nn.functional.linear(x, up.weight, up.bias) * tanh.weight) * scale.scale
        return torch.nn.functional.linear(hidden, down.weight, down.bias)

    eager = gradients(model)
    compiled = gradients(torch.compile(model, fullgraph=True, backend=backend))
    for got, again, expected in zip(eager, compiled, gradients(reference), strict=True):
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(again, expected)
    for side, pipelines in model.fused_ops().items():
        print(f"{side + ':':10}{', '.join(type(op).__name__ for op in pipelines[0])}")
    with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        error = (model(x) - reference(x)).norm() / reference(x).norm()
    print(f"gradients agree with PyTorch's; with linears in MXFP8 the output is {error:.1%} off")


if __name__ == "__main__":
    main(*sys.argv[1:])
