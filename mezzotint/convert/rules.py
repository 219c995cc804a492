"""What is converted, and why not."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from mezzotint.constants import HIGH_PRECISION
from mezzotint.convert.modules import ConvertedSequential, additions

Filter = Callable[[nn.Linear, str], bool | None]
Norm = nn.LayerNorm | nn.RMSNorm

SMALLEST, MULTIPLE = 64, 16
HEADS = ("lm_head", "output", "head", "classifier", "score")


def why_kept(linear: nn.Linear, fqn: str, choose: Filter | None, is_unused: bool, head: str | None) -> str | None:
    """Why a layer stays as it is; None: it is converted. `is_unused`: its parent does not call it. `head`: why it is an
    output head, if it is one."""
    why = _why_never(linear, is_unused)
    if why is not None:
        return why
    wanted = None if choose is None else choose(linear, fqn)
    if wanted is None:
        return head or _why_small(linear)
    if not isinstance(wanted, bool):
        raise TypeError(f"filter gave {wanted!r} for {fqn!r}: return True, False, or None to leave it to the defaults")
    return None if wanted else "left out by the filter"


def _why_never(linear: nn.Linear, is_unused: bool) -> str | None:
    """Layers that do not compute what ours would, or have no weight that ours could share."""
    if isinstance(linear, nn.LazyLinear):
        return "sizes are not known yet: run the model once, then convert"
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        return "has a forward of its own"
    if is_unused:
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


def _why_small(linear: nn.Linear) -> str | None:
    """Where there is little to gain."""
    for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size < SMALLEST:
            return f"small: {name} is {size}, below {SMALLEST}"
        if size % MULTIPLE:
            return f"{name} is {size}, no multiple of {MULTIPLE}"
    return None


def find_heads(model: nn.Module) -> dict[str, str]:
    """Names of output layers, whose errors go straight to the loss, and how they were found."""
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(embedding.weight) for embedding in embeddings}
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=None)
    heads: dict[str, str] = {}
    for fqn, linear in linears.items():
        *parents, name = fqn.split(".")
        if id(linear._parameters.get("weight")) in tied:
            heads[fqn] = "output head: its weight is an embedding's"
        elif name in HEADS and not any(parent.isdigit() for parent in parents):  # not one in each layer of a stack
            heads[fqn] = f"output head: its name is {name}"
    # Only the last of these: a hidden size may equal the vocabulary.
    for fqn in [fqn for fqn, linear in linears.items() if linear.out_features == vocabulary][-1:]:
        heads.setdefault(fqn, f"output head: {vocabulary} outputs, as many as an embedding has rows")
    return heads


@dataclass(frozen=True)
class Neighbours:
    """A norm that a linear follows in an `nn.Sequential`, and why the two are not one step, or ""."""

    sequential: nn.Sequential
    norm: Norm
    why_apart: str


def find_neighbours(model: nn.Module) -> dict[int, Neighbours]:
    """By the id of the linear. One that follows two norms, because it is used twice, has the first."""
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
