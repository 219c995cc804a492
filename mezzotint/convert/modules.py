"""Converted layers are the objects that they were, with another class and a few more attributes.

The class inherits from `Linear` and from the class that the layer had: `isinstance(layer, nn.Linear)` holds, and
state-dict keys, hooks, optimizers and every reference to it stay valid. If an `nn.Sequential` runs an `nn.LayerNorm` or
`nn.RMSNorm` right before a converted layer, it runs both in one step, as `LayerNormLinear` does.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import nn

from mezzotint.functional.norm import NormOptions
from mezzotint.layer.hooks import is_hooked
from mezzotint.layer.parameters import PlaceParameter
from mezzotint.layer.plan import LayerConfig
from mezzotint.layer.weights import Weights
from mezzotint.module.layernorm_linear import LayerNormLinear
from mezzotint.module.linear import Linear
from mezzotint.quantization import autocast
from mezzotint.recipe import Recipe
from mezzotint.region import current_state
from mezzotint.tracing import backward_task

CONV1D = ("transformers.pytorch_utils", "Conv1D")


class Converted:
    """This base comes before `theirs`, the class that a module had, in a class that `converted_class` makes."""

    # These names are ones that no model has: an attribute of the class would hide a child of that name.
    _mezzotint_ours: ClassVar[Any]
    _mezzotint_theirs: ClassVar[Any]
    _mezzotint_label: ClassVar[str] = ""  # what the report calls it

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, parts(type(self)), self.__getstate__()

    def _mezzotint_forget(self) -> None:
        """Remove what was added to the object."""


@cache
def converted_class(ours: Any, theirs: Any) -> Any:
    """Return the class of a converted module, which inherits from ours and then from theirs."""
    return type(f"Converted{theirs.__name__}", (ours, theirs), {"_mezzotint_ours": ours, "_mezzotint_theirs": theirs})


def parts(cls: Any) -> tuple[Any, ...]:
    """Return the classes that a converted class was joined from, ours first."""
    return (cls._mezzotint_ours, *parts(cls._mezzotint_theirs)) if "_mezzotint_ours" in vars(cls) else (cls,)


def blank(*classes: Any) -> Any:
    """Return an empty object of a converted class, for copies and pickles, which cannot name a
    class that was made at run time."""
    *outer, made = classes
    for ours in reversed(outer):
        made = converted_class(ours, made)
    return made.__new__(made)


class ConvertedLinear(Converted, Linear):
    """A `ConvertedLinear` is a `Linear` in the place of an `nn.Linear`.

    `recipe` is in force in this layer whatever region is around it; if it is None, that region decides. A layer has its
    recipe itself because a model may be run by other methods than `forward`, in parts, or again by a checkpoint.
    """

    _mezzotint_label = "Linear"
    name: Any = ""  # no property here: the layer may have a `name` of its own
    recipe: Recipe | None
    pair: Any  # (norm,) if one comes before it, else (); a tuple, as the norm is no child of this layer

    def forward(self, input: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        """Apply the layer to input (…, in), which gives (…, out); the options are those of `Linear.forward`."""
        with self._region():
            return Linear.forward(self, input, **options)  # Dynamo guards on what `super()` finds, in each layer

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        return super().extra_repr() + recipe

    def _saves_state(self) -> bool:
        """Return whether delayed scaling's state is in the state dict: if the recipe asks for it, or
        some was learnt under another.

        Otherwise the keys of the state dict are those of the layer that this was.
        """
        if self.recipe is not None and self._request_of(self.recipe) is not None:
            return True
        return not self._is_fresh()

    def _region(self) -> AbstractContextManager[Any]:
        state = current_state()
        if self.recipe is None or (state.enabled and state.recipe is self.recipe.frozen()):
            return nullcontext()
        if backward_task() != -1 and self._request is not None and state.recomputation is None:
            raise RuntimeError(
                "delayed scaling in torch.utils.checkpoint: the scales that forward used are written over. Use "
                "mezzotint.checkpoint, or a recipe without state such as Float8CurrentScaling"
            )
        return autocast(recipe=self.recipe, amax_reduction_group=state.group)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize the parameters as the layer did before."""
        if not defer_init:
            self._mezzotint_theirs.reset_parameters(self)
            self._reset_state()

    def _mezzotint_forget(self) -> None:
        attributes, buffers = additions()
        for name in buffers:
            delattr(self, name)
        for name in attributes:
            del vars(self)[name]


