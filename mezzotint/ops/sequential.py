"""ops.Sequential: it runs modules one after the other, and fuses runs of fusible operations among them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzotint.layer.names import Named, name_modules, name_new
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fuser import OperationFuser
from mezzotint.ops.op import FusibleOperation
from mezzotint.tracing import eager_only, memoized

Segment = OperationFuser | nn.Module


class Sequential(Named):
    """This container is like `torch.nn.Sequential`, for operations and other modules, and runs neighbouring operations
    as one where there is a fusion for them.

    A run of operations is one step: hooks of an operation in it are not called; those of this container and of other
    modules are. An operation whose class writes a `forward` of its own is called like any other module. Modules without
    a name get their path in this container as their name, which recipes see in their roles.

    Args:
        *args: The modules, in order; or one dict of names and modules.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mlp = mz.ops.Sequential(
        ...     mz.ops.LayerNorm(64, device="cpu"),
        ...     mz.ops.Linear(64, 128, device="cpu"),
        ...     mz.ops.GELU(),
        ...     mz.ops.Linear(128, 64, device="cpu"),
        ... )
        >>> with mz.autocast("mxfp8"):
        ...     y = mlp(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 64])
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.name = None
        self._grouped: Any = None  # the memo of `_module_groups`
        if len(args) == 1 and isinstance(args[0], dict):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(args)
        self._module_groups  # noqa: B018  channels are checked, and state is made, here and not in a graph

    # A list of modules

    def _key(self, index: Any) -> str:
        keys = list(self._modules)
        if isinstance(index, str):
            if index not in self._modules:
                raise IndexError(f"index is {index!r}: this Sequential has {keys}")
            return index
        position = int(index)
        if not -len(keys) <= position < len(keys):
            raise IndexError(f"index is {index}: this Sequential has {len(keys)} modules")
        return keys[position]

    def _replace(self, modules: Iterable[nn.Module]) -> None:
        """Replace all modules by these, numbered."""
        modules = list(modules)
        for module in modules:
            _check_module(module)
        self._modules.clear()
        for i, module in enumerate(modules):
            self._modules[str(i)] = module
            name_modules(module, self._part(str(i)))
        self._grouped = None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(dict(list(self._modules.items())[index]))
        return self._modules[self._key(index)]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        _check_module(module)
        key = self._key(index)
        self._modules[key] = module
        name_new(module, self._part(key))
        self._grouped = None

    def __delitem__(self, index: Any) -> None:
        gone = list(self._modules)[index] if isinstance(index, slice) else [self._key(index)]
        self._replace([module for key, module in self._modules.items() if key not in gone and module is not None])

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __add__(self, other: Iterable[nn.Module]) -> "Sequential":
        return type(self)(*self, *other)

    def __iadd__(self, other: Iterable[nn.Module]) -> "Sequential":
        return self.extend(other)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        if module is not None:
            name_new(module, self._part(name))
        self._grouped = None

    def append(self, module: nn.Module) -> "Sequential":
        _check_module(module)
        number = len(self)
        while str(number) in self._modules:  # the number may be taken, because a slice keeps its numbers
            number += 1
        self.add_module(str(number), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> "Sequential":
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, idx: int, module: nn.Module) -> "Sequential":
        if not -len(self) <= idx <= len(self):
            raise IndexError(f"idx is {idx}: this Sequential has {len(self)} modules")
        modules = list(self)
        modules.insert(idx, module)
        self._replace(modules)
        return self

    def pop(self, idx: Any = -1) -> Any:
        module = self[idx]
        del self[idx]
        return module

    # Groups

    @property
    def _module_groups(self) -> list[Segment]:
        """Return runs of operations, each in a fuser, and the other modules between them."""
        return module_groups(self)

    def fused_ops(self) -> dict[str, list[list[Any]]]:
        """Return the operations of each pipeline as its last run in eager code fused them, in the order that they run
        in."""
        fusers = [group for group in self._module_groups if isinstance(group, OperationFuser)]
        return {
            "forward": [[op for op, _ in fuser._forward_ops] for fuser in fusers],
            "backward": [[op for op, _ in fuser._backward_ops[::-1]] for fuser in fusers],
        }

    def forward(
        self, input: torch.Tensor, *extra_inputs: Any, op_kwargs: dict[Any, Any] | None = None
    ) -> torch.Tensor | Any:
        """Run the modules, and return the output, or (output, *extra outputs).

        `extra_inputs` go to the operations that take some, in order. `op_kwargs` maps a module of this Sequential, or
        its index, to keyword arguments of its forward; for `ops.Linear` those of its BasicLinear.
        """
        modules = list(self._modules.values())
        given = self._kwargs_by_module(op_kwargs)
        groups, start = module_groups(self), 0
        _check_count(groups, len(extra_inputs))
        rest = list(extra_inputs)
        extra_outputs: list[Any] = []
        x = input
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x, **given[start])
                start += 1
                continue
            count, kwargs = _kwargs_of(group, modules[start:], given[start:])
            own: list[Any] = []
            if rest:
                wanted = group.num_extra_inputs
                own, rest = rest[:wanted], rest[wanted:]
            made = group(x, *own, basic_op_kwargs=kwargs)
            start += count
            if isinstance(made, tuple):
                x, *extra = made
                extra_outputs.extend(extra)
            else:
                x = made
        if rest:
            raise ValueError(f"{len(rest)} of {len(extra_inputs)} extra inputs are left: no operation takes them")
        return (x, *extra_outputs) if extra_outputs else x

    if TYPE_CHECKING:
        __call__ = forward

    def _kwargs_by_module(self, op_kwargs: dict[Any, Any] | None) -> list[dict[str, Any]]:
        """Return the keyword arguments of each module, in order."""
        given: list[dict[str, Any]] = [{} for _ in self._modules]
        if not op_kwargs:
            return given
        modules = list(self)
        for key, kwargs in op_kwargs.items():
            if isinstance(key, nn.Module):
                places = [i for i, module in enumerate(modules) if module is key]
            else:
                places = [list(self._modules).index(self._key(key))]
            if not places:
                raise ValueError(f"op_kwargs has {type(key).__name__}, which is no module of this Sequential")
            for place in places:
                given[place] = dict(kwargs)
        return given


