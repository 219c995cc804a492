"""LayerNormLinear: it is a norm and a linear; the norm hands its output over quantized."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.functional.autograd import run_core
from mezzotint.functional.layernorm_linear import LAYERNORM_LINEAR, LayerNormLinearFwdArgs
from mezzotint.functional.linear import compute_weight_gradient, needs_of
from mezzotint.functional.norm import NormOptions, Residual
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import start_run, weights_of
from mezzotint.layer.boundary import input_of_module, quantize_gradient
from mezzotint.layer.configured import config_of
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
from mezzotint.layer.parameters import check_features, check_parallel, resolve_device, resolve_dtype
from mezzotint.layer.plan import LayerConfig, NormInFront, Plan
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
from mezzotint.layer.weights import Weights
from mezzotint.layer.wgrad import WeightGradStore
from mezzotint.module.base import TransformerEngineBaseModule, outputs_of
from mezzotint.tensor.checks import check_epsilon
from mezzotint.tensor.printing import formats_of
from mezzotint.tensor.quantize import quantize
from mezzotint.tracing import below_dynamo, inlined


@below_dynamo
@rerun()
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
    delayed = with_copies(delayed)
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
    """This module computes `Linear(norm(x))`, and the norm hands its output over to the product already quantized.

    Its parameters are `layer_norm_weight`, `layer_norm_bias` (not for RMSNorm), `weight` and `bias`. The bits of its
    result are those of the norm and the `Linear` one after the other.

    Args:
        in_features: The number of features of the input, which is the size of its last dimension. Under tensor
            parallelism this is the number of the whole weight.
        out_features: The number of features of the output. Under tensor parallelism this is the number of the whole
            weight.
        eps: A small number that the norm adds to the variance before it takes the square root. The default is 1e-5.
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
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        bias: Whether there is a bias. The default is True.
        normalization: Which norm it is: "LayerNorm" (the default) or "RMSNorm".
        return_bias: Whether the bias is returned beside the output instead of being added to it. The default is False.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        parallel_mode: How the weight is split over the ranks of `tp_group`: "column" splits the output features, "row"
            splits the input features, and None (the default) splits nothing.
        return_layernorm_output: Whether the output of the norm is returned as well. The default is False.
        return_layernorm_output_gathered: Whether the output of the norm is returned for the tokens of all ranks, which
            matters with `sequence_parallel`. The default is False.
        parameters_split: Names of parts of the weight, as a tuple for equal parts or as a dict of names and sizes. Each
            part is then a parameter `<name>_weight` (and `<name>_bias`) of its own. The default None makes one
            `weight`.
        zero_centered_gamma: Whether the norm's weight is stored minus one, so that its initial value is 0. The default
            is False.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        ub_overlap_ag: It must be False: Transformer Engine's overlap of the all-gather through user buffers does not
            exist here.
        ub_overlap_rs: It must be False: Transformer Engine's overlap of the reduce-scatter through user buffers does
            not exist here.
        ub_overlap_rs_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_wgrad: It must be False: this overlap for the weight gradient does not exist here.
        ub_bulk_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_name: A name that Transformer Engine gives to its user buffers. It is kept as an attribute and has no effect.
        delay_wgrad_compute: Whether backward leaves the weight gradient to a later call of `backward_dw()`. The default
            is False.
        symmetric_ar_type: It must be None: all-reduce over symmetric memory does not exist here.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default", "lean" (only what backward cannot compute again) or
            "compressed" (lean, and the input of an MLP's activation in FP8). None means what the region says.

    Raises:
        ValueError: If a size is not positive, does not divide over the ranks, or `normalization`, `parallel_mode` or
            `memory` is unknown.
        NotImplementedError: If an `ub_…` argument or `symmetric_ar_type` asks for user buffers.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.LayerNormLinear(64, 32, normalization="RMSNorm", device="cpu")
        >>> with mz.autocast("mxfp8"):
        ...     y = layer(torch.randn(16, 64))
        >>> y.shape
        torch.Size([16, 32])
        >>> [name for name, _ in layer.named_parameters()]
        ['layer_norm_weight', 'weight', 'bias']
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
        """Compute the output (…, out) of an input (…, in).

        Args:
            inp: The input (…, in), in high precision or quantized.
            is_first_microbatch: Whether this is the first microbatch of a step in which the weights do not change. None
                (the default) quantizes the weight at each call; True quantizes it and keeps the result; False uses what
                was kept.
            fp8_output: Whether the output is a quantized tensor. The default is False.
            fp8_grad: Whether the gradient of `inp` is a quantized tensor. The default is False.

        Returns:
            The output; or a tuple of it, the bias (with `return_bias`) and the norm's output (with
            `return_layernorm_output`), in this order. If `TransformerLayer` gives a `_branch`, its sum with `inp` comes
            last.
        """
        config = config_of(self)
        x = input_of_module(inp, config.in_features, "inp")
        if config.is_parallel:
            self._check_parallel(inp)
        ((weight, bias),) = weights_of(self, config)
        gamma, beta = norm_parameters(self, "layer_norm_")
        dtype = x.dtype
        if fp8_grad:
            x = quantize_gradient(x, self, 0)
        added = None if config.return_bias else bias
        branch, branch_bias, residual = resolve_branch(_branch)
        needs = needs_of(need_grad(x, branch, branch_bias, gamma, beta), need_grad(weight), need_grad(added))
        call = start_run(self, config, dtype, (needs,), is_first_microbatch)
        kept = self._kept(call, (weight,)) if call.caches else None
        wgrads = self._wgrads((weight,)) if config.accumulates else None
        run = run_layernorm_linear if kept is None else _run_inlined
        norm = NormInFront(
            self._norm_options(config), config.return_layernorm_output or call.calibrates, config.gathers_norm
        )
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
        return outputs_of(config, y, bias, dtype, norm_out, stream)

    def _norm_options(self, config: LayerConfig) -> NormOptions:
        assert config.norm is not None
        return config.norm

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
