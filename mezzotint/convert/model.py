"""This module has `convert` and `unconvert`, which swap the layers of a model, and
`convert_report`, which tells what was done."""

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from mezzotint.convert.experts import convert_experts, is_experts
from mezzotint.convert.modules import Converted, convert_linear, convert_root, convert_sequential, restore
from mezzotint.convert.report import ConversionReport, ReportEntry
from mezzotint.convert.rules import (
    CONVERTED,
    ConversionRules,
    Filter,
    Neighbours,
    can_be_converted,
    find_heads,
    find_neighbours,
    find_unused,
    is_linear,
    why_other,
)
from mezzotint.convert.saving import leave_nothing_out, leave_out_state
from mezzotint.layer.base import Layer
from mezzotint.layer.bind import bind_rules, of_module
from mezzotint.layer.names import Named, join_path
from mezzotint.memory import check_memory
from mezzotint.recipe import MixedRecipe, Recipe, Rules, check_recipe

ModelT = TypeVar("ModelT", bound=nn.Module)
Outcome = tuple[str, str | None, str]
_REPORT = "_mezzotint_report"


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give an nn.Module")


def convert_report(model: nn.Module) -> ConversionReport:
    """Return the report on what became of the weights of a model that `convert` was called with.

    Args:
        model: The model that `convert` returned.

    Returns:
        A report with one entry for each weight; as text it is a table.

    Raises:
        ValueError: If the model was not converted.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> model = mz.convert(model, filter=lambda module, name: True)
        >>> str(mz.convert_report(model)).count("Linear") >= 2
        True
    """
    _check_model(model)
    report = vars(model).get(_REPORT)
    if report is None:
        raise ValueError(
            f"model is a {type(model).__name__} that was not converted: call mezzotint.convert(model) first"
        )
    return report


def convert(
    model: ModelT,
    recipe: Recipe | None = None,
    *,
    filter: Filter | None = None,
    inplace: bool = True,
    memory: str | None = None,
) -> ModelT:
    """Swap a model's linear layers for those of Mezzotint, which share the parameters, and return it; `convert_report`
    tells what was done.

    It swaps every `nn.Linear` and, in models of Hugging Face's transformers, `Conv1D` and experts whose weights are 3-D
    parameters. A `CustomRecipe` and `Rules` know a layer by its path in the model, such as "layers.0.mlp.up_proj".

    Args:
        model: The model whose layers are swapped.
        recipe: The recipe under which the model and each converted layer run by themselves, whatever an `autocast`
            around them says. With None (the default) the `autocast` around the call decides, and without one nothing is
            quantized.
        filter: A function `filter(module, fully_qualified_name)` that returns True to convert a layer, False to keep
            it, and None to leave it to the defaults, which keep output heads and small layers as they are.
        inplace: Whether the model itself is changed (True, the default) or a copy of it.
        memory: The memory mode of every layer: "default", "lean" or "compressed" (`mezzotint/memory.py`), or None for
            that of the `autocast` around the call.

    Returns:
        The converted model.

    Raises:
        TypeError: If `model` is no module, `recipe` no recipe or `filter` no function.
        ValueError: If there is no such memory mode.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> model = mz.convert(model, mz.recipe.MXFP8BlockScaling(), filter=lambda module, name: True)
        >>> isinstance(model[0], mz.Linear), isinstance(model[0], torch.nn.Linear)
        (True, True)
        >>> model(torch.randn(32, 64)).shape
        torch.Size([32, 64])
    """
    _check_model(model)
    if recipe is not None:
        check_recipe(recipe)
        recipe = recipe.frozen()
    if filter is not None and not callable(filter):
        raise TypeError(f"filter is {type(filter).__name__}: give a function of (module, name), or None")
    if memory is not None:
        check_memory("convert", memory)
    if not inplace:
        model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    rules, neighbours = ConversionRules(filter, recipe, find_heads(model), find_unused(model)), find_neighbours(model)
    # Everything is decided before the first layer is touched, because a filter may raise.
    kept = {
        fqn: rules.why_kept(module, fqn)
        for fqn, module in modules.items()
        if can_be_converted(module) and not isinstance(module, CONVERTED)
    }
    for fqn, module in modules.items():  # a layer converted before keeps the name that its recipe knows
        if isinstance(module, Named) and not isinstance(module, Converted):
            module._take_path(fqn)
    for fqn, why in kept.items():
        if why is None:
            _convert(modules[fqn], recipe, neighbours.get(id(modules[fqn])))
            modules[fqn]._take_path(fqn)
    if recipe is not None and not isinstance(model, CONVERTED):
        convert_root(model, recipe)
    if memory is not None:
        for module in model.modules():
            if isinstance(module, Layer):
                module.memory = memory
    if isinstance(recipe, Rules):
        bind_rules(model, recipe)
    leave_out_state(model)
    region = vars(model).get("_mezzotint_recipe")
    vars(model)[_REPORT] = ConversionReport(tuple(_entries(modules, kept, neighbours, region)))
    return model


