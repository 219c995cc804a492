"""LayerNormMLP: it is norm, linear, activation, linear; each hands its output over quantized."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.comm.groups import shard_size
from mezzotint.functional.activation import ActivationFwdArgs, activate, is_gated, resolve_activation
from mezzotint.functional.autograd import run_core
from mezzotint.functional.layernorm_mlp import LAYERNORM_MLP, LayerNormMLPFwdArgs
from mezzotint.functional.linear import compute_weight_gradient, needs_of
from mezzotint.functional.norm import NormFwdArgs, NormOptions, Residual, norm_forward
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import start_run, weights_of
from mezzotint.layer.boundary import input_of_module
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
from mezzotint.layer.parameters import (
    PlaceParameter,
    check_features,
    check_parallel,
    resolve_device,
    resolve_dtype,
)
from mezzotint.layer.plan import LayerConfig, Plan
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
from mezzotint.recipe import QuantizerRole, Recipe
from mezzotint.tensor.checks import check_epsilon
from mezzotint.tensor.printing import formats_of
from mezzotint.tracing import below_dynamo, inlined


@below_dynamo
@rerun()
def run_layernorm_mlp(
    plan: Plan,
    config: LayerConfig,
    residual: Residual | None,
    inputs: tuple[Any, ...],
    linears: tuple[Any, ...],
    delayed: Delayed | None = None,
    kept: KeptWeights | None = None,
    wgrads: tuple[tuple[Any, ...], ...] | None = None,
    probes: tuple[Probes, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return y (…, hidden), then the norm's output and the residual stream if they are asked for.

    `inputs` is as in `run_layernorm_linear`; `linears` holds the weight and bias of fc1, then those of fc2.
    """
    x, branch, branch_bias, gamma, beta = inputs
    w1, b1, w2, b2 = linears
    delayed = with_copies(delayed)
    (w1_q, w2_q), weight_amaxes = quantized_weights(plan, (w1, w2), delayed) if kept is None else kept
    wgrad1, wgrad2 = live_gradient(wgrads, 0), live_gradient(wgrads, 1)
    assert config.norm is not None
    args = LayerNormMLPFwdArgs(
        x=x,
        branch=branch,
        branch_bias=branch_bias,
        gamma=gamma,
        beta=beta,
        fc1_weight=w1,
        fc1_bias=b1,
        fc2_weight=w2,
        fc2_bias=b2,
        norm=config.norm,
        fc1=linear_args(plan, 0, w1, b1, w1_q, delayed, wgrad1, probes),
        fc2=linear_args(plan, 1, w2, b2, w2_q, delayed, wgrad2, probes),
        activation=config.activation,
        params=config.activation_params,
        recomputes=config.recomputes,
        compresses=plan.compresses,
        returns_norm=config.return_layernorm_output,
        gathers_norm=config.gathers_norm,
        residual=residual,
        grad_state=grad_state(plan, delayed),
    )
    outputs = run_core(LAYERNORM_MLP, args, plan.has_backward)
    count = 1 + config.return_layernorm_output + (residual is not None)
    record_amaxes(plan, delayed, outputs[count:], weight_amaxes)
    return outputs[:count]


_run_inlined = inlined(run_layernorm_mlp)


