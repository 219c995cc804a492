"""Backward of a norm and of the branch before it: one kernel computes the norm's dx and adds the gradient of the extra
output."""

from typing import Any

from mezzotint.functional.norm import norm_gradients
from mezzotint.ops.basic.make_extra_output import MakeExtraOutput
from mezzotint.ops.basic.normalization import LayerNorm, Normalization, RMSNorm
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import FusibleOperation
from mezzotint.ops.quantizing import plain


class BackwardAddRMSNorm(FusedOperation):
    """This operation is the backward of MakeExtraOutput and RMSNorm (or LayerNorm): it computes round(round(dx of the
    norm) + gradient of the extra output)."""

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm | LayerNorm) -> None:
        super().__init__([add, rmsnorm])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        norm: Any = self.basic_ops[1]
        saved = norm.backward_args(basic_op_ctxs[1])
        shape, extra = saved.x.shape, basic_op_grad_extra_outputs[0][0]
        residual = None if extra is None else extra.reshape(shape)
        dx, dgamma, dbeta = norm_gradients(saved, plain(grad_output).reshape(shape), residual)
        dx = dx.view(basic_op_ctxs[1].saved_tensors[0].shape)
        return dx, [(), norm.param_gradients(basic_op_ctxs[1], dgamma, dbeta)], [(), ()]


def fuse_backward_add_rmsnorm(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(add: Any, norm: Any) -> FusibleOperation | None:
        if computes_as(add, MakeExtraOutput) and not add.in_place and computes_as(norm, Normalization):
            return BackwardAddRMSNorm(add=add, rmsnorm=norm)
        return None

    return replace_windows(ops, 2, fuse)