def _convert(module: Any, recipe: Recipe | None, neighbours: Neighbours | None) -> None:
    if is_experts(module):
        convert_experts(module, recipe)
    elif neighbours is None or neighbours.why_apart:
        convert_linear(module, recipe, None)
    else:
        convert_linear(module, recipe, neighbours.norm)
        convert_sequential(neighbours.sequential)


def _entries(
    modules: dict[str, Any], kept: dict[str, str | None], neighbours: dict[int, Neighbours], region: Recipe | None
) -> Iterator[ReportEntry]:
    """Yield an entry for each linear layer, and for each other parameter with two or more dimensions.

    `region` is the recipe that the model's forward puts in force.
    """
    seen: set[int] = set()
    for fqn, module in modules.items():
        own = {name: parameter for name, parameter in module._parameters.items() if _is_weight(name, parameter)}
        if is_linear(module):
            size = sum(_new_elements(parameter, seen) for parameter in own.values())
            yield ReportEntry(fqn, *_outcome(module, kept.get(fqn), neighbours.get(id(module)), region), size)
            continue
        for name, parameter in own.items():
            outcome = _outcome(module, kept.get(fqn) or why_other(module, parameter), None, region)
            if name.endswith("bias") and outcome[1] is not None:
                outcome = outcome[0], None, "bias: it is added in high precision"
            yield ReportEntry(join_path(fqn, name).removesuffix(".weight"), *outcome, _new_elements(parameter, seen))


def _outcome(module: Any, why: str | None, neighbours: Neighbours | None, region: Recipe | None) -> Outcome:
    """Return what a weight's module was, what it is now or None, and why."""
    if isinstance(module, CONVERTED):
        why = _name(module, module.recipe)
        if neighbours is not None and not module.pair:
            why += f"; apart from the norm before it: {neighbours.why_apart}"
        return module._mezzotint_theirs.__name__, module._mezzotint_label, why
    kind = type(module).__name__
    if isinstance(module, Layer):
        return kind, kind, f"{_name(module, region)}; Mezzotint's own"
    return kind, None, why or ""


def _name(module: Any, recipe: Recipe | None) -> str:
    """Return the name of what a module runs with: its recipe, or what rules give it."""
    if recipe is None:
        return "as autocast says"
    own = of_module(module, recipe) if isinstance(module, Layer) else recipe
    if isinstance(own, MixedRecipe):
        return "several recipes, by rules"
    return "high precision, by a rule" if own is None else type(own).__name__


def _is_weight(name: str, parameter: Any) -> bool:
    if is_lazy(parameter):
        return name == "weight"  # its dimensions are not known
    return parameter is not None and parameter.dim() > 1


def _new_elements(parameter: Any, seen: set[int]) -> int:
    """Return the number of a parameter's elements, or 0 if an earlier entry has counted them."""
    if is_lazy(parameter) or id(parameter) in seen:
        return 0
    seen.add(id(parameter))
    return parameter.numel()


def unconvert(model: ModelT) -> ModelT:
    """Restore the layers that a model had before `convert`, in place, with the parameters that it has now, and return
    it.

    Args:
        model: A converted model.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is no module.
        ValueError: If a converted layer was changed by another library after that, which must be undone first.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = mz.unconvert(mz.convert(model, filter=lambda module, name: True))
        >>> type(model[0]) is torch.nn.Linear
        True
    """
    _check_model(model)
    converted = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, Converted)]
    for fqn, module in converted:
        if "_mezzotint_theirs" not in vars(type(module)):
            raise ValueError(f"{fqn!r} is a {type(module).__name__}, made of a converted module: undo that first")
    for _, module in converted:
        restore(module)
    leave_nothing_out(model)
    vars(model).pop(_REPORT, None)
    return model
