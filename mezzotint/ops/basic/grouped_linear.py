"""GroupedLinear: this operation applies one linear to each group of rows, like the experts of a mixture."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.functional.autograd import enter_amaxes
from mezzotint.functional.grouped_linear import (
    GroupedLinearBwdArgs,
    GroupedLinearFwdArgs,
    GroupedLinearMade,
    as_parameters,
    group_tensors,
    grouped_linear_backward,
    grouped_linear_forward,
    grouped_linear_setup,
    is_stack,
)
from mezzotint.functional.linear import needs_of
from mezzotint.kernels._lib import as_matrix, run_op
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.kernels.grouped_bias import scaled_bias, scaled_bias_backward
from mezzotint.layer.base import start_run
from mezzotint.layer.buffers import write_result
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.grouped import GroupedLayer, GroupWeights
from mezzotint.layer.parameters import check_features, resolve_device, resolve_dtype
from mezzotint.layer.run import grouped_linear_args
from mezzotint.layer.splits import check_rows, resolve_splits
from mezzotint.ops.basic.activation import check_row_scales
from mezzotint.ops.basic.basic_linear import in_dtype, weights_of_run
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import plain
from mezzotint.ops.run import Run, Start
from mezzotint.recipe import slot
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.storage import QuantizedTensorStorage

# These are keyword arguments of a run (`op_kwargs` of `Sequential`): tensors of the caller that take its results.
OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


class GroupedRun(Run):
    """A `GroupedRun` is one run of a grouped linear, with the caller's tensors for the output and for the gradient of
    the input."""

    __slots__ = ("grad_input", "output", "probes", "weights_q", "wgrads")

    def __init__(self, start: Start, weights: tuple[Any, ...]) -> None:
        super().__init__(start)
        self.probes, self.wgrads = start.probes, start.wgrads
        self.weights_q = weights_of_run(self, start, group_tensors(weights, 2))
        self.output, self.grad_input = start.given

    def deliver(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output, in the caller's tensor if there is one."""
        return write_result(OUTPUT_BUFFER_KEY, self.output, y)


