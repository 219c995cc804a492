"""These rules decide which layers `convert` converts, and say why it keeps the others."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNBase
from torch.nn.parameter import is_lazy

from mezzotint.constants import HIGH_PRECISION
from mezzotint.convert.experts import ConvertedExperts, is_experts, sizes_of_experts, why_not_experts
from mezzotint.convert.modules import (
    ConvertedLinear,
    ConvertedSequential,
    additions,
    conv1d_class,
    features,
    is_conv1d,
)
from mezzotint.recipe import Recipe

Filter = Callable[[Any, str], bool | None]
Norm = nn.LayerNorm | nn.RMSNorm

SMALLEST, MULTIPLE = 64, 16
HEADS = ("lm_head", "output", "head", "classifier", "score")
CONVERTED = ConvertedLinear | ConvertedExperts


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, with one weight and one product."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def can_be_converted(module: nn.Module) -> bool:
    """Return whether a module is of a kind that is converted, if nothing speaks against it."""
    return is_linear(module) or is_experts(module)


@dataclass(frozen=True)
class ConversionRules:
    """A `ConversionRules` holds what a call of `convert` decides by."""

    choose: Filter | None
    recipe: Recipe | None
    heads: dict[str, str]
    unused: set[int]  # ids of modules that their parents do not call

    def why_kept(self, module: Any, fqn: str) -> str | None:
        """Return why a module stays as it is, or None if it is converted."""
        why = why_not_experts(module, fqn, self.recipe) if is_experts(module) else self._why_never(module)
        if why is not None:
            return why
        wanted = None if self.choose is None else self.choose(module, fqn)
        if wanted is None:
            return self.heads.get(fqn) or _why_small(module)
        if not isinstance(wanted, bool):
            raise TypeError(
                f"filter gave {wanted!r} for {fqn!r}: return True, False, or None to leave it to the defaults"
            )
        return None if wanted else "left out by the filter"

    def _why_never(self, linear: Any) -> str | None:
        """Return why a layer cannot be converted: it does not compute what ours would, or has no
        weight that ours could share."""
        if isinstance(linear, nn.LazyLinear):
            return "sizes are not known yet: run the model once, then convert"
        kind = conv1d_class(type(linear)) or nn.Linear
        if type(linear).forward is not kind.forward or "forward" in vars(linear):
            return "has a forward of its own"
        if id(linear) in self.unused:
            return "nn.MultiheadAttention reads its weight and does not call it"
        for name in ("weight", "bias"):
            parameter = linear._parameters.get(name)
            if parameter is None:
                if name == "weight" or getattr(linear, name, None) is not None:
                    return f"{name} is computed: parametrized, pruned, or made by a hook"
            elif type(parameter) is not nn.Parameter:
                return f"{name} is a {type(parameter).__name__}: convert first, then quantize or shard"
            elif parameter.dtype not in HIGH_PRECISION:
                return f"{name} is {parameter.dtype}: ours take float32, float16 or bfloat16"
        attributes, buffers = additions()
        taken = vars(linear).keys() | linear._buffers.keys() | linear._parameters.keys() | linear._modules.keys()
        taken &= {*attributes, *buffers}
        return f"has attributes that ours need: {', '.join(sorted(taken))}" if taken else None


def _why_small(module: Any) -> str | None:
    """Return why converting a module gains little, or None."""
    for sizes in sizes_of_experts(module) if is_experts(module) else [features(module)]:
        for name, size in zip(("in_features", "out_features"), sizes, strict=True):
            if size < SMALLEST:
                return f"small: {name} is {size}, below {SMALLEST}"
            if size % MULTIPLE:
                return f"{name} is {size}, no multiple of {MULTIPLE}"
    return None


_WHY_OTHERS: tuple[tuple[Any, str], ...] = (
    (nn.Embedding | nn.EmbeddingBag, "embedding: rows are looked up, nothing is multiplied"),
    (_ConvNd, "convolution: no recipe quantizes one"),
    (nn.MultiheadAttention, "nn.MultiheadAttention multiplies it itself: use mezzotint.MultiheadAttention"),
    (RNNBase | nn.RNNCellBase, "recurrent: its products are made inside"),
    (nn.LayerNorm | nn.RMSNorm, "norm: it scales element by element"),
)


def why_other(module: nn.Module, parameter: Any) -> str:
    """Return why a parameter of any other module stays in high precision."""
    if is_lazy(parameter):
        return "sizes are not known yet: run the model once, then convert"
    for kind, why in _WHY_OTHERS:
        if isinstance(module, kind):
            return why
    why = f"{type(module).__name__} reads it in a forward of its own"
    return f"{why}; where it multiplies groups of rows, use mezzotint.grouped_mm" if parameter.dim() == 3 else why


def find_unused(model: nn.Module) -> set[int]:
    """Return the ids of modules whose weights are read by their parents, which do not call them."""
    return {id(inner) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for inner in m.modules()}


def find_heads(model: nn.Module) -> dict[str, str]:
    """Return the names of output layers, whose errors go straight to the loss, and how they were found."""
    linears = {fqn: module for fqn, module in model.named_modules() if is_linear(module)}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(embedding.weight) for embedding in embeddings}
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=None)
    heads: dict[str, str] = {}
    for fqn, linear in linears.items():
        *parents, name = fqn.split(".")
        if id(linear._parameters.get("weight")) in tied:
            heads[fqn] = "output head: its weight is an embedding's"
        elif name in HEADS and not any(parent.isdigit() for parent in parents):  # but not one in each layer of a stack
            heads[fqn] = f"output head: its name is {name}"
    # Only the last of these is a head: a hidden size may equal the vocabulary.
    for fqn in [fqn for fqn, linear in linears.items() if features(linear)[1] == vocabulary][-1:]:
        heads.setdefault(fqn, f"output head: {vocabulary} outputs, as many as an embedding has rows")
    return heads


@dataclass(frozen=True)
class Neighbours:
    """A `Neighbours` has a norm that a linear layer follows in an `nn.Sequential`, and why the two
    are not run in one step, or ""."""

    sequential: nn.Sequential
    norm: Norm
    why_apart: str


def find_neighbours(model: nn.Module) -> dict[int, Neighbours]:
    """Return the norms before linear layers, by the id of the layer; one that is used after two norms has the first."""
    found: dict[int, Neighbours] = {}
    for sequential in model.modules():
        if isinstance(sequential, nn.Sequential):
            for norm, linear in pairwise(sequential):
                if isinstance(norm, Norm) and isinstance(linear, nn.Linear):
                    why = _why_apart(sequential, norm, linear)
                    found.setdefault(id(linear), Neighbours(sequential, norm, why))
    return found


def _why_apart(sequential: nn.Sequential, norm: Norm, linear: nn.Linear) -> str:
    forwards = (nn.Sequential.forward, ConvertedSequential.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)
    for module in (sequential, norm):
        if type(module).forward not in forwards or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
    if type(norm._parameters.get("weight")) is not nn.Parameter:
        return "it has no weight"
    if tuple(norm.normalized_shape) != (linear.in_features,):
        return f"it normalizes over {tuple(norm.normalized_shape)}"
    return "its eps is None, give it one" if norm.eps is None else ""
