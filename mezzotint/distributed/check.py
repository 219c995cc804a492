"""`check_same`: this function checks that ranks which share weights mean the same by them."""

from typing import Any

from torch import nn

from mezzotint.comm.agreement import check_agreed, without_addresses
from mezzotint.recipe import Recipe, as_recipe
from mezzotint.region import recipe_in_force


def check_same(model: nn.Module, recipe: Recipe | str | None = None) -> None:
    """Check that all ranks which share weights of `model` have the same recipe and the same modules.

    The ranks of a group compare by themselves when a module first runs with the group, and when they trace a graph.
    They do not when a recipe changes in the middle of a run: call this after it has, or whenever you are in doubt. All
    ranks must call it, outside of compiled code. It uses no collective, and waits for the other ranks of each group.

    Args:
        model: The model, whose modules that were made with `tp_group`, or split by a style, are compared with those of
            the other ranks of their group: sizes, how they are split, dtype, `sequence_parallel`. Modules that are
            whole are not.
        recipe: What the model runs with, a recipe or its short name. None means that of the region around this call.

    Raises:
        ValueError: If they differ, on every rank of the group, with what each of them has; on a rank that asks alone,
            after the timeout of the default group.
        TypeError: If `model` is no module.

    Example:
        >>> import mezzotint as mz
        >>> from mezzotint.distributed import check_same
        >>> check_same(mz.Linear(16, 16, device="cpu"), "mxfp8")  # shared with nobody: nothing to compare
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give an nn.Module")
    chosen = recipe_in_force() if recipe is None else as_recipe(recipe)
    by_group: dict[str, tuple[Any, dict[str, str]]] = {}
    for path, module in model.named_modules():
        group: Any = getattr(module, "_sharing_group", _no_group)()
        if group is not None:
            described: Any = module._describe()
            by_group.setdefault(group.group_name, (group, {}))[1][f"module {path or type(module).__name__}"] = described
    for group, modules in by_group.values():
        check_agreed(group, recipe=without_addresses(chosen), **modules)


def _no_group() -> None:
    return None
