"""Bias: this operation computes x + b."""

from typing import Any

import torch
from torch import nn

from mezzotint.comm.groups import local_size
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.pointwise import add
from mezzotint.layer.parameters import check_features, check_module_input, resolve_device, resolve_dtype
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class Bias(BasicOperation):
    """This operation computes x (…, size) + `bias` [size].

    Args:
        size: The number of features, over all ranks.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        tensor_parallel: Whether this rank holds its shard of the bias. The default is False.
        tensor_parallel_group: The process group whose ranks share the bias. None means all ranks.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> ops.Bias(8, device="cpu")(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    bias: nn.Parameter
    _keywords = ()
    _parameter_names = ("bias",)
    _READS = ("local_size",)

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        check_features(size=size)
        self.size = size
        self.local_size = local_size("size", size, tensor_parallel_group) if tensor_parallel else size
        if tensor_parallel:
            self._init_parallel(tensor_parallel_group, 1, False, "column")
        device = resolve_device(device)
        self.bias = nn.Parameter(torch.empty(self.local_size, device=device, dtype=resolve_dtype(dtype)))
        self.reset_parameters(defer_init=device.type == "meta")
        self._end_init()

    def reset_parameters(self, defer_init: bool = False) -> None:
        if defer_init:
            return
        if self.bias.is_meta:
            self.bias = nn.Parameter(torch.empty_like(self.bias, device=resolve_device(None)), self.bias.requires_grad)
        nn.init.zeros_(self.bias)

    def _split_parameters(self) -> dict[str, tuple[int, int]]:
        return {"bias": (0, 1)} if self._modes else {}

    def pre_first_fuser_forward(self) -> None:
        if self.bias.is_meta:
            self.reset_parameters()

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        x = plain(input_)
        check_module_input(x, self.local_size, "input")
        return run_op(add, x, self.bias), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        self.save(ctx)

    def save(self, ctx: OperationContext) -> None:
        """Save the dtype of the bias's gradient, or None if that is not wanted. The parameters are asked, because what
        is computed from them in here needs no gradient."""
        ctx.bias_dtype = self.bias.dtype if any(param.requires_grad for param in self.parameters()) else None

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        dy = plain(grad_output)
        dtype = getattr(ctx, "bias_dtype", self.bias.dtype)  # a user's fused forward may not save it
        return dy, (None if dtype is None else run_op(column_sum, dy, dtype),)

    def extra_repr(self) -> str:
        return f"{self.size}"
