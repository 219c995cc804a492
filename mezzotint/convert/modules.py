"""Converted layers: the objects that they were, with another class and a few more attributes.

The class inherits from `Linear` and from the class that the layer had: `isinstance(layer, nn.Linear)` holds, and so do
state-dict keys, hooks, optimizers and every reference to it. Where an `nn.Sequential` runs an `nn.LayerNorm` or
`nn.RMSNorm` right before a converted layer, it runs both in one step, as `LayerNormLinear` does.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import nn

from mezzotint.layer.hooks import is_hooked
from mezzotint.module.layernorm_linear import LayerNormLinear
from mezzotint.module.linear import Linear
from mezzotint.quantization import autocast
from mezzotint.recipe import Recipe
from mezzotint.state import current_state


class Converted:
    """Comes before `theirs`, a class of the model's, in a class that `join` makes."""

    ours: ClassVar[Any]
    theirs: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, parts(type(self)), self.__getstate__()


@cache
def join(ours: Any, theirs: Any) -> Any:
    """The class of a converted module: ours over theirs."""
    return type(f"Converted{theirs.__name__}", (ours, theirs), {"ours": ours, "theirs": theirs})


def parts(cls: Any) -> tuple[Any, ...]:
    """The classes that it was joined of, ours first."""
    return (cls.ours, *parts(cls.theirs)) if "ours" in vars(cls) else (cls,)


def blank(*classes: Any) -> Any:
    """For copies and pickles, which cannot name a class that was made at run time."""
    *outer, made = classes
    for ours in reversed(outer):
        made = join(ours, made)
    return made.__new__(made)


class ConvertedLinear(Converted, Linear):
    """`Linear` in the place of an `nn.Linear`.

    `recipe` is in force in this layer whatever is around it; None: what is around it decides. A layer has its recipe
    itself because a model may be run by other methods than `forward`, in parts, or again by a checkpoint.
    """

    name: Any = ""  # no property here: what the layer has under this name is its own
    recipe: Recipe | None
    pair: Any  # (norm,) where one comes before it, else (); a tuple, as the norm is no child of this

    def forward(self, input: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        """input (…, in) → (…, out); options as of `Linear.forward`."""
        with self._region():
            return super().forward(input, **options)

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        return super().extra_repr() + recipe

    def _region(self) -> AbstractContextManager[Any]:
        state = current_state()
        if self.recipe is None or (state.enabled and state.recipe is self.recipe):
            return nullcontext()
        if not torch.compiler.is_compiling() and self._request is not None and state.recomputation is None:
            is_in_backward = torch._C._current_graph_task_id() != -1
            if is_in_backward:
                raise RuntimeError(
                    "delayed scaling in torch.utils.checkpoint: the scales that forward used are written over. Use "
                    "mezzotint.checkpoint, or a recipe without state such as Float8CurrentScaling"
                )
        return autocast(recipe=self.recipe, amax_reduction_group=state.group)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initial values as the layer had them before."""
        if not defer_init:
            self.theirs.reset_parameters(self)
            self._reset_state()


class ConvertedLayerNormLinear(ConvertedLinear, LayerNormLinear):  # type: ignore[misc]
    """One that follows a norm in an `nn.Sequential`: a linear still, and `after_norm` is both."""

    zero_centered_gamma = False
    layer_norm_weight = property(lambda self: self.pair[0].weight)
    layer_norm_bias = property(lambda self: getattr(self.pair[0], "bias", None))
    eps = property(lambda self: self.pair[0].eps)
    rms = property(lambda self: isinstance(self.pair[0], nn.RMSNorm))

    def after_norm(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in) → (…, out): the norm, then this."""
        with self._region():
            return LayerNormLinear.forward(self, input)


class ConvertedModel(Converted):
    """What `convert` was given, with a recipe: its forward is one region, in which all converted layers run."""

    _mezzotint_recipe: Recipe

    def __init_subclass__(cls, **options: Any) -> None:
        """The joined class has the name and the signature of theirs, which libraries look at."""
        super().__init_subclass__(**options)
        if "theirs" in vars(cls):
            theirs = cls.theirs
            cls.__name__, cls.__qualname__, cls.__module__ = theirs.__name__, theirs.__qualname__, theirs.__module__

            @wraps(theirs.forward)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                with autocast(recipe=self._mezzotint_recipe, amax_reduction_group=current_state().group):
                    return theirs.forward(self, *args, **kwargs)

            cls.forward = forward  # type: ignore[attr-defined]


class ConvertedSequential(Converted, nn.Sequential):
    """`nn.Sequential` that runs a norm and the converted linear behind it in one step."""

    def forward(self, input: Any) -> Any:
        modules: list[Any] = list(self)
        while modules:
            module = modules.pop(0)
            run = modules.pop(0).after_norm if modules and _is_pair(module, modules[0]) else module
            input = run(input)
        return input


def _is_pair(norm: nn.Module, linear: nn.Module) -> bool:
    """Asked at each call: a hook must see what goes into and comes out of each of them."""
    is_pair = isinstance(linear, ConvertedLayerNormLinear) and linear.pair[0] is norm
    return is_pair and not is_hooked(norm, linear)


@cache
def additions() -> tuple[frozenset[str], tuple[str, ...]]:
    """Attributes and buffers that a converted layer has and an `nn.Linear` has not."""
    ours, theirs = Linear(1, 1, device="meta"), nn.Linear(1, 1, device="meta")
    return frozenset(vars(ours).keys() - vars(theirs).keys() - {"name"} | {"recipe", "pair"}), tuple(ours._buffers)


def convert_linear(linear: Any, recipe: Recipe | None, norm: nn.Module | None) -> None:
    """In place; attributes are those of one of ours that has no memory."""
    fresh = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    vars(linear).update({name: vars(fresh).get(name) for name in additions()[0]})
    linear.recipe, linear.pair = recipe, () if norm is None else (norm,)
    linear.__class__ = join(ConvertedLinear if norm is None else ConvertedLayerNormLinear, linear.__class__)
    linear._init_state(1, linear.weight.device)


def convert_sequential(sequential: Any) -> None:
    """In place."""
    if not isinstance(sequential, ConvertedSequential):
        sequential.__class__ = join(ConvertedSequential, sequential.__class__)


def convert_root(model: Any, recipe: Recipe) -> None:
    """In place; the first recipe stays, and a layer with another one has a region of its own."""
    if not isinstance(model, ConvertedModel | ConvertedLinear):
        model._mezzotint_recipe = recipe
        model.__class__ = join(ConvertedModel, model.__class__)


def restore(module: Any) -> None:
    """What it was, in place."""
    if isinstance(module, ConvertedLinear):
        attributes, buffers = additions()
        for name in buffers:
            delattr(module, name)
        for name in attributes:
            del vars(module)[name]
    vars(module).pop("_mezzotint_recipe", None)
    module.__class__ = parts(type(module))[-1]
