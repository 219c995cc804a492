"""LayerNormLinear: it is a norm and a linear; the norm hands its output over quantized."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.functional.autograd import run_core
from mezzotint.functional.layernorm_linear import LAYERNORM_LINEAR, LayerNormLinearFwdArgs
from mezzotint.functional.linear import Needs, compute_weight_gradient
from mezzotint.functional.norm import NormOptions, Residual
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import activation_dtype, weights_of
from mezzotint.layer.boundary import dequantized, quantize_gradient
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.norm import (
    Branch,
    check_normalization,
    need_grad,
    norm_parameters,
    register_norm,
    reset_norm,
    resolve_branch,
)
from mezzotint.layer.parameters import check_features, check_module_input, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.plan import NormInFront, Plan
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
from mezzotint.tensor.checks import check_epsilon
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.quantize import quantize
from mezzotint.tracing import below_dynamo, inlined


@below_dynamo
def run_layernorm_linear(
    plan: Plan,
    norm: NormInFront,
    residual: Residual | None,
    inputs: tuple[Any, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    delayed: Delayed | None = None,
    kept: KeptWeights | None = None,
    wgrads: tuple[tuple[Any, ...], ...] | None = None,
    probes: tuple[Probes, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return y (…, N), then the norm's output and the residual stream if they are asked for.

    `inputs` holds x (…, K); the branch that is added to it, and that branch's bias, or None; gamma and beta of the
    norm.
    """
    x, branch, branch_bias, gamma, beta = inputs
    (weight_q,), weight_amaxes = quantized_weights(plan, (weight,), delayed) if kept is None else kept
    args = LayerNormLinearFwdArgs(
        x=x,
        branch=branch,
        branch_bias=branch_bias,
        gamma=gamma,
        beta=beta,
        weight=weight,
        bias=bias,
        norm=norm.options,
        linear=linear_args(plan, 0, weight, bias, weight_q, delayed, live_gradient(wgrads, 0), probes),
        returns_norm=norm.is_returned,
        gathers_norm=norm.is_gathered,
        residual=residual,
        grad_state=grad_state(plan, delayed),
    )
    outputs = run_core(LAYERNORM_LINEAR, args, plan.has_backward)
    count = 1 + norm.is_returned + (residual is not None)
    record_amaxes(plan, delayed, outputs[count:], weight_amaxes)
    return outputs[:count]


_run_inlined = inlined(run_layernorm_linear)


class LayerNormLinear(TransformerEngineBaseModule):
    """This module computes `Linear(norm(x))` and hands the norm's output over quantized.

    Its parameters are `layer_norm_weight`, `layer_norm_bias` (not for RMSNorm), `weight` and `bias`. `normalization` is
    "LayerNorm" or "RMSNorm". With `return_layernorm_output` the norm's output is returned too, and with
    `return_layernorm_output_gathered` for the tokens of all ranks. The other options are those of `Linear`.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
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
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.eps = check_epsilon(eps, "eps")
        self.rms = check_normalization(normalization)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        device, dtype = resolve_device(device), resolve_dtype(params_dtype, dtype)
        register_norm(self, "layer_norm_", self.in_features, self.rms, device, dtype)
        weights.tracker = get_rng_state_tracker
        weights.register(self, device, dtype)
        self._weights = (weights,)
        self._init_state(1, device)
        if delay_wgrad_compute:
            self.wgrad_stores = (WeightGradStore(compute_weight_gradient),)
        self.reset_parameters(defer_init=device.type == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            reset_norm(self, "layer_norm_", self.zero_centered_gamma)
        super().reset_parameters(defer_init)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        _branch: Branch | None = None,
    ) -> torch.Tensor | Any:
        """Compute (…, out)[, bias][, norm's output][, inp + _branch] from `inp` (…, in); the arguments are those of
        `Linear.forward`."""
        config = self._config.read()
        check_module_input(inp, config.in_features)
        if config.is_parallel:
            self._check_parallel(inp)
        ((weight, bias),) = weights_of(self, config)
        gamma, beta = norm_parameters(self, "layer_norm_")
        dtype = activation_dtype(inp)
        x = dequantized(inp).to(dtype)
        if fp8_grad:
            x = quantize_gradient(x, self, 0)
        added = None if config.return_bias else bias
        branch, branch_bias, residual = resolve_branch(_branch)
        has_grad = torch.is_grad_enabled()
        needs = Needs(
            need_grad(x, branch, branch_bias, gamma, beta),
            has_grad and weight.requires_grad,
            has_grad and added is not None and added.requires_grad,
        )
        call = self._start(dtype, (needs,), is_first_microbatch)
        kept = self._kept(call, (weight,)) if call.caches else None
        wgrads = self._wgrads((weight,)) if config.accumulates else None
        run = run_layernorm_linear if kept is None else _run_inlined
        norm = NormInFront(self._norm_options(), config.return_layernorm_output or call.calibrates, config.gathers_norm)
        outputs = list(
            run(
                call.plan,
                norm,
                residual,
                (x, branch, branch_bias, gamma, beta),
                weight,
                added,
                delayed_of(self, call),
                kept,
                wgrads,
                call.probes,
            )
        )
        y = outputs.pop(0)
        norm_out = outputs.pop(0) if norm.is_returned else None
        stream = None if residual is None else outputs.pop(0)
        if call.calibrates:
            self._calibrate((norm_out,), (weight,))
        if fp8_output:
            y = quantize(y, self._boundary_quantizer(0, "output", call))
        return self._outputs(y, bias, dtype, norm_out, stream)

    def _norm_options(self) -> NormOptions:
        norm = self._config.read().norm
        assert norm is not None
        return norm

    def _config_fields(self) -> dict[str, Any]:
        norm = NormOptions(self.eps, self.zero_centered_gamma, self.rms)
        return {**super()._config_fields(), "in_features": self.in_features, "norm": norm, "makes_again": True}

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}{formats_of(self.parameters())}"
        )
