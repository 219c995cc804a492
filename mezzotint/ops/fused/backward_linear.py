"""Backward of a linear with what stands before or behind it: the arithmetic is that of the operations one by one."""

from typing import Any

from mezzotint.ops.basic.basic_linear import BasicLinear
from mezzotint.ops.basic.constant_scale import ConstantScale
from mezzotint.ops.basic.make_extra_output import MakeExtraOutput, add_gradient
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import FusibleOperation


class BackwardLinearAdd(FusedOperation):
    """This operation is the backward of MakeExtraOutput and BasicLinear: it adds the gradient of the extra output to
    the linear's dx."""

    def __init__(self, *, backward_add: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([backward_add, linear])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        _, linear = self.basic_ops
        dx, grads = linear.op_backward(basic_op_ctxs[1], grad_output)  # type: ignore[operator]
        return add_gradient(dx, basic_op_grad_extra_outputs[0][0]), [(), grads], [(), ()]


class BackwardLinearScale(FusedOperation):
    """This operation is the backward of BasicLinear and ConstantScale: it scales the gradient, then runs the linear's
    backward."""

    def __init__(self, *, scale: ConstantScale, linear: BasicLinear) -> None:
        super().__init__([linear, scale])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        linear, scale = self.basic_ops
        dy, _ = scale.op_backward(basic_op_ctxs[1], grad_output)  # type: ignore[operator]
        dx, grads = linear.op_backward(basic_op_ctxs[0], dy)  # type: ignore[operator]
        return dx, [grads, ()], [(), ()]


def fuse_backward_linear_add(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(make_extra: Any, linear: Any) -> FusibleOperation | None:
        if computes_as(make_extra, MakeExtraOutput) and make_extra.in_place and computes_as(linear, BasicLinear):
            return BackwardLinearAdd(backward_add=make_extra, linear=linear)
        return None

    return replace_windows(ops, 2, fuse)


def fuse_backward_linear_scale(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(linear: Any, scale: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(scale, ConstantScale):
            return BackwardLinearScale(scale=scale, linear=linear)
        return None

    return replace_windows(ops, 2, fuse)