class ConvertedLayerNormLinear(ConvertedLinear, LayerNormLinear):  # type: ignore[misc]
    """This linear layer follows a norm in an `nn.Sequential`: `forward` is the linear layer
    alone, and `after_norm` runs both."""

    _mezzotint_label = "LayerNormLinear"
    zero_centered_gamma = False
    layer_norm_weight = property(lambda self: self.pair[0].weight)
    layer_norm_bias = property(lambda self: getattr(self.pair[0], "bias", None))
    eps = property(lambda self: self.pair[0].eps)
    rms = property(lambda self: isinstance(self.pair[0], nn.RMSNorm))

    def _config_fields(self) -> dict[str, Any]:
        return ConvertedLinear._config_fields(self)  # the norm is another module, and may change on its own

    def _norm_options(self, config: LayerConfig) -> NormOptions:
        return NormOptions(self.eps, self.zero_centered_gamma, self.rms)

    def after_norm(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the norm, then this layer: (…, in) → (…, out)."""
        with self._region():
            return LayerNormLinear.forward(self, input)


class ConvertedConv1D(ConvertedLinear):
    """A `ConvertedConv1D` is a `Linear` in the place of a `Conv1D` of transformers, whose weight is (in, out)."""

    in_features = property(lambda self: self.weight.shape[0])
    out_features = property(lambda self: self.weight.shape[1])

    __repr__ = nn.Module.__repr__

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize the parameters as the library does, whose class has no such method."""
        if not defer_init:
            nn.init.normal_(self.weight, std=0.02)
            nn.init.zeros_(self.bias)  # type: ignore[arg-type]
            self._reset_state()

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        raise ValueError("a Conv1D of transformers, whose weight is (in, out), is not split by styles: use nn.Linear")

    def _gathered_weights(self) -> dict[str, int]:
        return {}  # what is quantized is not the parameter but its transpose


class TransposedWeights(Weights):
    """These weights are the transpose of a parameter (in, out)."""

    def is_plain(self) -> bool:
        return False

    def weight(self, module: Any) -> torch.Tensor:
        return module.weight.t()


class ConvertedModel(Converted):
    """A `ConvertedModel` is the model that `convert` was given with a recipe: its forward is one region, in
    which all converted layers run."""

    _mezzotint_recipe: Recipe

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the joined class the name and the signature of theirs, which libraries inspect."""
        super().__init_subclass__(**options)
        if "_mezzotint_theirs" in vars(cls):
            theirs = cls._mezzotint_theirs
            cls.__name__, cls.__qualname__, cls.__module__ = theirs.__name__, theirs.__qualname__, theirs.__module__

            @wraps(theirs.forward)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                with autocast(recipe=self._mezzotint_recipe, amax_reduction_group=current_state().group):
                    return theirs.forward(self, *args, **kwargs)

            cls.forward = forward  # type: ignore[attr-defined]

    def _mezzotint_forget(self) -> None:
        del vars(self)["_mezzotint_recipe"]


class ConvertedSequential(Converted, nn.Sequential):
    """This `nn.Sequential` runs a norm and the converted linear layer behind it in one step."""

    def forward(self, input: Any) -> Any:
        modules: list[Any] = list(self)
        while modules:
            module = modules.pop(0)
            run = modules.pop(0).after_norm if modules and _is_pair(module, modules[0]) else module
            input = run(input)
        return input


def _is_pair(norm: nn.Module, linear: nn.Module) -> bool:
    """Return whether the two are run in one step; it is asked at each call, because a hook must see the input
    and the output of each of them."""
    is_pair = isinstance(linear, ConvertedLayerNormLinear) and linear.pair[0] is norm
    return is_pair and not is_hooked(norm, linear)


@cache
def additions() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the attributes and the buffers that a converted layer has and an `nn.Linear` has not."""
    ours, theirs = Linear(1, 1, device="meta"), nn.Linear(1, 1, device="meta")
    return frozenset(vars(ours).keys() - vars(theirs).keys() - {"name"} | {"recipe", "pair"}), tuple(ours._buffers)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a transposed weight, by its class's path:
    the library need not be there."""
    return conv1d_class(type(module)) is not None


def conv1d_class(cls: type) -> Any:
    return next((base for base in cls.__mro__ if (base.__module__, base.__name__) == CONV1D), None)


def features(linear: Any) -> tuple[int, int]:
    """Return (in, out) of a linear layer."""
    return tuple(linear.weight.shape) if is_conv1d(linear) else (linear.in_features, linear.out_features)


def convert_linear(linear: Any, recipe: Recipe | None, norm: nn.Module | None) -> None:
    """Convert a linear layer in place; its new attributes are those of one of ours on the meta
    device, which takes no memory."""
    sizes, ours = features(linear), ConvertedLinear if norm is None else ConvertedLayerNormLinear
    fresh = Linear(*sizes, bias=linear.bias is not None, device="meta")
    vars(linear).update({name: vars(fresh).get(name) for name in additions()[0]})
    linear.recipe, linear.pair = recipe, () if norm is None else (norm,)
    if is_conv1d(linear):
        ours, linear._weights = ConvertedConv1D, (TransposedWeights("", *sizes, True, None, None),)
    linear.__class__ = converted_class(ours, linear.__class__)
    linear._init_state(1, linear.weight.device)


def convert_sequential(sequential: Any) -> None:
    """Convert an `nn.Sequential` in place."""
    if not isinstance(sequential, ConvertedSequential):
        sequential.__class__ = converted_class(ConvertedSequential, sequential.__class__)


def convert_root(model: Any, recipe: Recipe) -> None:
    """Convert a model in place; its first recipe stays, and a layer with another one has a region of its own."""
    if not isinstance(model, ConvertedModel):
        model._mezzotint_recipe = recipe
        model.__class__ = converted_class(ConvertedModel, model.__class__)


def restore(module: Any) -> None:
    """Make a converted module what it was, in place."""
    *ours, theirs = parts(type(module))
    for each in ours:
        each._mezzotint_forget(module)
    module.__class__ = theirs
