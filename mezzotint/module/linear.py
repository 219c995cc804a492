"""Linear: it computes y = x · Wᵀ + b, with its GEMMs quantized as the recipe in force says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.functional.autograd import run_core
from mezzotint.functional.linear import LINEAR, compute_weight_gradient, needs_of
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import start_run, weights_of
from mezzotint.layer.boundary import input_of_module, quantize_gradient
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.parameters import check_features, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.plan import Plan
from mezzotint.layer.rerun import rerun
from mezzotint.layer.run import (
    Delayed,
    KeptWeights,
    grad_state,
    linear_args,
    live_gradient,
    quantized_weights,
    record_amaxes,
    with_copies,
)
from mezzotint.layer.shared_input import shared_columns
from mezzotint.layer.weights import Weights
from mezzotint.layer.wgrad import WeightGradStore
from mezzotint.module.base import TransformerEngineBaseModule, outputs_of
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.quantize import quantize
from mezzotint.tracing import below_dynamo, inlined, make_again


@below_dynamo
@rerun(shares_input=True)
def run_linear(
    plan: Plan,
    x: torch.Tensor,
    columns: tuple[torch.Tensor, ...] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    delayed: Delayed | None = None,
    kept: KeptWeights | None = None,
    wgrads: tuple[tuple[Any, ...], ...] | None = None,
    probes: tuple[Probes, ...] | None = None,
) -> torch.Tensor:
    """Return y (…, N) of x (…, K), weight (N, K) and bias [N]. `columns` are the buffers of x's column-wise copy, if
    another linear has made it."""
    delayed = with_copies(delayed)
    (weight_q,), weight_amaxes = quantized_weights(plan, (weight,), delayed) if kept is None else kept
    wgrad = None if wgrads is None else live_gradient(wgrads, 0)
    args = linear_args(plan, 0, weight, bias, weight_q, delayed, wgrad, probes)
    args.x, args.grad_state = x, None if delayed is None else grad_state(plan, delayed)
    args.x_columns = None if columns is None else shared_columns(plan, x, columns)
    if args.input_again is not None:  # no norm or activation in front could make x again
        args.saves_original_input, args.input_again = True, None
        make_again(x)
    y, *amaxes = run_core(LINEAR, args, plan.has_backward)
    if delayed is not None:
        record_amaxes(plan, delayed, amaxes, weight_amaxes)
    return y


_run_linear_inlined = inlined(run_linear)


class Linear(TransformerEngineBaseModule):
    """This module computes y = x · Wᵀ + b, with its matrix products quantized as the recipe in force says.

    It has the signature of `transformer_engine.pytorch.Linear`, which is not that of `torch.nn.Linear`: the third
    positional argument is `sequence_parallel`, so give `bias=False` by name. `mezzotint.convert` replaces the
    `nn.Linear` layers of an existing model.

    A recipe says in which number format each tensor is multiplied, and the region `mezzotint.autocast` puts it in
    force. Inside of the region the input, the weight and the gradient of the output are quantized, and the three
    products of forward and backward are computed from that. Outside of any region the module computes in high
    precision, as `nn.Linear` does.

    The parameters are `weight` (out, in) and `bias` (out), as in `nn.Linear`, and weights of its state dicts load. The
    dtype of the computation is that of the input, or of `torch.autocast` if that is on: FP32 parameters with a BF16
    input are cast, compute in BF16, give a BF16 output and get FP32 gradients. `nn.Linear` refuses such a pair.

    Under tensor parallelism the arguments `in_features` and `out_features` are those of the whole weight; the
    attributes are those of this rank's shard. With `sequence_parallel` the gradients of a row-parallel bias, and of
    norms, come from this rank's tokens only: such parameters have the attribute `sequence_parallel`, and
    `mezzotint.distributed.reduce_gradients` sums them over the ranks.

    Args:
        in_features: The number of features of the input, which is the size of its last dimension. Under tensor
            parallelism this is the number of the whole weight.
        out_features: The number of features of the output. Under tensor parallelism this is the number of the whole
            weight.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks of `tp_group` as well. It has no effect when that group has one rank. The default is False.
        fuse_wgrad_accumulation: Whether backward adds the weight gradient to `weight.main_grad`, a tensor that the
            training program puts there, instead of returning it to autograd. The default is False.
        tp_group: The process group whose ranks share the weights (tensor parallelism), or None for a module that is not
            split.
        tp_size: The number of ranks that share the weights. Without a `tp_group` it says how large the group will be
            that `set_tensor_parallel_group` sets later. The default is 1.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers initial values are drawn, or None for PyTorch's own.
        rng_tracker_name: The name of the generator in that tracker, or None for the tracker's default.
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        bias: Whether there is a bias. The default is True.
        return_bias: Whether the bias is returned beside the output instead of being added to it. The default is False.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        parallel_mode: How the weight is split over the ranks of `tp_group`: "column" splits the output features, "row"
            splits the input features, and None (the default) splits nothing.
        parameters_split: Names of parts of the weight, as a tuple for equal parts or as a dict of names and sizes. Each
            part is then a parameter `<name>_weight` (and `<name>_bias`) of its own. The default None makes one
            `weight`.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        ub_overlap_ag: It must be False: Transformer Engine's overlap of the all-gather through user buffers does not
            exist here.
        ub_overlap_rs: It must be False: Transformer Engine's overlap of the reduce-scatter through user buffers does
            not exist here.
        ub_overlap_rs_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_wgrad: It must be False: this overlap for the weight gradient does not exist here.
        ub_name: A name that Transformer Engine gives to its user buffers. It is kept as an attribute and has no effect.
        delay_wgrad_compute: Whether backward leaves the weight gradient to a later call of `backward_dw()`. The default
            is False.
        symmetric_ar_type: It must be None: all-reduce over symmetric memory does not exist here.
        save_original_input: Whether forward keeps the input as it came for backward, instead of a quantized copy. That
            saves memory when another operation keeps the same input anyway. The default is False.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default" (a quantized copy of the input), "lean" (only what
            backward cannot compute again) or "compressed". None means what the region says.

    Raises:
        ValueError: If a size is not positive, does not divide over the ranks, or `parallel_mode` or `memory` is
            unknown.
        NotImplementedError: If an `ub_…` argument or `symmetric_ar_type` asks for user buffers.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(64, 32, bias=False, device="cpu")
        >>> x = torch.randn(2, 16, 64)
        >>> with mz.autocast("mxfp8"):
        ...     y = layer(x)
        >>> y.shape
        torch.Size([2, 16, 32])
        >>> y.sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([32, 64])
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__(name)
        self.memory = memory
        self.ub_name = ub_name  # kept because programs read it
        check_features(in_features=in_features, out_features=out_features)
        check_parallel(
            parallel_mode,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            symmetric_ar_type=symmetric_ar_type,
        )
        self._init_parallel(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.parallel_mode = parallel_mode
        weights = Weights(
            "",
            in_features,
            out_features,
            bias,
            parameters_split,
            init_method,
            parallel_mode=parallel_mode,
            tp_size=self.tp_size,
        )
        self.in_features, self.out_features = weights.in_features, weights.out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        device = resolve_device(device)
        weights.tracker, weights.tracker_name = get_rng_state_tracker, rng_tracker_name
        weights.register(self, device, resolve_dtype(params_dtype, dtype))
        self._weights = (weights,)
        self._init_state(1, device)
        if delay_wgrad_compute:
            self.wgrad_stores = (WeightGradStore(compute_weight_gradient),)
        self.reset_parameters(defer_init=device.type == "meta")

    def _config_fields(self) -> dict[str, Any]:
        return {**super()._config_fields(), "in_features": self.in_features, "makes_again": True}

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | Any:
        """Compute the output (…, out) of an input (…, in).

        Args:
            inp: The input (…, in), in high precision or quantized.
            is_first_microbatch: Whether this is the first microbatch of a step in which the weights do not change. None
                (the default) quantizes the weight at each call; True quantizes it and keeps the result; False uses what
                was kept.
            fp8_output: Whether the output is a quantized tensor. The default is False.
            fp8_grad: Whether the gradient of `inp` is a quantized tensor. The default is False.

        Returns:
            The output, or with `return_bias` the pair (output, bias).

        Raises:
            TypeError: If `inp` is no tensor.
            ValueError: If the last dimension of `inp` is not `in_features`.
        """
        config = config_of(self)
        x = input_of_module(inp, config.in_features, "inp")
        if config.is_parallel:
            self._check_parallel(inp)
        ((weight, bias),) = weights_of(self, config)
        dtype = x.dtype
        if fp8_grad:
            x = quantize_gradient(x, self, 0)
        added = None if config.return_bias else bias
        has_grad = torch.is_grad_enabled()
        needs = needs_of(
            has_grad and x.requires_grad,
            has_grad and weight.requires_grad,
            has_grad and added is not None and added.requires_grad,
        )
        call = start_run(self, config, dtype, (needs,), is_first_microbatch)
        if call.calibrates:
            self._calibrate((x,), (weight,))
        kept = self._kept(call, (weight,)) if call.caches else None
        wgrads = self._wgrads((weight,)) if config.accumulates else None
        run = run_linear if kept is None else _run_linear_inlined
        delayed = None if call.scales is None else delayed_of(self, call)
        y = run(call.plan, x, None, weight, added, delayed, kept, wgrads, call.probes)
        if fp8_output:
            y = quantize(y, self._boundary_quantizer(0, "output", call))
        return outputs_of(config, y, bias, dtype, None, None) if config.return_bias else y

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        quantized = formats_of(self.parameters())
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{quantized}"
