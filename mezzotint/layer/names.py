"""Names of modules: by them a recipe's rule is told where a tensor belongs (`QuantizerRole.name`).

A module that was made with `name=` keeps it. Any other has its path from the last root that named its modules: the
Mezzotint module that it is a part of, or what `name_modules` or `convert` was given. So the name is the one of
`named_modules`.
"""

from typing import Any

from torch import nn


class Named(nn.Module):
    """A `Named` module has a name. `_is_named` tells a name that a user gave from a path."""

    _name: str
    _is_named: bool

    @property
    def name(self) -> str:
        """Return the name as given, else the path."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {type(name).__name__}: give a string, or None")
        self._set_name(name or "", bool(name))

    def _set_name(self, name: str, is_given: bool) -> None:
        self._name, self._is_named = name, is_given

    def _linear_names(self) -> tuple[str, ...]:
        """Return what the module's linears are called behind its path, for `Rules`; "" stands for one that has the path
        itself."""
        return ()

    def _take_rule(self, path: str, rules: Any, recipe: Any) -> None:
        """Note the recipe that rules give the module, which is at this path."""

    def _take_path(self, path: str) -> None:
        """Set the path as the name, unless a name was given."""
        if not self._is_named:
            self._set_name(path, False)

    def _part(self, name: str) -> str:
        """Return the name of a submodule while it is made, because a recipe is asked for the format of its weights by
        that name."""
        return join_path(self._name, name)

    def _end_parts(self) -> None:
        """Mark the names of submodules as paths if this module was given no name. It is called when all submodules are
        made."""
        if not self._is_named:
            for part in self.modules():
                if isinstance(part, Named):
                    part._set_name(part._name, False)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch puts these into the path of a module that it wraps


def plain_path(path: str) -> str:
    """Return a path of `named_modules` without what compilers and checkpoints put into it, and without the place of a
    linear inside an operation that is made of others."""
    plain = ".".join([part for part in path.split(".") if part not in _WRAPPERS])
    return plain.removesuffix("basic_ops.0").removesuffix(".")


def join_path(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def name_modules(root: nn.Module, prefix: str = "") -> nn.Module:
    """Give every module of Mezzotint in a model its path as its name, and return the model.

    A `CustomRecipe` then sees these names in roles, such as "0", "1.fc1" and "1.fc2". Modules that were made with
    `name=` keep their names.

    Args:
        root: The model.
        prefix: What comes before each path. The default is nothing.

    Returns:
        The model.

    Raises:
        TypeError: If `root` is no module, or `prefix` no text.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(mz.Linear(64, 64, device="cpu"), mz.LayerNormMLP(64, 128, device="cpu"))
        >>> model = mz.name_modules(model, "encoder")
        >>> model[1].name
        'encoder.1'
    """
    if not isinstance(root, nn.Module):
        raise TypeError(f"root is {type(root).__name__}: give an nn.Module")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {type(prefix).__name__}: give a string")
    for path, module in root.named_modules():
        if isinstance(module, Named):
            module._take_path(join_path(prefix, path))
    return root


def name_new(module: Any, path: str) -> None:
    """Name the modules that have no name yet by their place in a container of Mezzotint."""
    if not isinstance(module, Named):
        for key, child in module.named_children():
            name_new(child, join_path(path, key))
    elif not module._name:
        name_modules(module, path)