def module_groups(sequential: Sequential) -> list[Segment]:
    """Return what `Sequential._module_groups` does. In a graph neither that property nor an iterator of a container is
    asked for: PyTorch takes them for objects that may change (see `layer/configured.py`)."""
    modules = tuple(sequential._modules.values())
    return memoized(sequential, "_grouped", modules, lambda: _group(modules))


@eager_only()
def _check_count(groups: list[Segment], given: int) -> None:
    """Check the number of extra inputs before anything runs. In a graph each pipeline checks its own."""
    wanted = sum([group.num_extra_inputs for group in groups if isinstance(group, OperationFuser)])
    if given != wanted:
        raise ValueError(f"{given} extra inputs were given: the operations of this Sequential take {wanted}")


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(module).__name__} is no module: give torch.nn.Modules")


def _group(modules: Sequence[Any]) -> list[Segment]:
    groups: list[Segment] = []
    run: list[FusibleOperation] = []
    for module in modules:
        if isinstance(module, FusibleOperation) and not module._is_module:
            run.append(module)
            continue
        if run:
            groups.append(OperationFuser(run))
            run = []
        groups.append(module)
    if run:
        groups.append(OperationFuser(run))
    return groups


def _kwargs_of(
    fuser: OperationFuser, modules: list[Any], given: list[dict[str, Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """Return how many modules the fuser runs, and the keyword arguments of each of its basic operations."""
    kwargs: list[dict[str, Any]] = []
    count = 0
    while len(kwargs) < len(fuser._basic_ops):
        module = modules[count]
        kwargs.append(given[count])
        if isinstance(module, FusedOperation):
            kwargs.extend([{} for _ in module._parts_in_order()[1:]])
        count += 1
    return count, kwargs
