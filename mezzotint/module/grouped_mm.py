"""grouped_mm: it multiplies groups of rows with matrices that lie in one tensor, as the experts of many models do."""

from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.functional.autograd import run_core
from mezzotint.functional.grouped_linear import GROUPED_LINEAR, GroupedLinearFwdArgs, group_tensors
from mezzotint.functional.linear import LinearQuantizers, Needs, WeightGrad, needs_of
from mezzotint.functional.weight import quantize_weight, quantize_weights
from mezzotint.layer.base import activation_dtype
from mezzotint.layer.boundary import dequantized
from mezzotint.layer.plan import LayerConfig, Plan, plan_anew
from mezzotint.recipe import Recipe, Rules, check_recipe
from mezzotint.region import NO_OPTIONS, recipe_in_force
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import require


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | None = None,
    *,
    bias: torch.Tensor | None = None,
    name: str = "",
) -> torch.Tensor:
    """Multiply each group of rows of a matrix by a matrix of its own, with the signature of
    `torch.nn.functional.grouped_mm`.

    The product and its gradients are quantized as in `GroupedLinear`. A recipe that keeps state from one call to the
    next (delayed scaling) is refused: use `GroupedLinear`.

    Args:
        a: The rows (M, K), group by group.
        b: The matrices (E, K, N), one for each group.
        offs: The ends of the groups, int32 [E]; they must not fall, and the last one is M. A group may be empty. Their
            values are read, which waits for the GPU if they are there.
        recipe: The recipe. None (the default) means what the `autocast` around the call says; outside of any nothing is
            quantized.
        bias: What is added to the rows of each group (E, N), or None.
        name: The name of the roles which a `CustomRecipe` is asked for.

    Returns:
        The result (M, N).

    Raises:
        ValueError: If shapes do not fit, or the recipe keeps state.
        TypeError: If an argument is of a wrong type.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> a, b = torch.randn(48, 64), torch.randn(2, 64, 32)
        >>> offs = torch.tensor([16, 48], dtype=torch.int32)
        >>> mz.grouped_mm(a, b, offs, mz.recipe.MXFP8BlockScaling()).shape
        torch.Size([48, 32])
    """
    _check(a, b, offs, bias)
    if recipe is None:
        recipe = recipe_in_force()
    else:
        check_recipe(recipe)
        recipe = recipe.frozen()
    return multiply_groups(a, b.transpose(1, 2), sizes_of(offs, a.shape[0]), bias, recipe, name)


def multiply_groups(
    x: Any, weight: torch.Tensor, splits: tuple[int, ...], bias: torch.Tensor | None, recipe: Recipe | None, name: str
) -> torch.Tensor:
    """Multiply groups of x (M, K) by weight (E, N, K), add bias (E, N), and return (M, N), under a recipe or in high
    precision."""
    dtype = activation_dtype(x)
    x, weight = dequantized(x).to(dtype), weight.contiguous()
    has_grad = torch.is_grad_enabled()
    needs = needs_of(
        has_grad and x.requires_grad,
        has_grad and weight.requires_grad,
        has_grad and bias is not None and bias.requires_grad,
    )
    plan = _plan(recipe, needs, name, dtype)
    quantizers = plan.quantizers[0]
    count = weight.shape[0]
    none = (None,) * count
    args = GroupedLinearFwdArgs(
        x=x,
        weights=(weight,),
        biases=() if bias is None else (bias,),
        weights_q=_weights_q(group_tensors((weight,), 2), quantizers),
        splits=splits,
        needs=needs,
        quantizers=(quantizers,) * count,
        numerics=plan.numerics[0],
        wgrads=tuple([WeightGrad(weight.dtype, is_slice=True) for _ in range(count)]),
        input_scales=none,
        grad_scales=none,
        saves_original_input=False,
        grad_state=None,
    )
    (y,) = run_core(GROUPED_LINEAR, args, needs.input or needs.weight or needs.bias)
    return y


_CONFIG = LayerConfig("grouped_linear", ("",), False, (None,))


def _plan(recipe: Recipe | None, needs: Needs, name: str, dtype: torch.dtype) -> Plan:
    """Return the plan of one group, which holds for all: they lie in one tensor, which has one name."""
    if isinstance(recipe, Rules):
        recipe = recipe.resolve(name, ("",))
    if recipe is None or recipe.answers_once():
        plan = _CONFIG.plan(recipe, "", dtype, (needs,), False, NO_OPTIONS)
    else:
        plan = plan_anew(_CONFIG, recipe, name, dtype, (needs,), False, NO_OPTIONS)
    if plan.request is not None:
        raise ValueError(
            f"recipe is {type(recipe).__name__}, which scales {name or 'a tensor of grouped_mm'} by what earlier calls "
            "saw: grouped_mm keeps nothing from one call to the next. Use GroupedLinear, or a recipe without state, "
            "such as Float8CurrentScaling; or keep experts in high precision (convert(model, filter=...))"
        )
    return plan


def _weights_q(groups: tuple[torch.Tensor, ...], quantizers: LinearQuantizers) -> tuple[Any, ...]:
    quantizer, count = quantizers.weight, len(groups)
    together = quantize_weights(groups, (quantizer,) * count, (None,) * count)
    if together is not None:
        return together[0]
    return tuple([quantize_weight(group, quantizer)[0] for group in groups])


def sizes_of(offs: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Return the number of rows of each group, given the ends of the groups."""
    sizes = tuple(torch.diff(offs, prepend=offs.new_zeros(1)).tolist())
    total = 0
    for size in sizes:
        total += size
        _require_ends(size >= 0, offs, rows)
    _require_ends(total == rows, offs, rows)
    return sizes


def _require_ends(holds: bool, offs: torch.Tensor, rows: int) -> None:
    require(
        holds,
        lambda: "offs must not fall, and end with the rows of a",
        lambda: f"offs is {offs.tolist()}: give ends that do not fall, the last one {rows}, the rows of a",
    )


def _check(a: Any, b: Any, offs: Any, bias: Any) -> None:
    for name, tensor in (("a", a), ("b", b), ("offs", offs)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}: give a tensor")
    if isinstance(b, QuantizedTensorStorage) or b.dtype not in HIGH_PRECISION:
        raise TypeError(f"b is {type(b).__name__} of {b.dtype}: give a tensor of float32, float16 or bfloat16")
    if a.dim() != 2 or b.dim() != 3 or b.shape[0] == 0 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)}, b {tuple(b.shape)}: give (M, K) and (E, K, N), one matrix or more")
    if tuple(offs.shape) != (b.shape[0],) or offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}: give the end of each of the {b.shape[0]} groups, int32"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[0], b.shape[2]):
        raise ValueError(f"bias is {tuple(bias.shape)}: give {(b.shape[0], b.shape[2])}, or None")