class GroupedLinear(GroupedLayer, BasicOperation):
    """This operation applies `num_groups` linear layers to consecutive groups of rows, as the experts of a
    mixture-of-experts layer need it.

    The parameters are `weight0`, `bias0`, `weight1` and so on; or one parameter holds those of all groups: `weight`
    (groups, out, in) with `single_grouped_weight`, `bias` (groups, out) with `single_grouped_bias`.

    The extra input is the number of rows of each group, as a list or a tensor. A tensor is read, which waits for the
    GPU if it is there; under `torch.compile` give a list, or set `torch._dynamo.config.capture_scalar_outputs`.

    A run takes the keyword arguments `is_first_microbatch`, as `mezzotint.Linear` does, and `output` and `grad_input`,
    tensors of the caller, (…, out) and (…, in), into which the output and the gradient of the input are written.

    Args:
        num_groups: The number of linear layers, which is the number of groups of rows.
        in_features: The number of features of the input.
        out_features: The number of features of the output.
        bias: Whether each linear layer has a bias. The default is True.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        rng_state_tracker_function: A function without arguments that returns a `CudaRNGStatesTracker`, from whose
            random numbers initial values are drawn, or None for PyTorch's own.
        accumulate_into_main_grad: Whether backward adds the weight gradient to `weight.main_grad`, a tensor that the
            training program puts there, instead of returning it to autograd. The default is False.
        single_grouped_weight: Whether one parameter `weight` holds the weights of all groups. The default is False.
        single_grouped_bias: Whether one parameter `bias` holds the biases of all groups. The default is False.
        delay_wgrad_compute: Whether backward leaves the weight gradients to a later call of `backward_dw()`. The
            default is False.
        scale_bias: Whether a second extra input multiplies the bias of each row. The default is False.

    Raises:
        ValueError: If a size is not positive, or `scale_bias` is True without a bias.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> experts = ops.GroupedLinear(2, 16, 8, device="cpu")
        >>> experts(torch.randn(6, 16), [4, 2]).shape
        torch.Size([6, 8])
    """

    module_type = "grouped_linear"
    num_extra_inputs = 1
    _takes_run = True
    _READS = (
        *("num_groups", "num_gemms", "num_extra_inputs", "in_features", "use_bias", "scale_bias"),
        *("_weight_names", "_bias_names", "_order"),
    )

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__()
        check_features(num_groups=num_groups, in_features=in_features, out_features=out_features)
        if scale_bias and not bias:
            raise ValueError("scale_bias=True with bias=False: there is no bias to scale")
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.use_bias, self.scale_bias = bias, scale_bias
        self.num_extra_inputs = 2 if scale_bias else 1
        self.fuse_wgrad_accumulation = accumulate_into_main_grad
        device = resolve_device(device)
        stacks = {"stacks_weight": single_grouped_weight, "stacks_bias": single_grouped_bias}
        weights = tuple(
            [GroupWeights(i, num_groups, in_features, out_features, bias, None, **stacks) for i in range(num_groups)]
        )
        for group in weights:
            group.tracker = rng_state_tracker_function
        self._init_groups(weights, device, resolve_dtype(dtype), delay_wgrad_compute)

    @property
    def has_bias(self) -> bool:
        """Return whether a bias is added."""
        return self.use_bias

    def _inner_name(self, gemm: int) -> str:
        return str(gemm)

    def pre_first_fuser_forward(self) -> None:
        if any(param.is_meta for param in self.parameters()):
            self.reset_parameters()

    def _tensor_names(self) -> tuple[str, ...]:
        return self._order

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        return self.num_groups * (2 if mode == "forward" else 1)

    def _tensor(self, mode: str, index: int) -> tuple[int, str]:
        if mode == "backward":
            return index, "grad_output"
        return index // 2, ("input", "weight")[index % 2]

    def _input_quantizer(self, run: GroupedRun) -> Any:
        return None  # each group of rows has its own quantizer

    def _grad_output_quantizer(self, run: GroupedRun) -> Any:
        return None

    # One run

    def _read_extra_input(self, index: int, value: Any) -> Any:
        return resolve_splits(value, self.num_groups) if index == 0 else value

    def _start(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        is_first_microbatch: bool | None = None,
        output: torch.Tensor | None = None,
        grad_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Start:
        if kwargs:
            raise TypeError(
                f"GroupedLinear got the keyword arguments {sorted(kwargs)}: it takes is_first_microbatch, output and "
                "grad_input"
            )
        config, (weights, biases) = config_of(self), self._group_parameters()
        needs = needs_of(
            requires_grad and input_requires_grad,
            requires_grad and any(weight.requires_grad for weight in weights),
            requires_grad and not self.scale_bias and any(bias.requires_grad for bias in biases),
        )
        call = start_run(self, config, weights[0].dtype, (needs,) * self.num_groups, is_first_microbatch)
        return Start(
            call.plan,
            None if call.scales is None else delayed_of(self, call),
            self._kept(call, group_tensors(weights, 2)) if call.caches else None,
            tuple([each.fields() for each in self._weight_grads(weights)]) if config.accumulates else None,
            call.probes,
            (output, grad_input),
        )

    def _begin(self, start: Start) -> GroupedRun:
        return GroupedRun(start, self._group_parameters()[0])

    def args(self, x: torch.Tensor, split_sizes: Any, run: GroupedRun) -> GroupedLinearFwdArgs:
        """Return the arguments of the functional core for x (…, in)."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {tuple(x.shape)}: its last dimension must be {self.in_features}")
        splits = resolve_splits(split_sizes, self.num_groups)
        x = as_matrix(x)
        check_rows(splits, x.shape[0])
        weights, biases = self._group_parameters()
        args = grouped_linear_args(
            run.plan,
            x,
            weights,
            () if self.scale_bias else biases,
            run.weights_q,
            splits,
            run.delayed,
            run.wgrads,
            run.probes,
        )
        args.numerics, args.grad_state = in_dtype(args.numerics, x.dtype), run.grad_state
        return args

    def enter_inputs(self, run: GroupedRun, amaxes: Any) -> None:
        """Enter the amaxes of each group's input into delayed scaling's history."""
        slots = [slot(group, "input") for group, amax in enumerate(amaxes) if amax is not None]
        if slots and run.delayed is not None and run.delayed.records:
            run_op(delayed_saw_, run.delayed.history, [amax for amax in amaxes if amax is not None], slots)

    def fuser_forward_compute(
        self, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **given: Any
    ) -> Any:
        run = basic_op_kwargs[0]["run"]
        args = self.args(plain(input_), basic_op_extra_inputs[0][0], run)
        y, made = grouped_linear_forward(args)
        self.enter_inputs(run, made.amaxes)
        if self.scale_bias:
            scales = basic_op_extra_inputs[0][1]
            check_row_scales(scales, input_.shape[:-1])
            biases = group_tensors(self._group_parameters()[1], 1)
            y = run_op(scaled_bias, y, scales.reshape(-1), list(biases), list(args.splits))
        quantized = tuple([x if isinstance(x, QuantizedTensorStorage) else None for x in made.xs_q])
        return run.deliver(y.view(*input_.shape[:-1], y.shape[1])), [()], quantized

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
        run = basic_op_kwargs[0]["run"]
        args = self.args(plain(input_), basic_op_extra_inputs[0][0], run)
        scaled = (basic_op_extra_inputs[0][1], *self._group_parameters()[1]) if self.scale_bias else ()
        self.save(basic_op_ctxs[0], run, args, tensors_to_save, *scaled)

    def save(
        self,
        ctx: OperationContext,
        run: GroupedRun,
        args: GroupedLinearFwdArgs,
        xs_q: tuple[Any, ...],
        *scaled: torch.Tensor,
    ) -> None:
        """Save what backward needs; with `scale_bias`, `scaled` holds the scales and the biases."""
        ctx.save_for_backward(grouped_linear_setup(args, GroupedLinearMade(xs_q, ())), *scaled)
        ctx.grad_state, ctx.grad_input = args.grad_state, run.grad_input

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ctx, dy = basic_op_ctxs[0], plain(grad_output)
        saved, *scaled = ctx.saved_tensors
        if not scaled:
            dx, grads = self.gradients(ctx, dy)
            return dx, [grads], [(None,)]
        scales, biases = scaled[0], tuple(scaled[1:])
        each = list(group_tensors(biases, 1))
        ds, *dbs = run_op(scaled_bias_backward, as_matrix(dy), scales.reshape(-1), each, list(saved.splits))
        dx, grads = self.gradients(ctx, dy, as_parameters(tuple(dbs), is_stack(biases, 1)))
        return dx, [grads], [(None, ds.view(scales.shape))]

    def gradients(
        self, ctx: OperationContext, dy: torch.Tensor, dbs: tuple[Any, ...] = ()
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return dx, and the parameters' gradients in their order; `dbs` are those of biases that are added
        elsewhere."""
        saved: GroupedLinearBwdArgs = ctx.saved_tensors[0]
        (dx, dws, own), amaxes = grouped_linear_backward(saved, as_matrix(dy))
        return self._finish(ctx, (dx, dws, dbs or own), amaxes[::2], dy.shape[:-1])

    def gradients_of(
        self, ctx: OperationContext, dys_q: tuple[Any, ...], dbs: tuple[Any, ...], amaxes: Any, leading: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return what `gradients` does, for groups of dy that a producer has quantized."""
        saved: GroupedLinearBwdArgs = ctx.saved_tensors[0]
        grads, _ = grouped_linear_backward(saved, None, dys_q, dbs if saved.bias_dtypes else ())
        return self._finish(ctx, grads, amaxes, leading)

    def _finish(self, ctx: OperationContext, grads: Any, amaxes: Any, leading: Any) -> tuple[Any, tuple[Any, ...]]:
        slots = [slot(group, "grad_output") for group, amax in enumerate(amaxes) if amax is not None]
        if slots:
            seen = [amax for amax in amaxes if amax is not None]
            enter_amaxes(ctx.grad_state, ctx.grad_state.history, seen, slots)
        dx, dws, dbs = grads
        if dx is not None:
            dx = write_result(GRAD_INPUT_BUFFER_KEY, ctx.grad_input, dx.view(*leading, dx.shape[1]))
        return dx, self._in_order(dws, dbs)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{formats_of(self.parameters())}"
        )
