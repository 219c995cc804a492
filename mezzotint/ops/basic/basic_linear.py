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
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.layer.base import start_run
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import with_grad_state
from mezzotint.layer.names import plain_path
from mezzotint.layer.parameters import check_features, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.run import RunSettings
from mezzotint.layer.weights import Weights
from mezzotint.ops.op import BasicOperation, OperationContext, Run
from mezzotint.ops.quantizing import delayed, enter, holds, plain
from mezzotint.recipe import slot
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.storage import QuantizedTensorStorage


class LinearRun(Run):
    """A `LinearRun` is one run of a linear: it holds its weight as the GEMMs take it, and what its neighbours may
    quantize with."""

    __slots__ = ("grad_output", "input", "weight_q")

    def __init__(self, call: RunSettings, weight_q: Any, input_: Any, grad_output: Any) -> None:
        super().__init__(call)
        self.weight_q, self.input, self.grad_output = weight_q, input_, grad_output


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

    def _begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> LinearRun:
        if kwargs:
            raise TypeError(f"BasicLinear got the keyword arguments {sorted(kwargs)}: it takes is_first_microbatch")
        self.pre_fuser_forward(requires_grad=requires_grad)
        weight = self.weight
        needs = needs_of(requires_grad and input_requires_grad, requires_grad and weight.requires_grad, False)
        call = with_grad_state(self, start_run(self, config_of(self), weight.dtype, (needs,), is_first_microbatch))
        weights_q, amaxes = self._weights_q(call, (weight,))
        enter_weights(self, call, amaxes)
        args = self._linear_args(call, 0, weight, None, weights_q[0])
        # Neighbours must not quantize tensors that backward or an inspector reads unquantized, or that are shards.
        input_, grad_output = None, None
        is_alone = args.parallel is None and args.probes is None
        if is_alone and not keeps_input(args, 0):
            input_ = delayed(self, call, 0, "input", args.quantizers.input)
        if is_alone and not (args.numerics.keeps_wgrad and needs.weight):
            grad_output = delayed(self, call, 0, "grad_output", args.quantizers.grad_output)
        return LinearRun(call, weights_q[0], input_, grad_output)

    def _args(self, input_: Any, run: LinearRun, bias: torch.Tensor | None) -> LinearFwdArgs:
        features = self.local_in_features
        if len(input_.shape) < 1 or input_.shape[-1] != features:
            raise ValueError(f"input has shape {tuple(input_.shape)}: its last dimension must be {features}")
        args = self._linear_args(run.call, 0, self.weight, bias, run.weight_q)
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
            enter(delayed(self, run.call, 0, "input", args.quantizers.input), made.amax)
        return (made.x_q if isinstance(made.x_q, QuantizedTensorStorage) else None,)

    def save(self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], run: LinearRun) -> None:
        """Save what backward needs."""
        made = LinearMade(tensors_to_save[0], None)
        ctx.save_for_backward(linear_setup(self._args(input_, run, None), made))
        ctx.grad_output_quantizer = delayed(self, run.call, 0, "grad_output", run.call.plan.quantizers[0].grad_output)

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


def enter_weights(op: Any, call: RunSettings, amaxes: Sequence[torch.Tensor | None]) -> None:
    """Enter the amaxes of the weights into delayed scaling's history."""
    slots = [slot(gemm, "weight") for gemm, amax in enumerate(amaxes) if amax is not None]
    if call.records and slots:
        with torch.no_grad():
            run_op(delayed_saw_, op.amax_history_fwd, [amax for amax in amaxes if amax is not None], slots)
