"""L2Normalization: this operation computes x / sqrt(Σ x² + eps) over the last dimension."""

from typing import Any

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import l2norm, l2norm_backward
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain
from mezzotint.tensor.checks import check_epsilon


class L2Normalization(BasicOperation):
    """This operation computes x / sqrt(Σ x² + eps) over the last dimension.

    Args:
        eps: A small number that is added before the square root is taken. The default is 1e-6.
        seq_length: It is accepted for compatibility and has no effect.
        micro_batch_size: It is accepted for compatibility and has no effect.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> y = ops.L2Normalization()(torch.randn(4, 16))
        >>> torch.allclose(y.square().sum(-1), torch.ones(4))
        True
    """

    _keywords = ()
    _READS = ("eps",)

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = check_epsilon(eps, "eps")
        self._end_init()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        x = plain(input_)
        y, rs = run_op(l2norm, x, self.eps)
        return y, (x, rs)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        x, rs = ctx.saved_tensors
        return run_op(l2norm_backward, plain(grad_output), x, rs), ()

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
