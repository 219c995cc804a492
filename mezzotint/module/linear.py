"""Linear: it computes y = x · Wᵀ + b, with its GEMMs quantized as the recipe in force says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.functional.autograd import run_core
from mezzotint.functional.linear import LINEAR, Needs, compute_weight_gradient
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import activation_dtype, weights_of
from mezzotint.layer.boundary import dequantized, quantize_gradient
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.parameters import check_features, check_module_input, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.plan import Plan
from mezzotint.layer.run import (
    Delayed,
    KeptWeights,
    grad_state,
    linear_args,
    live_gradient,
    quantized_weights,
    record_amaxes,
)
from mezzotint.layer.weights import Weights
from mezzotint.layer.wgrad import WeightGradStore
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.quantize import quantize
from mezzotint.tracing import below_dynamo, inlined, make_again


@below_dynamo
def run_linear(
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    delayed: Delayed | None = None,
    kept: KeptWeights | None = None,
    wgrads: tuple[tuple[Any, ...], ...] | None = None,
    probes: tuple[Probes, ...] | None = None,
) -> torch.Tensor:
    """Return y (…, N) of x (…, K), weight (N, K) and bias [N]."""
    (weight_q,), weight_amaxes = quantized_weights(plan, (weight,), delayed) if kept is None else kept
    args = linear_args(plan, 0, weight, bias, weight_q, delayed, live_gradient(wgrads, 0), probes)
    args.x, args.grad_state = x, grad_state(plan, delayed)
    if args.input_again is not None:  # no norm or activation in front could make x again
        args.saves_original_input, args.input_again = True, None
        make_again(x)
    y, *amaxes = run_core(LINEAR, args, plan.has_backward)
    record_amaxes(plan, delayed, amaxes, weight_amaxes)
    return y


_run_linear_inlined = inlined(run_linear)


class Linear(TransformerEngineBaseModule):
    """This module computes y = x · Wᵀ + b, and has the signature of `transformer_engine.pytorch.Linear`.

    That is not the signature of `nn.Linear`: the third positional argument is `sequence_parallel`, so give `bias=False`
    by name; `mezzotint.convert` replaces the layers of an existing model. Parameters have the names and shapes of
    `nn.Linear`, `weight` (out, in) and `bias`, or are `<name>_weight`, `<name>_bias` for the names in
    `parameters_split`; weights of state dicts load either way.

    `params_dtype`, or `dtype` as torch calls it, is the dtype of the parameters, by default torch's. The dtype of the
    computation is that of the input, or of `torch.autocast` if that is on: FP32 parameters with a BF16 input are cast,
    compute in BF16, give a BF16 output and get FP32 gradients. `nn.Linear` refuses such a pair.

    `fuse_wgrad_accumulation` adds the weight gradient to `weight.main_grad`. `return_bias` leaves the bias out and
    returns it. `delay_wgrad_compute` leaves the weight gradient to `backward_dw()`. `save_original_input` saves the
    input as it came instead of a quantized copy, for inputs that are saved elsewhere anyway. `memory` says how much is
    held for backward, "default", "lean" or "compressed" (`mezzotint/memory.py`); None means as the region says.

    `parallel_mode` "column" (out) or "row" (in) splits the weight over the ranks of `tp_group`, and `sequence_parallel`
    the first dimension of the tensors that are then whole (`functional/tensor_parallel.py`). The arguments
    `in_features` and `out_features` are those of the whole weight; the attributes are those of this rank. With
    `sequence_parallel` the gradients of a row-parallel bias, and of norms, come from this rank's tokens only: such
    parameters have the attribute `sequence_parallel`, and `mezzotint.distributed.reduce_gradients` sums them.
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
        """Compute the output (…, out) of `inp` (…, in); with `return_bias` return (output, bias).

        `is_first_microbatch`: None quantizes the weight at each call; True quantizes and keeps it; False uses what was
        kept. `fp8_output` makes the output a quantized tensor, `fp8_grad` the gradient of `inp`.
        """
        config = self._config.read()
        check_module_input(inp, config.in_features)
        if config.is_parallel:
            self._check_parallel(inp)
        ((weight, bias),) = weights_of(self, config)
        dtype = activation_dtype(inp)
        x = dequantized(inp).to(dtype)
        if fp8_grad:
            x = quantize_gradient(x, self, 0)
        added = None if config.return_bias else bias
        has_grad = torch.is_grad_enabled()
        needs = Needs(
            has_grad and x.requires_grad,
            has_grad and weight.requires_grad,
            has_grad and added is not None and added.requires_grad,
        )
        call = self._start(dtype, (needs,), is_first_microbatch)
        if call.calibrates:
            self._calibrate((x,), (weight,))
        kept = self._kept(call, (weight,)) if call.caches else None
        wgrads = self._wgrads((weight,)) if config.accumulates else None
        run = run_linear if kept is None else _run_linear_inlined
        y = run(call.plan, x, weight, added, delayed_of(self, call), kept, wgrads, call.probes)
        if fp8_output:
            y = quantize(y, self._boundary_quantizer(0, "output", call))
        return self._outputs(y, bias, dtype) if config.return_bias else y

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        quantized = formats_of(self.parameters())
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}{quantized}"
