"""Two grouped linears with an activation between them: this operation runs them as one, for a mixture of experts.

The activation hands each group of rows over quantized, forward to the second linear and backward to the first, with the
bias gradients. The arithmetic is that of the operations one by one.
"""

from typing import Any

from mezzotint.functional.activation import (
    ActivationBwdArgs,
    ActivationFwdArgs,
    activation_gradient,
    activation_gradient_quantized,
    activation_quantized,
    scales_gradient,
)
from mezzotint.functional.grouped_linear import grouped_linear_forward
from mezzotint.kernels._lib import as_matrix
from mezzotint.layer.bind import of_module
from mezzotint.ops.basic.activation import Activation, ScaledActivation, check_row_scales
from mezzotint.ops.basic.grouped_linear import GroupedLinear
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fusion import computes_as, replace_windows
from mezzotint.ops.op import FusibleOperation
from mezzotint.ops.quantizing import plain
from mezzotint.recipe import MixedRecipe


class GroupedMLP(FusedOperation):
    """This operation runs GroupedLinear, an activation (with or without the scales of a router), and GroupedLinear."""

    def __init__(self, *, fc1: GroupedLinear, activation: Activation, fc2: GroupedLinear) -> None:
        super().__init__([fc1, activation, fc2])

    def fuser_forward_compute(
        self, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **given: Any
    ) -> Any:
        fc1, activation, fc2 = self._ops()
        (splits1,), scales, (splits2,) = basic_op_extra_inputs
        run1, run2 = basic_op_kwargs[0]["run"], basic_op_kwargs[2]["run"]
        args1 = fc1.args(plain(input_), splits1, run1)
        hidden, made = grouped_linear_forward(args1)
        run1.deliver(hidden.view(*input_.shape[:-1], hidden.shape[1]))
        fc1.enter_inputs(run1, made.amaxes)
        for scale in scales:
            check_row_scales(scale, input_.shape[:-1])
        # This slice only has the shape of the activation's output; fc2's x is made below, group by group.
        args2 = fc2.args(hidden[:, : activation.output_width(hidden)], splits2, run2)
        quantizers = [q.input for q in args2.quantizers]
        act = ActivationFwdArgs(
            x=hidden,
            name=activation.activation,
            params=activation.params,
            grad_state=None,
            scales=scales[0] if scales else None,
        )
        xs_q, amaxes = [], []
        for group, part in enumerate(_split(act, args2.splits)):
            x_q, amax = activation_quantized(part, quantizers[group], args2.input_scales[group])
            xs_q.append(x_q)
            amaxes.append(amax)
        fc2.enter_inputs(run2, amaxes)
        args2.xs_q = tuple(xs_q)
        y, _ = grouped_linear_forward(args2)
        return run2.deliver(y.view(*input_.shape[:-1], y.shape[1])), [(), (), ()], (*made.xs_q, hidden, *xs_q)

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        tensors_to_save: Any,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
        **given: Any,
    ) -> None:
        fc1, activation, fc2 = self._ops()
        (splits1,), scales, (splits2,) = basic_op_extra_inputs
        count = fc1.num_groups
        hidden = tensors_to_save[count]
        run1, run2 = basic_op_kwargs[0]["run"], basic_op_kwargs[2]["run"]
        args1 = fc1.args(plain(input_), splits1, run1)
        args2 = fc2.args(hidden[:, : fc2.in_features], splits2, run2)
        if basic_op_ctxs[0].requires_grad:
            fc1.save(basic_op_ctxs[0], run1, args1, tensors_to_save[:count])
        activation.save(basic_op_ctxs[1], hidden, *scales)
        fc2.save(basic_op_ctxs[2], run2, args2, tensors_to_save[count + 1 :])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        fc1, _, fc2 = self._ops()
        da, grads2 = fc2.gradients(basic_op_ctxs[2], plain(grad_output))
        da = as_matrix(da)
        hidden, *scales = basic_op_ctxs[1].saved_tensors
        saved1 = basic_op_ctxs[0].saved_tensors[0]
        ctx = basic_op_ctxs[1]
        act = ActivationBwdArgs(hidden, ctx.activation, ctx.params, scales[0] if scales else None)
        if saved1.quantizers[0].grad_output is None:  # only biases need gradients: no product needs a quantized dy
            dx, grads1 = fc1.gradients(basic_op_ctxs[0], activation_gradient(act, da))
        else:
            dx, grads1 = self._gradients(fc1, basic_op_ctxs[0], act, da, grad_output.shape[:-1])
        extra = (scales_gradient(act, da),) if scales else ()
        return dx, [grads1, (), grads2], [(None,), extra, (None,)]

    def _gradients(
        self, fc1: Any, ctx: OperationContext, act: ActivationBwdArgs, da: Any, leading: Any
    ) -> tuple[Any, Any]:
        """Return the gradients of the first linear, for which the activation's gradient is made quantized, group by
        group."""
        saved = ctx.saved_tensors[0]
        dys_q, dbs, amaxes = [], [], []
        for group, (part, dy) in enumerate(zip(_split(act, saved.splits), da.split(list(saved.splits)), strict=True)):
            dtype = saved.bias_dtypes[group] if saved.needs.bias else None
            dy_q, amax, db = activation_gradient_quantized(
                part, dy, saved.quantizers[group].grad_output, saved.grad_scales[group], dtype
            )
            dys_q.append(dy_q)
            dbs.append(db)
            amaxes.append(amax)
        return fc1.gradients_of(ctx, tuple(dys_q), tuple(dbs), amaxes, leading)

    def _ops(self) -> tuple[Any, Any, Any]:
        fc1, activation, fc2 = self.basic_ops
        return fc1, activation, fc2


def _split(act: Any, splits: tuple[int, ...]) -> list[Any]:
    """Return the arguments of the activation for each group of rows."""
    xs = act.x.split(list(splits))
    scales = [None] * len(xs) if act.scales is None else act.scales.reshape(-1).split(list(splits))
    return [type(act)(x, act.name, act.params, scales=s) for x, s in zip(xs, scales, strict=True)]


def _is_quantized_through(linear: Any, recipe: Any) -> bool:
    """Return whether a linear multiplies only quantized tensors. If backward computes on others, the activation has to
    write an unquantized one."""
    own = of_module(linear, recipe)
    if own is None or isinstance(own, MixedRecipe):
        return False
    return own.override() is None and not own.keeps_wgrad()


def fuse_grouped_mlp(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    if recipe is None:
        return ops

    def fuse(fc1: Any, activation: Any, fc2: Any) -> FusibleOperation | None:
        if not (computes_as(fc1, GroupedLinear) and computes_as(fc2, GroupedLinear)):
            return None
        if not (_is_quantized_through(fc1, recipe) and _is_quantized_through(fc2, recipe)):
            return None
        if not computes_as(activation, Activation, ScaledActivation) or activation.cache_quantized_input:
            return None
        if activation.glu_interleave_size is not None or fc1.num_groups != fc2.num_groups:
            return None
        if fc1.scale_bias or fc2.scale_bias:
            return None
        return GroupedMLP(fc1=fc1, activation=activation, fc2=fc2)

    return replace_windows(ops, 3, fuse)
