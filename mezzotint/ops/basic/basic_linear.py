"""BasicLinear: this operation computes x · Wᵀ, without bias, by the functional linear."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mezzotint.comm.groups import is_initialized
from mezzotint.compat.basic_linear import functional_backward, functional_forward
from mezzotint.functional.linear import (
    LinearBwdArgs,
    LinearFwdArgs,
    LinearMade,
    Numerics,
    keeps_input,
    linear_backward,
    linear_forward,
    linear_setup,
    needs_of,
    shaped,
)
from mezzotint.functional.weight import as_storage
from mezzotint.layer.base import start_run
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.names import plain_path
from mezzotint.layer.parameters import check_features, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.run import linear_args, live_gradient, quantized_weights, record_amaxes
from mezzotint.layer.weights import Weights
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import enter, holds, plain
from mezzotint.ops.run import Run, Start
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.storage import QuantizedTensorStorage


class LinearRun(Run):
    """A `LinearRun` is one run of a linear: it holds its weight as the GEMMs take it, where the weight gradient goes,
    and what its neighbours may quantize with."""

    __slots__ = ("grad_output", "input", "probes", "weight_q", "wgrad")

    def __init__(self, start: Start, weight: Any) -> None:
        super().__init__(start)
        self.probes = start.probes
        self.wgrad = None if start.wgrads is None else live_gradient(start.wgrads, 0)
        (self.weight_q,) = weights_of_run(self, start, (weight,))
        self.input = self.grad_output = None


def weights_of_run(run: Run, start: Start, weights: Sequence[Any]) -> tuple[Any, ...]:
    """Return the weights as the GEMMs take them; their amaxes enter delayed scaling's history."""
    weights_q, amaxes = quantized_weights(run.plan, weights, run.delayed) if start.kept is None else start.kept
    record_amaxes(run.plan, run.delayed, (None,) * len(amaxes), amaxes)
    return weights_q


