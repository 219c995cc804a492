"""Forward of a linear whose result is summed over ranks: one part is summed while the next is computed.

The result (M, N) is cut into parts of columns, which are rows of the weight. A part's reduce-scatter is started as soon
as its product is there, and all of them are waited for at the end. Each element is computed as in one piece; on a CPU
another size of product may sum in another order, which can change the last bit.
"""

from typing import Any

import torch

from mezzotint.comm.collectives import start_reduce_scatter, wait
from mezzotint.functional.linear import LinearFwdArgs, LinearMade, linear_forward, shaped
from mezzotint.ops.basic.basic_linear import BasicLinear
from mezzotint.ops.basic.bias import Bias
from mezzotint.ops.basic.collectives import ReduceScatter
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused.forward_linear_bias import ForwardLinear
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import FusibleOperation
from mezzotint.tensor.storage import QuantizedTensorStorage

PARTS = 4
ALIGNMENT = 128  # a multiple of every format's block size


class ForwardLinearReduceScatter(ForwardLinear):
    """This operation computes linear (+ bias) and a ReduceScatter, overlapped."""

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, reduce_scatter: ReduceScatter) -> None:
        super().__init__(linear, bias, reduce_scatter)

    def _linear(self, input_: Any, run: Any) -> tuple[Any, tuple[Any, ...]]:
        linear, bias, (reduce_scatter,) = self._parts()
        args = linear._args(input_, run, None if bias is None else bias.bias)
        started: list[torch.Tensor] = []
        made: LinearMade | None = None
        for part in cut(args, linear.local_out_features):
            if made is not None:  # the first part has quantized the input
                part.x_q = made.x_q
            y, latest = linear_forward(part)
            made = latest if made is None else made
            y = shaped(y, input_, args.parallel)
            started.append(start_reduce_scatter(y, reduce_scatter.process_group))
        assert made is not None
        finished = [wait(part) for part in started]
        return torch.cat(finished, -1), linear.made(run, args, made)

    def _save_behind(self, ctxs: list[OperationContext], tensors: tuple[Any, ...]) -> None:
        self._parts()[2][0].op_forward_save_ctx(ctxs[0], None, ())


def cut(args: LinearFwdArgs, features: int) -> list[LinearFwdArgs]:
    """Return the arguments of each part; of only one part if the weight cannot be cut."""
    width = -(-features // (PARTS * ALIGNMENT)) * ALIGNMENT
    parts: list[LinearFwdArgs] = []
    for start in range(0, features, width):
        stop = min(start + width, features)
        weight = rows_of(args.weight_q, start, stop)
        if weight is None:
            return [args]
        bias = None if args.bias is None else args.bias[start:stop]
        parts.append(
            LinearFwdArgs(
                x=args.x,
                weight=args.weight,
                bias=bias,
                x_q=args.x_q,
                weight_q=weight,
                needs=args.needs,
                quantizers=args.quantizers,
                numerics=args.numerics,
                wgrad=args.wgrad,
                input_scale=args.input_scale,
                grad_scale=args.grad_scale,
                saves_original_input=args.saves_original_input,
                grad_state=None,
                parallel=args.parallel,
            )
        )
    return parts


def rows_of(weight: Any, start: int, stop: int) -> Any:
    """Return rows of a weight as the forward GEMM takes it, or None if its format has no such part."""
    if not isinstance(weight, QuantizedTensorStorage):
        return weight[start:stop]
    rowwise = weight.keep(rowwise=True, columnwise=False)
    fields = rowwise._rows(start, stop)
    if fields is None:
        return None
    shape = (stop - start, weight.shape[1])
    return type(rowwise)._build(shape, rowwise._dtype, {**rowwise.get_metadata(), **fields})


def fuse_forward_linear_reduce_scatter(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(linear: Any, bias: Any, reduce_scatter: Any) -> FusibleOperation | None:
        if not (computes_as(linear, BasicLinear) and computes_as(bias, Bias) and _overlaps(reduce_scatter)):
            return None
        return ForwardLinearReduceScatter(linear=linear, bias=bias, reduce_scatter=reduce_scatter)

    def fuse_without(linear: Any, reduce_scatter: Any) -> FusibleOperation | None:
        if not (computes_as(linear, BasicLinear) and _overlaps(reduce_scatter)):
            return None
        return ForwardLinearReduceScatter(linear=linear, bias=None, reduce_scatter=reduce_scatter)

    return replace_windows(replace_windows(ops, 3, fuse), 2, fuse_without)


def _overlaps(op: Any) -> bool:
    return computes_as(op, ReduceScatter) and op.process_group_size > 1
