"""The flatten registry: each storage declares its buffers once, and everything that moves them is derived.

    _FLATTEN_TENSOR_BUFFERS = ((attribute, constructor kwarg), ...)    inner tensors, in the quantizer's order
    _VALUES                 = ((attribute, constructor kwarg, default), ...)    plain values

`__init_subclass__` enters the class under its qualified name: how checkpoints, and code that is traced, name it.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from mezzotint.constants import DType

_CLASSES: dict[str, type["Flattenable"]] = {}


class Flattenable:
    """Holds the declared buffers and values as attributes; a buffer that is not held is None."""

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = ()
    _VALUES: ClassVar[tuple[tuple[str, str, Any], ...]] = ()

    _dtype: torch.dtype

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[qualified_name(cls)] = cls

    def _assign(self, dtype: torch.dtype, fields: dict[str, Any]) -> None:
        """Set every declared attribute from constructor kwargs; what is not declared is an error."""
        self._dtype = dtype
        for attribute, kwarg in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, fields.pop(kwarg, None))
        for attribute, kwarg, default in self._VALUES:
            setattr(self, attribute, fields.pop(kwarg, default))
        if fields:
            declared = [k for _, k in self._FLATTEN_TENSOR_BUFFERS] + [k for _, k, _ in self._VALUES]
            raise TypeError(
                f"{type(self).__name__} got {sorted(fields)}, which it does not declare; it takes {declared}"
            )

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(attribute, tensor) of every buffer that is held."""
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            buffer = getattr(self, attribute)
            if buffer is not None:
                yield attribute, buffer

    def _plain_values(self) -> dict[str, Any]:
        """Plain values as constructor kwargs."""
        return {kwarg: getattr(self, attribute) for attribute, kwarg, _ in self._VALUES}

    @classmethod
    def _restore_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Values that were pickled as plain ints, with their enums again: those whose default is one."""
        enums = {kwarg for _, kwarg, default in cls._VALUES if isinstance(default, DType)}
        return {k: DType(v) if k in enums else v for k, v in values.items()}

    def get_metadata(self) -> dict[str, Any]:
        """Constructor kwargs that make the same object: buffers and values."""
        buffers = {kwarg: getattr(self, attribute) for attribute, kwarg in self._FLATTEN_TENSOR_BUFFERS}
        return {**buffers, **self._plain_values()}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The names of the buffers that are held, and what `__tensor_unflatten__` needs beside them."""
        values = self._plain_values()
        quantizer = values.get("quantizer")
        if quantizer is not None and not quantizer._is_value():
            values["quantizer"] = None  # it holds tensors: no metadata that a graph could guard on
        return [name for name, _ in self._buffers()], flatten_context(type(self), self._dtype, values)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor],
        context: dict[str, Any],
        outer_size: Any = None,
        outer_stride: Any = None,
    ) -> Any:
        """Inner tensors by attribute name, and the context of `__tensor_flatten__` → the object."""
        cls, values = context["cls"], context["nontensor_kwargs"]
        kwargs = {kwarg: inner_tensors.get(attribute) for attribute, kwarg in cls._FLATTEN_TENSOR_BUFFERS}
        kwargs.update({kwarg: values[kwarg] for _, kwarg, _ in cls._VALUES})
        made = cls._build(outer_size, values["fake_dtype"], kwargs)
        return made.requires_grad_(True) if context["requires_grad"] else made

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError(f"{cls.__name__} must say how it is built")


def flatten_context(
    cls: type, dtype: torch.dtype, values: dict[str, Any], requires_grad: bool = False
) -> dict[str, Any]:
    """Return what a graph knows of a quantized tensor beside its buffers: the class, the nominal dtype, plain values.

    Of a tensor that is there, `requires_grad` is False: whoever unflattens it, autograd or the compiler, keeps that.
    """
    return {
        "cls": cls,
        "is_tensor": issubclass(cls, torch.Tensor),
        "requires_grad": requires_grad,
        "nontensor_kwargs": {"fake_dtype": dtype, **values},
    }


def qualified_name(cls: type) -> str:
    """module.qualname: how the registry, graphs and checkpoints name a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_by_name(name: str) -> type[Flattenable]:
    """The storage or tensor class of that qualified name."""
    found = _CLASSES.get(name)
    if found is None:
        raise ValueError(
            f"no quantized class is called {name!r}: import the module that defines it; known: {sorted(_CLASSES)}"
        )
    return found
