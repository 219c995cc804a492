"""`make_graphed_callables`: with it the forward and backward of modules replay CUDA graphs, under a recipe.

It uses `torch.cuda.make_graphed_callables`. What a module does at each step besides its kernels is captured with them:
the autocast region is entered inside, so delayed scaling's update is part of the graph, and kept weights are updated,
or not, as a flag on the GPU says, so one graph serves every microbatch. Warming up leaves no trace in the module's
buffers. Without a GPU the modules run as they are, under the same recipe.

    layer = make_graphed_callables(layer, (x,), enabled=True, recipe=recipe, cache_quantized_params=True)
    y = layer(x, is_first_microbatch=True)
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from mezzotint.layer.base import as_microbatch
from mezzotint.quantization import autocast
from mezzotint.recipe import Recipe
from mezzotint.region import current_state

__all__ = ["make_graphed_callables"]


class _Region:
    """A `_Region` says how the modules run: it has the arguments of `autocast`, or is off."""

    def __init__(self, enabled: bool, calibrating: bool, recipe: Recipe | None, group: Any) -> None:
        self.is_on = enabled or calibrating
        self.arguments = (enabled, calibrating, None if recipe is None else recipe.frozen(), group)

    def enter(self) -> Any:
        return autocast(*self.arguments) if self.is_on else nullcontext()


class _Captured(nn.Module):
    """This module is what is captured. It takes tensors alone; the last argument is a dict of those given by name.

    `flag`, FP32 [1], exists if weights are kept: they are quantized again unless it is 1.
    """

    def __init__(self, module: nn.Module, region: _Region, caches: bool) -> None:
        super().__init__()
        self.module, self.region = module, region
        self.forward_of = module.forward  # the original, before it is replaced
        device = next((p.device for p in module.parameters()), None)
        self.flag = torch.zeros(1, dtype=torch.float32, device=device) if caches else None
        self.more = {"is_first_microbatch": True} if caches else {}

    def forward(self, *args: Any) -> Any:
        *given, named = args
        state = current_state()
        outer, state.skip_weight_update = state.skip_weight_update, self.flag
        try:
            with self.region.enter():
                return self.forward_of(*given, **named, **self.more)
        finally:
            state.skip_weight_update = outer


def make_graphed_callables(
    modules: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Any = None,
) -> Any:
    """Return the module, or tuple of modules, with a forward and a backward that replay CUDA graphs, under a recipe.

    Real inputs must have the shapes of the samples. Without a GPU the modules run as they are, under the same recipe.
    An option that is not supported raises NotImplementedError.

    Args:
        modules: A module, or a tuple of modules.
        sample_args: The tensors of a call, or a tuple of such tuples for several modules.
        num_warmup_iters: How often the modules run before they are captured. The default is 3.
        allow_unused_input: Whether inputs may have no gradient. The default is False.
        sample_kwargs: The tensors given by name, as a dict, or a tuple of dicts; or None.
        fp8_enabled: The former name of `enabled`.
        fp8_calibrating: The former name of `calibrating`.
        fp8_recipe: The former name of `recipe`.
        fp8_group: The former name of `amax_reduction_group`.
        fp8_weight_caching: The former name of `cache_quantized_params`.
        enabled: Whether the modules quantize, as in `autocast`. None (the default) means False.
        calibrating: Whether they gather statistics, as in `autocast`.
        recipe: The recipe, as in `autocast`.
        amax_reduction_group: The process group of delayed scaling, as in `autocast`.
        cache_quantized_params: Whether calls take `is_first_microbatch` and keep quantized weights.
        pool: The memory pool of the graphs, or None for one of their own.
        retain_graph_in_backward: It must be False.
        clone_param_grads_on_return: It must be True.
        pre_warmup_hook: A function that is called before the warm-up, or None.
        post_warmup_hook: A function that is called after that, or None.
        capture_time_hooks: It must be None.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer, x = mz.Linear(64, 64, device="cpu"), torch.randn(32, 64)
        >>> layer = mz.make_graphed_callables(layer, (x,), enabled=True, recipe=mz.recipe.MXFP8BlockScaling())
        >>> layer(x).shape
        torch.Size([32, 64])
    """
    for name, value in (
        ("_order", _order),
        ("_num_layers_per_chunk", _num_layers_per_chunk),
        ("retain_graph_in_backward", retain_graph_in_backward),
        ("_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers),
        ("capture_time_hooks", capture_time_hooks),
    ):
        if value:
            raise NotImplementedError(
                f"{name}={value!r}: graphs are captured forward by forward, then backward by backward; leave it out, "
                'or use torch.compile(mode="reduce-overhead")'
            )
    if not clone_param_grads_on_return:
        raise NotImplementedError("clone_param_grads_on_return=False: gradients are copied out of the graph's memory")
    region = _Region(
        bool(_either("enabled", enabled, fp8_enabled)),
        bool(_either("calibrating", calibrating, fp8_calibrating)),
        _either("recipe", recipe, fp8_recipe),
        _either("amax_reduction_group", amax_reduction_group, fp8_group),
    )
    caches = bool(_either("cache_quantized_params", cache_quantized_params, fp8_weight_caching))
    is_one = not isinstance(modules, tuple)
    several: tuple[nn.Module, ...] = (modules,) if is_one else modules
    samples = (sample_args,) if is_one else sample_args
    named = ({},) * len(several) if sample_kwargs is None else (sample_kwargs,) if is_one else tuple(sample_kwargs)
    _check(several, samples, named)
    captured = tuple([_Captured(module, region, caches) for module in several])
    inputs = tuple([(*args, kwargs) for args, kwargs in zip(samples, named, strict=True)])
    if pre_warmup_hook is not None:
        pre_warmup_hook()
    runs: tuple[Callable[..., Any], ...] = captured
    if _are_on_gpu(inputs):
        runs = _capture(captured, inputs, num_warmup_iters, allow_unused_input, pool)
    if post_warmup_hook is not None:
        post_warmup_hook()
    for each, run, kwargs in zip(captured, runs, named, strict=True):
        _replace_forward(each, run, tuple(kwargs))
    return modules


def _either(name: str, value: Any, older: Any) -> Any:
    if value is not None and older is not None:
        raise ValueError(f"{name} is given by its older name too: give it once")
    return older if value is None else value


def _tensors(args: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(args)


def _are_on_gpu(inputs: Any) -> bool:
    return any(tensor.is_cuda for tensor in _tensors(inputs))


def _check(modules: tuple[Any, ...], samples: Any, named: Any) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"modules holds {type(module).__name__}: give torch.nn.Modules")
    for name, given in (("sample_args", samples), ("sample_kwargs", named)):
        if len(given) != len(modules):
            raise ValueError(f"{name} has {len(given)} entries for {len(modules)} modules: give one for each")
        for leaf in _tensors(list(given)):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"{name} holds {type(leaf).__name__}: a graph takes tensors; bind other values before")


def _capture(
    captured: tuple[_Captured, ...], inputs: tuple[Any, ...], warmups: int, allow_unused: bool, pool: Any
) -> tuple[Callable[..., Any], ...]:
    buffers = [(buffer, buffer.clone()) for each in captured for buffer in each.buffers()]
    # Parameters go in as arguments, and not with a module, so that something can stand between them and the graph.
    parameters = [tuple(each.parameters()) for each in captured]
    calls = tuple([_call_of(each) for each in captured])
    samples = tuple([(*args, own) for args, own in zip(inputs, parameters, strict=True)])
    with warnings.catch_warnings():
        # PyTorch's own warm-up runs on another stream than the capture, and warns; gradients are not accumulated in
        # either.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        made = torch.cuda.make_graphed_callables(calls, samples, warmups, allow_unused, pool)
    with torch.no_grad():  # restore the buffers; capturing itself runs nothing
        for buffer, value in buffers:
            buffer.copy_(value)
    return tuple([_with_own_gradients(run, own) for run, own in zip(made, parameters, strict=True)])


def _call_of(captured: _Captured) -> Callable[..., Any]:
    """Return the call that is captured; its last argument, the parameters, are those that the module has."""
    return lambda *args: captured(*args[:-1])


class _OwnGradient(torch.autograd.Function):
    """This function hands a parameter to a graph, and copies its gradient out of the graph's memory.

    Autograd would otherwise keep that memory itself as `grad`, into which the next replay writes: gradients that are
    added up over microbatches, or read after the replay of another graph, would be wrong (pytorch/pytorch#181723).
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # an input that is not used has no gradient
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient.clone()


def _with_own_gradients(run: Callable[..., Any], parameters: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """Return the replay of a graph, which has gradients of the parameters that nothing writes over."""

    def replay(*args: Any) -> Any:
        return run(*args, tuple([_OwnGradient.apply(each) if each.requires_grad else each for each in parameters]))

    return replay


def _replace_forward(captured: _Captured, run: Callable[..., Any], names: tuple[str, ...]) -> None:
    module, flag = captured.module, captured.flag
    was_training = module.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training != was_training:  # the graph was captured in the other mode
            with captured.region.enter():
                return captured.forward_of(*args, **kwargs)
        if flag is not None:
            is_first = as_microbatch(kwargs.pop("is_first_microbatch", True))
            flag.fill_(1.0 if is_first is False else 0.0)  # None quantizes, as without a graph
        if set(kwargs) != set(names):
            raise TypeError(
                f"the keyword arguments are {sorted(kwargs)}: the graph was captured with {sorted(names)}; "
                "is_first_microbatch needs cache_quantized_params=True"
            )
        return run(*args, {name: kwargs[name] for name in names})

    module.forward = forward