class BasicLinear(BasicOperation):
    """This operation computes x (…, in) · `weight` (out, in)ᵀ, quantized as the recipe in force says.

    A run takes the keyword argument `is_first_microbatch`, as `mezzotint.Linear` does.

    Args:
        in_features: The number of features of the input, over all ranks.
        out_features: The number of features of the output, over all ranks.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        tensor_parallel_mode: How the weight is split over ranks: "column" splits the output features, "row" the input
            features, and None (the default) nothing.
        tensor_parallel_group: The process group whose ranks share the weight. None means all ranks if there is a
            `tensor_parallel_mode`.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over these
            ranks as well. The default is False.
        rng_state_tracker_function: A function without arguments that returns a `CudaRNGStatesTracker`, from whose
            random numbers initial values are drawn, or None for PyTorch's own.
        accumulate_into_main_grad: Whether backward adds the weight gradient to `weight.main_grad`, a tensor that the
            training program puts there, instead of returning it to autograd. The default is False.
        userbuffers_options: It must be None: Transformer Engine's user buffers do not exist here.

    Raises:
        ValueError: If a size is not positive, does not divide over the ranks, or the mode is unknown.
        NotImplementedError: If `userbuffers_options` are given.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> linear = mz.ops.BasicLinear(64, 32, device="cpu")
        >>> with mz.autocast("mxfp8"):
        ...     y = linear(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 32])
    """

    weight: torch.nn.Parameter
    _takes_run = True
    _parameter_names = ("weight",)
    _READS = ("local_in_features", "local_out_features", "sequence_parallel", "tp_size", "_modes")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_features(in_features=in_features, out_features=out_features)
        check_parallel(tensor_parallel_mode, userbuffers_options=userbuffers_options)
        if tensor_parallel_mode is not None and tensor_parallel_group is None and is_initialized():
            tensor_parallel_group = torch.distributed.group.WORLD
        self._init_parallel(tensor_parallel_group, 1, sequence_parallel, tensor_parallel_mode)
        self.in_features, self.out_features = in_features, out_features
        self.tensor_parallel_mode, self.tensor_parallel_group = tensor_parallel_mode, self.tp_group
        self.tensor_parallel_size = self.tp_size
        self.fuse_wgrad_accumulation = accumulate_into_main_grad
        device = resolve_device(device)
        split: dict[str, Any] = {"parallel_mode": tensor_parallel_mode, "tp_size": self.tp_size}
        weights = Weights("", in_features, out_features, False, None, None, **split)
        self.local_in_features, self.local_out_features = weights.in_features, weights.out_features
        weights.tracker = rng_state_tracker_function
        weights.register(self, device, resolve_dtype(dtype))
        del self._parameters["bias"]  # the bias is an operation of its own
        self._weights = (weights,)
        self._init_state(1, device)
        self.reset_parameters(defer_init=device.type == "meta")

    def _take_path(self, path: str) -> None:
        """Set the path as the name; in an `ops.Linear` it is that of the operation whose weight this is, as in the
        state dict."""
        super()._take_path(plain_path(path))

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    # Quantizers

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def _tensor(self, mode: str, index: int) -> tuple[int, str]:
        return 0, ("input", "weight")[index] if mode == "forward" else "grad_output"

    def _input_quantizer(self, run: LinearRun) -> Any:
        return run.input

    def _grad_output_quantizer(self, run: LinearRun) -> Any:
        return run.grad_output

    # One run

    def _check_others(self, input_: torch.Tensor) -> None:
        self._check_ranks(input_)

    def _start(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> Start:
        if kwargs:
            raise TypeError(f"BasicLinear got the keyword arguments {sorted(kwargs)}: it takes is_first_microbatch")
        config, weight = config_of(self), self.weight
        needs = needs_of(requires_grad and input_requires_grad, requires_grad and weight.requires_grad, False)
        call = start_run(self, config, weight.dtype, (needs,), is_first_microbatch)
        return Start(
            call.plan,
            None if call.scales is None else delayed_of(self, call),
            self._kept(call, (weight,)) if call.caches else None,
            self._wgrads((weight,)) if config.accumulates else None,
            call.probes,
        )

    def _begin(self, start: Start) -> LinearRun:
        run = LinearRun(start, self.weight)
        args = self._linear_args_of(run, None)
        # Neighbours must not quantize tensors that backward or an inspector reads unquantized, or that are shards.
        is_alone = args.parallel is None and args.probes is None
        if is_alone and not keeps_input(args, 0):
            run.input = run.quantizer(0, "input", args.quantizers.input)
        if is_alone and not (args.numerics.keeps_wgrad and args.needs.weight):
            run.grad_output = run.quantizer(0, "grad_output", args.quantizers.grad_output)
        return run

    def _linear_args_of(self, run: LinearRun, bias: torch.Tensor | None) -> LinearFwdArgs:
        """Return the arguments of the functional core, without x."""
        return linear_args(run.plan, 0, self.weight, bias, run.weight_q, run.delayed, run.wgrad, run.probes)

    def _args(self, input_: Any, run: LinearRun, bias: torch.Tensor | None) -> LinearFwdArgs:
        features = self.local_in_features
        if len(input_.shape) < 1 or input_.shape[-1] != features:
            raise ValueError(f"input has shape {tuple(input_.shape)}: its last dimension must be {features}")
        args = self._linear_args_of(run, bias)
        args.numerics = in_dtype(args.numerics, input_.dtype)
        quantizer = args.quantizers.input
        if not isinstance(input_, QuantizedTensorStorage):
            args.x = input_
        elif args.parallel is None and quantizer is not None and holds(input_, quantizer) and not keeps_input(args, 0):
            args.x_q = as_storage(input_)
        else:
            args.x = plain(input_)
        return args

    def compute(self, input_: Any, run: LinearRun, bias: torch.Tensor | None = None) -> tuple[Any, tuple[Any, ...]]:
        """Return (…, out), with the bias added before it is rounded, and what `save` takes."""
        self._check_tokens(input_)
        args = self._args(input_, run, bias)
        y, made = linear_forward(args)
        return shaped(y, input_, args.parallel), self.made(run, args, made)

    def made(self, run: LinearRun, args: LinearFwdArgs, made: LinearMade) -> tuple[Any, ...]:
        """Enter the amax of the input into delayed scaling's history, and return the quantized input, which `save`
        takes."""
        if made.amax is not None:
            enter(run.quantizer(0, "input", args.quantizers.input), made.amax)
        return (made.x_q if isinstance(made.x_q, QuantizedTensorStorage) else None,)

    def save(self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], run: LinearRun) -> None:
        """Save what backward needs."""
        made = LinearMade(tensors_to_save[0], None)
        ctx.save_for_backward(linear_setup(self._args(input_, run, None), made))
        ctx.grad_output_quantizer = run.quantizer(0, "grad_output", run.plan.quantizers[0].grad_output)

    def op_forward_compute(
        self, input_: Any, *, run: LinearRun, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any, **_: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        return self.compute(input_, run)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: tuple[Any, ...],
        *,
        run: LinearRun,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **_: Any,
    ) -> None:
        self.save(ctx, input_, tensors_to_save, run)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        saved: LinearBwdArgs = ctx.saved_tensors[0]
        # A weight gradient in high precision reads dy itself, even if an operation behind quantized it on its own.
        keeps_wgrad = saved.numerics.keeps_wgrad and saved.needs.weight
        is_own = keeps_wgrad or saved.parallel is not None
        dy, dy_q = plain_or_quantized(grad_output, None if is_own else saved.quantizers.grad_output)
        dx, dw, _, amax = linear_backward(saved, dy, dy_q)
        enter(ctx.grad_output_quantizer, amax)
        return dx, (dw,)

    _functional_forward = staticmethod(functional_forward)
    _functional_backward = staticmethod(functional_backward)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}{formats_of(self.parameters())}"


def plain_or_quantized(grad_output: Any, quantizer: Any) -> tuple[Any, Any]:
    """Return dy in high precision, or as the operation behind quantized it for this one; the other of the two is
    None."""
    if not isinstance(grad_output, QuantizedTensorStorage):
        return grad_output, None
    if quantizer is not None and holds(grad_output, quantizer):
        return None, as_storage(grad_output)
    return plain(grad_output), None


def in_dtype(numerics: Numerics, dtype: torch.dtype) -> Numerics:
    """Return the numerics with another dtype of activations."""
    if numerics.dtype == dtype:
        return numerics
    return Numerics(
        dtype=dtype,
        fast_fprop=numerics.fast_fprop,
        fast_dgrad=numerics.fast_dgrad,
        fast_wgrad=numerics.fast_wgrad,
        override=numerics.override,
        keeps_wgrad=numerics.keeps_wgrad,
    )
