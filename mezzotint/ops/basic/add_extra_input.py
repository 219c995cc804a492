"""AddExtraInput: this operation adds an extra input to x, as at the end of a residual branch."""

from typing import Any

import torch

from mezzotint.kernels._lib import is_bare, run_op
from mezzotint.kernels.pointwise import add
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain
from mezzotint.region import current_state
from mezzotint.tracing import eager_only


class AddExtraInput(BasicOperation):
    """This operation computes x + extra, both of one shape, as at the end of a residual branch.

    The extra input is given to the pipeline beside x, or comes by a channel from an earlier operation
    (`set_extra_input_channel`).

    Args:
        in_place: Whether the result may take the memory of the extra input, which the caller must not read afterwards.
            An extra input that comes by a channel is read by others, too, and is not written to. The default is False.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> branch = ops.Sequential(ops.MakeExtraOutput(), ops.ReLU(), ops.AddExtraInput())
        >>> y, x_again = branch(torch.ones(4), torch.ones(4))
        >>> torch.equal(y, torch.full((4,), 2.0))
        True
    """

    num_extra_inputs = 1
    _keywords = ()
    _READS = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self._end_init()

    @property
    def writes(self) -> bool:
        """Return whether it may write to the memory of the extra input."""
        return self.in_place and not self._extra_input_channels

    def fuser_forward_compute(self, input_: Any, *, basic_op_extra_inputs: Any, **given: Any) -> Any:
        return add_extra(plain(input_), basic_op_extra_inputs[0][0], self.writes), [()], ()

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input_: Any, tensors_to_save: Any, **given: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        dy = plain(grad_output)
        return dy, [()], [(dy,)]

    def extra_repr(self) -> str:
        return f"in_place={self.in_place}"


def add_extra(x: torch.Tensor, extra: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Return round(x + extra). With `in_place` it takes the memory of `extra` in eager code; a graph plans its own
    memory.

    It does not in a checkpoint, which runs again with the same extra input, nor if the extra input is quantized.
    """
    if not isinstance(extra, torch.Tensor):
        raise TypeError(f"the extra input is {type(extra).__name__}: give a torch.Tensor")
    if extra.shape != x.shape:
        raise ValueError(f"the extra input has shape {tuple(extra.shape)}, the input {tuple(x.shape)}: give equal ones")
    if in_place and _may_write(extra, x):
        # A detached alias is written: it shares the version counter, so that autograd refuses a graph that still needs
        # the old values.
        return extra.detach().add_(x)
    return run_op(add, x, plain(extra))


@eager_only(in_graph=False)
def _may_write(extra: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether the sum fits the memory of `extra`. A graph plans its own memory."""
    if not is_bare(extra) or current_state().recomputation is not None:
        return False
    return extra.dtype == x.dtype and extra.is_contiguous()
