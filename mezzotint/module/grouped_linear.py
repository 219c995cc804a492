"""GroupedLinear: it applies one linear to each group of rows, like the experts of a mixture."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mezzotint.functional.autograd import run_core
from mezzotint.functional.grouped_linear import GROUPED_LINEAR, group_tensors, is_stack
from mezzotint.functional.linear import needs_of
from mezzotint.functional.observation import Probes
from mezzotint.layer.base import start_run
from mezzotint.layer.boundary import input_of_module
from mezzotint.layer.buffers import WriteGradient, WriteOutput, check_buffer
from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of
from mezzotint.layer.grouped import GroupedLayer, GroupWeights
from mezzotint.layer.parameters import (
    PlaceParameter,
    check_features,
    check_parallel,
    resolve_device,
    resolve_dtype,
)
from mezzotint.layer.plan import Plan
from mezzotint.layer.run import (
    Delayed,
    KeptWeights,
    grad_state,
    grouped_linear_args,
    quantized_weights,
    record_amaxes,
    with_copies,
)
from mezzotint.layer.splits import check_rows, resolve_splits
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.tensor.printing import formats_of
from mezzotint.tracing import below_dynamo, inlined


@below_dynamo
def run_grouped_linear(
    plan: Plan,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor, ...],
    splits: tuple[int, ...],
    delayed: Delayed | None = None,
    kept: KeptWeights | None = None,
    wgrads: tuple[tuple[Any, ...], ...] | None = None,
    probes: tuple[Probes, ...] | None = None,
) -> torch.Tensor:
    """Return y (M, N) of x (M, K), whose groups have `splits` rows; `weights` and `biases` are as in
    `GroupedLinearFwdArgs`."""
    delayed = with_copies(delayed)
    weights_q, weight_amaxes = quantized_weights(plan, group_tensors(weights, 2), delayed) if kept is None else kept
    args = grouped_linear_args(plan, x, weights, biases, weights_q, splits, delayed, wgrads, probes)
    args.grad_state = grad_state(plan, delayed)
    y, *amaxes = run_core(GROUPED_LINEAR, args, plan.has_backward)
    record_amaxes(plan, delayed, amaxes, weight_amaxes)
    return y


_run_inlined = inlined(run_grouped_linear)


class GroupedLinear(GroupedLayer, TransformerEngineBaseModule):
    """This module applies `num_gemms` linear layers to consecutive groups of rows, as the experts of a
    mixture-of-experts layer need it.

    The parameters are `weight0`, `bias0`, `weight1` and so on; or one parameter holds those of all groups: `weight`
    (groups, out, in) with `single_grouped_weight`, `bias` (groups, out) with `single_grouped_bias`. Groups may have any
    size, also 0: each is padded inside as its format needs.

    With `parallel_mode` this module only holds its shard of each weight: whoever sends tokens to experts must also
    gather and sum over `tp_group`.

    Args:
        num_gemms: The number of linear layers, which is the number of groups of rows.
        in_features: The number of features of the input, which is the size of its last dimension. Under tensor
            parallelism this is the number of the whole weight.
        out_features: The number of features of the output. Under tensor parallelism this is the number of the whole
            weight.
        sequence_parallel: Whether the tokens are divided over the ranks of `tp_group`. It is kept as an attribute: this
            module does not communicate itself. The default is False.
        fuse_wgrad_accumulation: Whether backward adds the weight gradients to the parameters' `main_grad`, tensors that
            the training program puts there, instead of returning them to autograd. The default is False.
        tp_group: The process group whose ranks share the weights (tensor parallelism), or None for a module that is not
            split.
        tp_size: The number of ranks that share the weights. Without a `tp_group` it says how large the group will be
            that `set_tensor_parallel_group` sets later. The default is 1.
        get_rng_state_tracker: A function without arguments that returns a `CudaRNGStatesTracker`, from whose random
            numbers initial values are drawn, or None for PyTorch's own.
        rng_tracker_name: The name of the generator in that tracker, or None for the tracker's default.
        init_method: A function that fills a weight with its initial values in place, or None for a normal distribution
            with mean 0 and standard deviation 0.023.
        bias: Whether each linear layer has a bias. The default is True; it must be False if `tp_size` is more than 1.
        return_bias: Whether the biases are returned beside the output instead of being added to it. The default is
            False.
        params_dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        parallel_mode: How each weight is split over the ranks of `tp_group`: "column", "row" or None (the default).
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU; "meta" leaves the parameters without memory.
        ub_overlap_rs: It must be False: Transformer Engine's overlap of the reduce-scatter through user buffers does
            not exist here.
        ub_overlap_ag: It must be False: Transformer Engine's overlap of the all-gather through user buffers does not
            exist here.
        ub_name: A name that Transformer Engine gives to its user buffers. It is kept as an attribute and has no effect.
        delay_wgrad_compute: Whether backward leaves the weight gradients to a later call of `backward_dw()`. The
            default is False.
        save_original_input: Whether forward keeps the input as it came for backward, instead of a quantized copy. That
            saves memory when another operation keeps the same input anyway. The default is False.
        single_grouped_weight: Whether one parameter `weight` holds the weights of all groups. The default is False.
        single_grouped_bias: Whether one parameter `bias` holds the biases of all groups. The default is False.
        name: The name of the module, by which a recipe can choose its format and by which messages mention it. None
            means the path that `name_modules` or `convert` gives it.
        use_grouped_tensor: An option of Transformer Engine that is accepted and has no effect.
        dtype: Another name for `params_dtype`, as PyTorch's own modules call it. Give one of the two.
        memory: How much forward keeps for backward: "default" (a quantized copy of the input) or "lean" (the input as
            it came, which saves memory when another operation keeps it anyway). "compressed" means "lean" here, and
            None means what the region says.

    Raises:
        ValueError: If a size is not positive, `memory` is unknown, or there is a bias and `tp_size` is more than 1.
        NotImplementedError: If an `ub_…` argument asks for user buffers.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> experts = mz.GroupedLinear(2, 64, 32, bias=False, device="cpu")
        >>> with mz.autocast("mxfp8"):
        ...     y = experts(torch.randn(24, 64), m_splits=[16, 8])
        >>> y.shape
        torch.Size([24, 32])
        >>> [name for name, _ in experts.named_parameters()]
        ['weight0', 'weight1']
    """

    module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        *,
        dtype: torch.dtype | None = None,
        memory: str | None = None,
    ) -> None:
        super().__init__(name)
        self.memory = memory
        self.ub_name = ub_name  # kept because programs read it
        check_features(num_gemms=num_gemms, in_features=in_features, out_features=out_features)
        check_parallel(
            parallel_mode,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
        )
        self._init_parallel(tp_group, tp_size, sequence_parallel)
        self.parallel_mode = parallel_mode
        if self.tp_size > 1 and bias:
            raise ValueError(
                f"bias is True and tp_size {self.tp_size}: sums over ranks are made outside of GroupedLinear, and "
                "a bias is added after them; give bias=False"
            )
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        device, dtype = resolve_device(device), resolve_dtype(params_dtype, dtype)
        split: dict[str, Any] = {"parallel_mode": parallel_mode, "tp_size": self.tp_size}
        stacks = {"stacks_weight": single_grouped_weight, "stacks_bias": single_grouped_bias}
        weights = tuple(
            [
                GroupWeights(i, num_gemms, in_features, out_features, bias, init_method, **stacks, **split)
                for i in range(num_gemms)
            ]
        )
        self.in_features, self.out_features = weights[0].in_features, weights[0].out_features
        for group in weights:
            group.tracker, group.tracker_name = get_rng_state_tracker, rng_tracker_name
        self._init_groups(weights, device, dtype, delay_wgrad_compute)

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        raise ValueError("GroupedLinear is not split by styles: give each rank some experts (moe/exchange.py)")

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Join the weights of groups, as `GroupedLayer.make_grouped_weights` does; with `defer_init` nothing is
        done."""
        if not defer_init:
            super().make_grouped_weights()

    def _inner_name(self, gemm: int) -> str:
        return str(gemm)

    def _config_fields(self) -> dict[str, Any]:
        return {**super()._config_fields(), "in_features": self.in_features, "makes_again": True}

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | Any:
        """Compute the output (…, out) of an input (…, in), whose rows lie group by group.

        Args:
            inp: The input (…, in), in high precision or quantized.
            m_splits: The number of rows of each group, as a list or a tensor.
            is_first_microbatch: Whether this is the first microbatch of a step in which the weights do not change. None
                (the default) quantizes the weight at each call; True quantizes it and keeps the result; False uses what
                was kept.
            out: A tensor (…, out) to which the result is written, or None.
            dgrad_out: A tensor (…, in) to which the gradient of `inp` is written, or None.

        Returns:
            The output, or with `return_bias` the pair (output, list of biases).
        """
        config = config_of(self)
        x = input_of_module(inp, config.in_features, "inp")
        splits = resolve_splits(m_splits, self.num_gemms)
        weights, biases = self._group_parameters()
        x = x.reshape(-1, self.in_features) if x.dim() != 2 else x
        check_rows(splits, x.shape[0])
        if dgrad_out is not None:
            check_buffer("dgrad_out", dgrad_out, inp)
            x = WriteGradient.apply(x, dgrad_out)
        added = () if config.return_bias else biases
        has_grad = torch.is_grad_enabled()
        needs = needs_of(
            has_grad and x.requires_grad,
            has_grad and any(weight.requires_grad for weight in weights),
            has_grad and any(bias.requires_grad for bias in added),
        )
        call = start_run(self, config, x.dtype, (needs,) * self.num_gemms, is_first_microbatch)
        if call.calibrates:
            self._calibrate(x.split(list(splits)), group_tensors(weights, 2))
        kept = self._kept(call, group_tensors(weights, 2)) if call.caches else None
        wgrads = tuple([each.fields() for each in self._weight_grads(weights)]) if config.accumulates else None
        run = run_grouped_linear if kept is None else _run_inlined
        y = run(call.plan, x, weights, added, splits, delayed_of(self, call), kept, wgrads, call.probes)
        y = y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)  # a view only if one is needed
        if out is not None:
            check_buffer("out", out, y)
            y = WriteOutput.apply(y, out)
        if config.return_bias:
            each = biases[0].unbind() if is_stack(biases, 1) else biases
            return y, [bias.to(x.dtype) for bias in each] or None
        return y

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{formats_of(self.parameters())}"
        )
