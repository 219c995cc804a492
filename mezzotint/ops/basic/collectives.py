"""AllGather, AllReduce, ReduceScatter: these are collectives of torch.distributed as operations, along the first
dimension.

In a group of one rank they are the identity.
"""

from typing import Any, ClassVar

from mezzotint.comm.collectives import all_gather, all_reduce, reduce_scatter
from mezzotint.comm.groups import world_size
from mezzotint.ops.context import OperationContext, used
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain


class _Collective(BasicOperation):
    _keywords = ()
    _READS: ClassVar[tuple[str, ...]] = ("process_group", "process_group_size")

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = world_size(process_group)
        self._end_init()

    def _collect(self, x: Any) -> Any:
        raise NotImplementedError

    def _collect_gradient(self, ctx: OperationContext, dy: Any) -> Any:
        raise NotImplementedError

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return self._collect(input_), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        ctx.process_group = self.process_group

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return self._collect_gradient(ctx, grad_output), ()


class AllGather(_Collective):
    """This operation returns the inputs of all ranks, one below the other; their gradients are summed and scattered.

    Args:
        process_group: The process group whose ranks take part. None means all ranks. With one rank the operation is the
            identity.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> x = torch.randn(4, 8)
        >>> torch.equal(ops.AllGather()(x), x)  # one rank alone
        True
    """

    def _collect(self, x: Any) -> Any:
        return all_gather(plain(x), self.process_group)

    def _collect_gradient(self, ctx: OperationContext, dy: Any) -> Any:
        return reduce_scatter(plain(dy), used(ctx, self, "process_group"))


class ReduceScatter(_Collective):
    """This operation sums the inputs of all ranks, of which each rank gets its share of the rows; gradients are
    gathered.

    Args:
        process_group: The process group whose ranks take part. None means all ranks. With one rank the operation is the
            identity.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> x = torch.randn(4, 8)
        >>> torch.equal(ops.ReduceScatter()(x), x)  # one rank alone
        True
    """

    def _collect(self, x: Any) -> Any:
        return reduce_scatter(plain(x), self.process_group)

    def _collect_gradient(self, ctx: OperationContext, dy: Any) -> Any:
        return all_gather(plain(dy), used(ctx, self, "process_group"))


class AllReduce(_Collective):
    """This operation sums the inputs of all ranks.

    Args:
        process_group: The process group whose ranks take part. None means all ranks. With one rank the operation is the
            identity.
        reduce_in_backward: Whether gradients are summed over the ranks, too. The default is True.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> x = torch.randn(4, 8)
        >>> torch.equal(ops.AllReduce()(x), x)  # one rank alone
        True
    """

    _READS = (*_Collective._READS, "reduce_in_backward")
    reduce_in_backward = True

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def _collect(self, x: Any) -> Any:
        return all_reduce(plain(x), self.process_group)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        super().op_forward_save_ctx(ctx, input_, tensors_to_save, **given)
        ctx.reduce_in_backward = self.reduce_in_backward

    def _collect_gradient(self, ctx: OperationContext, dy: Any) -> Any:
        return all_reduce(plain(dy), used(ctx, self, "process_group")) if used(ctx, self, "reduce_in_backward") else dy