class LayerNormMLP(TransformerEngineBaseModule):
    """This module computes `fc2(activation(fc1(norm(x))))`: a norm, then a multi-layer perceptron from `hidden_size` to
    `ffn_hidden_size` features and back.

    Its parameters are `layer_norm_weight`, `layer_norm_bias` (not for RMSNorm), `fc1_weight`, `fc1_bias`, `fc2_weight`
    and `fc2_bias`. Norm and activation hand their outputs over to the products already quantized. With a gated
    activation `fc1_weight` has 2 · `ffn_hidden_size` rows, and under tensor parallelism each half of them is split.

    Args:
        hidden_size: The number of features of the input and of the output.
        ffn_hidden_size: The number of features between the two linear layers of the MLP.
        eps: A small number that the norm adds to the variance before it takes the square root. The default is 1e-5.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over the
            ranks of `tp_group` as well. It has no effect when that group has one rank. The default is False.
        return_bias: Whether the bias of fc2 is returned beside the output instead of being added to it. The default is
            False.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers initial values are drawn, or None for PyTorch's own.
        tp_group: The process group whose ranks share the weights (tensor parallelism), or None for a module that is not
            split.
        tp_size: The number of ranks that share the weights. Without a `tp_group` it says how large the group will be
            that `set_tensor_parallel_group` sets later. The default is 1.
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        bias: Whether both linear layers have a bias. The default is True.
        normalization: Which norm it is: "LayerNorm" (the default) or "RMSNorm".
        activation: The activation between the two linear layers: "gelu" (the default), "qgelu", "silu", "relu",
            "srelu", or a gated one, "geglu", "qgeglu", "swiglu", "glu", "reglu", "sreglu", "clamped_swiglu", "situglu".
            A gated activation doubles the output of the first linear layer; one half goes through the activation and
            multiplies the other.
        activation_params: The parameters of the activation by name, for "clamped_swiglu" (`limit`, `alpha`,
            `glu_linear_offset`) and "situglu" (`beta1`, `beta2`). None leaves them at their defaults.
        output_layer_init_method: A function that fills the weight of fc2 in place. None means as `init_method`.
        fuse_wgrad_accumulation: Whether backward adds the weight gradients to the parameters' `main_grad`, tensors that
            the training program puts there, instead of returning them to autograd. The default is False.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        return_layernorm_output: Whether the output of the norm is returned as well. The default is False.
        return_layernorm_output_gathered: Whether the output of the norm is returned for the tokens of all ranks, which
            matters with `sequence_parallel`. The default is False.
        seq_length: The length of sequences. Transformer Engine warms its kernels up with it; here it is accepted and
            has no effect.
        micro_batch_size: The size of a microbatch. It is accepted and has no effect, as `seq_length`.
        set_parallel_mode: Whether the weights are split over the ranks of `tp_group`: fc1 by output features, fc2 by
            input features. The default is False.
        zero_centered_gamma: Whether the norm's weight is stored minus one, so that its initial value is 0. The default
            is False.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        ub_overlap_ag: It must be False: Transformer Engine's overlap of the all-gather through user buffers does not
            exist here.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        ub_overlap_rs: It must be False: Transformer Engine's overlap of the reduce-scatter through user buffers does
            not exist here.
        ub_overlap_rs_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_dgrad: It must be False: this overlap for the input gradient does not exist here.
        ub_bulk_wgrad: It must be False: this overlap for the weight gradient does not exist here.
        delay_wgrad_compute: Whether backward leaves the weight gradients to a later call of `backward_dw()`. The
            default is False.
        symmetric_ar_type: It must be None: all-reduce over symmetric memory does not exist here.
        checkpoint: Whether backward computes norm, first linear layer and activation again, instead of keeping what
            they made. The default is False.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default", "lean" (only what backward cannot compute again) or
            "compressed" (lean, and the input of an MLP's activation in FP8). None means what the region says.

    Raises:
        ValueError: If a size is not positive or does not divide over the ranks, or `normalization`, `activation`,
            `activation_params` or `memory` is unknown.
        NotImplementedError: If an `ub_…` argument or `symmetric_ar_type` asks for user buffers.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mlp = mz.LayerNormMLP(32, 96, activation="swiglu", bias=False, device="cpu")
        >>> with mz.autocast("mxfp8"):
        ...     y = mlp(torch.randn(16, 32))
        >>> y.shape
        torch.Size([16, 32])
        >>> mlp.fc1_weight.shape, mlp.fc2_weight.shape
        (torch.Size([192, 32]), torch.Size([32, 96]))
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        dtype: torch.dtype | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__(name)
        self.memory = memory
        check_features(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_parallel(
            None,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            symmetric_ar_type=symmetric_ar_type,
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.eps = check_epsilon(eps, "eps")
        self.rms = check_normalization(normalization)
        self.activation = activation
        self._activation, self._activation_params = resolve_activation(activation, activation_params)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.set_parallel_mode = set_parallel_mode
        modes = ("column", "row") if set_parallel_mode else (None, None)
        self._init_parallel(tp_group, tp_size, sequence_parallel, *modes)
        device, dtype = resolve_device(device), resolve_dtype(params_dtype, dtype)
        register_norm(self, "layer_norm_", hidden_size, self.rms, device, dtype)
        halves = 2 if is_gated(activation) else 1
        shard_size("ffn_hidden_size", ffn_hidden_size, self.tp_size if set_parallel_mode else 1)
        shared: dict[str, Any] = {"tp_size": self.tp_size}
        last_init = init_method if output_layer_init_method is None else output_layer_init_method
        self._weights = (
            Weights(
                "fc1_",
                hidden_size,
                halves * ffn_hidden_size,
                bias,
                None,
                init_method,
                parallel_mode=modes[0],
                stride=halves,
                **shared,
            ),
            Weights("fc2_", ffn_hidden_size, hidden_size, bias, None, last_init, parallel_mode=modes[1], **shared),
        )
        for fc in self._weights:
            fc.tracker = get_rng_state_tracker
            fc.register(self, device, dtype)
        self._init_state(2, device)
        if delay_wgrad_compute:
            self.wgrad_stores = (WeightGradStore(compute_weight_gradient), WeightGradStore(compute_weight_gradient))
        self.reset_parameters(defer_init=device.type == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            reset_norm(self, "layer_norm_", self.zero_centered_gamma)
        super().reset_parameters(defer_init)

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        if modes:
            raise ValueError("LayerNormMLP has two weights: use TensorParallel, which splits each its way")
        super().split_over(tp_group, sequence_parallel, place, "column", "row")
        self.set_parallel_mode = True

    def _inner_name(self, gemm: int) -> str:
        return "fc2" if gemm else "fc1"

    def _role(self, gemm: int, tensor_type: str) -> QuantizerRole:
        """Return the role of a tensor. What goes from one product to the other has the role under which the reader
        knows it."""
        if (gemm, tensor_type) == (0, "output"):
            return super()._role(1, "input")
        if (gemm, tensor_type) == (1, "grad_input"):
            return super()._role(0, "grad_output")
        return super()._role(gemm, tensor_type)

    def _config_fields(self) -> dict[str, Any]:
        return {
            **super()._config_fields(),
            "in_features": self.hidden_size,
            "norm": NormOptions(self.eps, self.zero_centered_gamma, self.rms),
            "activation": self._activation,
            "activation_params": self._activation_params,
            "recomputes": self.checkpoint,
            "makes_again": True,
        }

    def _reads_rows_again(self, recipe: Recipe | None) -> bool:
        return self.checkpoint or super()._reads_rows_again(recipe)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, *, _branch: Branch | None = None
    ) -> torch.Tensor | Any:
        """Compute the output (…, hidden) of an input (…, hidden).

        Args:
            inp: The input (…, hidden), in high precision or quantized.
            is_first_microbatch: Whether this is the first microbatch of a step in which the weights do not change. None
                (the default) quantizes the weight at each call; True quantizes it and keeps the result; False uses what
                was kept.

        Returns:
            The output; or a tuple of it, the bias of fc2 (with `return_bias`) and the norm's output (with
            `return_layernorm_output`), in this order. If `TransformerLayer` gives a `_branch`, its sum with `inp` comes
            last.
        """
        config = config_of(self)
        x = input_of_module(inp, config.in_features, "inp")
        if config.is_parallel:
            self._check_parallel(inp)
        (w1, b1), (w2, b2) = weights_of(self, config)
        gamma, beta = norm_parameters(self, "layer_norm_")
        dtype = x.dtype
        added = None if config.return_bias else b2
        branch, branch_bias, residual = resolve_branch(_branch)
        needs1 = needs_of(need_grad(x, branch, branch_bias, gamma, beta), need_grad(w1), need_grad(b1))
        needs2 = needs_of(needs1.input or needs1.weight or needs1.bias, need_grad(w2), need_grad(added))
        call = start_run(self, config, dtype, (needs1, needs2), is_first_microbatch)
        if call.calibrates:
            self._calibrate(self._inputs_of_gemms(x, branch, branch_bias), (w1, w2))
        kept = self._kept(call, (w1, w2)) if call.caches else None
        wgrads = self._wgrads((w1, w2)) if config.accumulates else None
        run = run_layernorm_mlp if kept is None else _run_inlined
        inputs, linears = (x, branch, branch_bias, gamma, beta), (w1, b1, w2, added)
        delayed = delayed_of(self, call)
        outputs = list(run(call.plan, config, residual, inputs, linears, delayed, kept, wgrads, call.probes))
        y = outputs.pop(0)
        norm_out = outputs.pop(0) if config.return_layernorm_output else None
        stream = None if residual is None else outputs.pop(0)
        return outputs_of(config, y, b2, dtype, norm_out, stream)

    if TYPE_CHECKING:
        __call__ = forward

    def _inputs_of_gemms(
        self, x: torch.Tensor, branch: torch.Tensor | None, branch_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of fc1 and fc2, computed in high precision."""
        with torch.no_grad():
            options = NormOptions(self.eps, self.zero_centered_gamma, self.rms)
            parameters = norm_parameters(self, "layer_norm_")
            first, _ = norm_forward(NormFwdArgs(x, *parameters, options, None, branch, branch_bias))
            fc1 = self._weights[0]
            hidden = torch.nn.functional.linear(first, fc1.weight(self).to(x.dtype), _cast(fc1.bias(self), x.dtype))
            second = activate(ActivationFwdArgs(hidden, self._activation, self._activation_params))
        return first, second

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"normalization={self.normalization}, activation={self.activation}{formats_of(self.parameters())}"
        )


def _cast(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)
