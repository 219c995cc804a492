"""AllGather, AllReduce, ReduceScatter: collectives of torch.distributed as operations, along the first dimension.

They are PyTorch's functional collectives, which compile. In a group of one process they are the identity.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives

from mezzotint.ops.op import BasicOperation, OperationContext
from mezzotint.ops.parallel import world_size
from mezzotint.ops.quantizing import plain

# By the names of torch 2.13 where it has them, else by those of 2.11.
_all_gather: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter: Any = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def _group(process_group: Any) -> Any:
    return torch.distributed.group.WORLD if process_group is None else process_group


def all_gather(x: Any, process_group: Any) -> Any:
    """(m, …) of each process → (m · processes, …)."""
    if world_size(process_group) == 1:
        return x
    made = _all_gather(plain(x).contiguous(), 0, _group(process_group))
    return collectives.wait_tensor(made)


def all_reduce(x: Any, process_group: Any) -> Any:
    """The sum over processes."""
    if world_size(process_group) == 1:
        return x
    return collectives.wait_tensor(collectives.all_reduce(plain(x).contiguous(), "sum", _group(process_group)))


def reduce_scatter(x: Any, process_group: Any) -> Any:
    """The sum over processes, (m, …); each gets its part, (m / processes, …)."""
    return x if world_size(process_group) == 1 else collectives.wait_tensor(start_reduce_scatter(x, process_group))


def start_reduce_scatter(x: Any, process_group: Any) -> torch.Tensor:
    """The same, not waited for."""
    count = world_size(process_group)
    x = plain(x).contiguous()
    if x.shape[0] % count:
        raise ValueError(f"input has shape {tuple(x.shape)}: {count} processes must divide its first dimension")
    return _reduce_scatter(x, "sum", 0, _group(process_group))


class _Collective(BasicOperation):
    _keywords = ()

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = world_size(process_group)

    def _collect(self, x: Any) -> Any:
        raise NotImplementedError

    def _collect_gradient(self, dy: Any) -> Any:
        raise NotImplementedError

    def op_forward_compute(self, input_: Any, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        return self._collect(input_), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], **given: Any
    ) -> None:
        pass

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return self._collect_gradient(grad_output), ()


class AllGather(_Collective):
    """The inputs of all processes, one below the other; their gradients are summed and scattered."""

    def _collect(self, x: Any) -> Any:
        return all_gather(x, self.process_group)

    def _collect_gradient(self, dy: Any) -> Any:
        return reduce_scatter(dy, self.process_group)


class ReduceScatter(_Collective):
    """The sum of all processes' inputs, of which each gets its rows; gradients are gathered."""

    def _collect(self, x: Any) -> Any:
        return reduce_scatter(x, self.process_group)

    def _collect_gradient(self, dy: Any) -> Any:
        return all_gather(dy, self.process_group)


class AllReduce(_Collective):
    """The sum of all processes' inputs; of their gradients, too, if `reduce_in_backward`."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward

    def _collect(self, x: Any) -> Any:
        return all_reduce(x, self.process_group)

    def _collect_gradient(self, dy: Any) -> Any:
        return all_reduce(dy, self.process_group) if self.reduce_in_backward else dy
