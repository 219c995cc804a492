"""Binding rules to a model: `bind_rules` tells each module what `Rules` give it, by its path, and the functions here
say which recipe a module then has."""

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from mezzotint.layer.configured import config_of
from mezzotint.layer.names import Named, join_path, plain_path
from mezzotint.recipe import Recipe, Rules, choose_recipe
from mezzotint.region import recipe_in_force

_M = TypeVar("_M", bound=nn.Module)


def bind_rules(model: _M, rules: Rules, *, is_whole: bool = True) -> _M:
    """Tell each module of Mezzotint in a model what `Rules` give it, by its path in the model, and return the model.

    Call it when the model is made, and again when modules were added. `convert` does this by itself.

    Args:
        model: The model.
        rules: The `Rules`.
        is_whole: Whether a rule that matches nothing is an error (True, the default). For a part of a model, such as a
            stage of a pipeline, give False.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is no module or `rules` are none.
        ValueError: If a rule matches nothing, or a linear has no rule.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(mz.Linear(64, 64, device="cpu"), mz.Linear(64, 64, device="cpu"))
        >>> rules = mz.recipe.Rules([("0", None), ("*", "mxfp8")])
        >>> model = mz.bind_rules(model, rules)
        >>> with mz.autocast(rules):
        ...     y = model(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 64])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give an nn.Module")
    if not isinstance(rules, Rules):
        raise TypeError(f"rules is {type(rules).__name__}: give a mezzotint.recipe.Rules")
    rules = rules.frozen()
    found = list(named_linears(model))
    unused = rules.find_unused([(path, join_path(path, each)) for path, _, linears in found for each in linears])
    if unused and is_whole:
        known = ", ".join([join_path(path, linears[0]) for path, _, linears in found[:3]])
        known = f"its linears are {known}, …" if known else "no module of it is Mezzotint's"
        raise ValueError(f"the rule {unused[0]!r} matches nothing in the model: {known}")
    # All are resolved before the first one is bound, because resolving one may raise an error.
    resolved = [(module, path, rules.resolve(path, names, is_group=_is_group(module))) for path, module, names in found]
    for module, path, recipe in resolved:
        module._take_rule(path, rules, recipe)
    return model


def named_linears(model: nn.Module) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the path and module of everything that has linears of Mezzotint in it, and the names of those behind the
    path."""
    for path, module in model.named_modules():
        linears = module._linear_names() if isinstance(module, Named) else ()
        if linears:
            yield plain_path(path), module, linears


def _is_group(module: Any) -> bool:
    return getattr(module, "module_type", "") == "grouped_linear"


def of_module(module: Any, recipe: Recipe | None) -> Recipe | None:
    """Return the recipe that holds for one module: under rules, what they give it."""
    return choose_recipe(recipe, config_of(module))


def recipe_for(module: Any) -> Recipe | None:
    """Return the recipe in force for one module, which rules may choose, or None if it computes in high precision."""
    return of_module(module, recipe_in_force())


def of_tensor(module: Any, recipe: Recipe, gemm: int, tensor_type: str) -> Recipe | None:
    """Return the recipe of a tensor of a module, or None for high precision. A module that is made in
    `quantized_model_init`, before it can be bound to rules, is looked up by its name."""
    if not isinstance(recipe, Rules):
        return recipe.of(gemm, tensor_type)
    bound = [own for known, own in module._ruled if known == recipe]
    if bound:
        own = bound[0]
    elif module._name:
        own = recipe.resolve(module._name, module._linear_names() or ("",), is_group=_is_group(module))
    else:
        raise ValueError(
            f"quantized_model_init with Rules makes a {type(module).__name__} that has no name: give it its path in "
            "the model as name=..., or make the model on the meta device, call bind_rules, then reset_parameters"
        )
    return None if own is None else own.of(gemm, tensor_type)
