"""Forward of a linear and what follows it: these operations take in a bias, an activation, a scale, or the sum with an
extra input.

The bias is added inside the GEMM, before its result is rounded: there is one rounding where the operations one by one
round twice, so the result may differ from theirs by one unit in the last place. All else is the same arithmetic.
"""

from typing import Any

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import scale_add
from mezzotint.ops.basic.activation import Activation
from mezzotint.ops.basic.add_extra_input import AddExtraInput, add_extra
from mezzotint.ops.basic.basic_linear import BasicLinear
from mezzotint.ops.basic.bias import Bias
from mezzotint.ops.basic.constant_scale import ConstantScale
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import BasicOperation, FusibleOperation
from mezzotint.ops.quantizing import plain


class ForwardLinear(FusedOperation):
    """The base of the classes below: it runs BasicLinear, Bias if there is one, and what comes behind."""

    def __init__(self, linear: BasicLinear, bias: Bias | None, *rest: BasicOperation) -> None:
        super().__init__([linear, *([] if bias is None else [bias]), *rest])
        self._has_bias = bias is not None

    def _parts(self) -> tuple[Any, Any, list[Any]]:
        """Return the linear, the bias or None, and the operations behind them."""
        ops = list(self.basic_ops)
        return (ops[0], ops[1], ops[2:]) if self._has_bias else (ops[0], None, ops[1:])

    def _linear(self, input_: Any, run: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return y (…, out), and the one tensor that `BasicLinear.save` takes."""
        linear, bias, _ = self._parts()
        return linear.compute(input_, run, None if bias is None else bias.bias)

    def _behind(self, y: torch.Tensor, extra: Any, next_op_input_quantizer: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run the operations behind, and return the output and what the last of them saves. `extra` holds its extra
        inputs."""
        return y, ()

    def _save_behind(self, ctxs: list[OperationContext], tensors: tuple[Any, ...]) -> None:
        """Save what the backwards of the operations behind need; `tensors` are those that `_behind` returned."""

    def fuser_forward_compute(
        self,
        input_: Any,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> Any:
        extra = basic_op_extra_inputs[-1]
        y, saved = self._linear(input_, basic_op_kwargs[0]["run"])
        y, more = self._behind(y, extra, next_op_input_quantizer)
        return y, [() for _ in self.basic_ops], (*saved, *more)

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        tensors_to_save: Any,
        *,
        basic_op_kwargs: Any,
        **_: Any,
    ) -> None:
        linear, bias = self._parts()[:2]
        if basic_op_ctxs[0].requires_grad:
            linear.save(basic_op_ctxs[0], input_, tensors_to_save[:1], basic_op_kwargs[0]["run"])
        if bias is not None:
            bias.save(basic_op_ctxs[1])
        self._save_behind(basic_op_ctxs[1 if bias is None else 2 :], tensors_to_save[1:])


class ForwardLinearBiasActivation(ForwardLinear):
    """This operation computes linear + bias, and an activation if there is one, which hands its output over
    quantized."""

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, activation: Activation | None) -> None:
        super().__init__(linear, bias, *([] if activation is None else [activation]))

    def _behind(self, y: torch.Tensor, extra: Any, next_op_input_quantizer: Any) -> tuple[Any, tuple[Any, ...]]:
        for activation in self._parts()[2]:
            return activation.op_forward_compute(
                y, prev_op_grad_output_quantizer=None, next_op_input_quantizer=next_op_input_quantizer
            )
        return y, ()

    def _save_behind(self, ctxs: list[OperationContext], tensors: tuple[Any, ...]) -> None:
        for activation in self._parts()[2]:
            activation.save(ctxs[0], *tensors)


class ForwardLinearBiasAdd(ForwardLinear):
    """This operation computes linear (+ bias) + an extra input, whose memory may take the result."""

    def __init__(self, *, linear: BasicLinear, bias: Bias | None, add: AddExtraInput) -> None:
        super().__init__(linear, bias, add)

    def _behind(self, y: torch.Tensor, extra: Any, next_op_input_quantizer: Any) -> tuple[Any, tuple[Any, ...]]:
        return add_extra(y, extra[0], self._parts()[2][0].writes), ()


class ForwardLinearScaleAdd(ForwardLinear):
    """This operation computes linear · scale + an extra input, with scale and sum in one kernel."""

    def __init__(self, *, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__(linear, None, scale, add)

    def _behind(self, y: torch.Tensor, extra: Any, next_op_input_quantizer: Any) -> tuple[Any, tuple[Any, ...]]:
        if extra[0].shape != y.shape:
            raise ValueError(
                f"the extra input has shape {tuple(extra[0].shape)}, the input {tuple(y.shape)}: give equal ones"
            )
        return run_op(scale_add, y, self._parts()[2][0].scale, plain(extra[0])), ()

    def _save_behind(self, ctxs: list[OperationContext], tensors: tuple[Any, ...]) -> None:
        self._parts()[2][0].op_forward_save_ctx(ctxs[0], None, ())


def fuse_forward_linear_scale_add(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(linear: Any, scale: Any, add: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(scale, ConstantScale) and computes_as(add, AddExtraInput):
            return ForwardLinearScaleAdd(linear=linear, scale=scale, add=add)
        return None

    return replace_windows(ops, 3, fuse)


def fuse_forward_linear_bias_add(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(linear: Any, bias: Any, add: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(bias, Bias) and computes_as(add, AddExtraInput):
            return ForwardLinearBiasAdd(linear=linear, bias=bias, add=add)
        return None

    def fuse_without(linear: Any, add: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(add, AddExtraInput):
            return ForwardLinearBiasAdd(linear=linear, bias=None, add=add)
        return None

    return replace_windows(replace_windows(ops, 3, fuse), 2, fuse_without)


def fuse_forward_linear_bias_activation(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    def fuse(linear: Any, bias: Any, activation: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(bias, Bias) and computes_as(activation, Activation):
            return ForwardLinearBiasActivation(linear=linear, bias=bias, activation=activation)
        return None

    def fuse_without(linear: Any, bias: Any) -> FusibleOperation | None:
        if computes_as(linear, BasicLinear) and computes_as(bias, Bias):
            return ForwardLinearBiasActivation(linear=linear, bias=bias, activation=None)
        return None

    return replace_windows(replace_windows(ops, 3, fuse), 2, fuse_without)
