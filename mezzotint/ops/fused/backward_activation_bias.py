"""Backward of an activation and the bias before it: one kernel gives the gradient, quantized, and its column sums."""

from typing import Any

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.ops.basic.activation import Activation
from mezzotint.ops.basic.bias import Bias
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import FusibleOperation


class BackwardActivationBias(FusedOperation):
    """This operation is the backward of a bias and an activation behind an operation that takes its gradient
    quantized."""

    def __init__(self, *, bias: Bias, activation: Activation) -> None:
        super().__init__([bias, activation])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        activation = self.basic_ops[1]
        bias_ctx, activation_ctx = basic_op_ctxs
        dtype = bias_ctx.bias_dtype
        quantizer = bias_ctx.prev_op_grad_output_quantizer
        dx, db, _ = activation.gradient(activation_ctx, grad_output, quantizer, dtype)  # type: ignore[operator]
        if dtype is not None and db is None:
            db = run_op(column_sum, dx, dtype)
        return dx, [(db,), ()], [(), ()]


def fuse_backward_activation_bias(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    if recipe is None:
        return ops

    def fuse(bias: Any, activation: Any) -> FusibleOperation | None:
        if computes_as(bias, Bias) and computes_as(activation, Activation):
            return BackwardActivationBias(bias=bias, activation=activation)
        return None

    return replace_windows(ops, 2, fuse)
