"""The flatten registry: each storage class declares its buffers once, and everything that moves them is derived from
that.

    _FLATTEN_TENSOR_BUFFERS = ((attribute, constructor kwarg), ...)    inner tensors, in the quantizer's order
    _VALUES                 = ((attribute, constructor kwarg, default), ...)    plain values

`__init_subclass__` registers the class under its qualified name, by which checkpoints and traced code refer to it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.tracing import traced_as

_CLASSES: dict[str, type["Flattenable"]] = {}


class Flattenable:
    """A `Flattenable` holds its declared buffers and values as attributes; a buffer that is not held is None."""

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = ()
    _VALUES: ClassVar[tuple[tuple[str, str, Any], ...]] = ()
    _FIELDS: ClassVar[tuple[tuple[str, str, Any], ...]] = ()  # both together: attribute, constructor kwarg, default
    _DEFAULTS: ClassVar[dict[str, Any]] = {}  # attribute → default, and constructor kwarg → attribute
    _ATTRIBUTES: ClassVar[dict[str, str]] = {}

    _dtype: torch.dtype

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._FIELDS = (*[(name, kwarg, None) for name, kwarg in cls._FLATTEN_TENSOR_BUFFERS], *cls._VALUES)
        cls._DEFAULTS = {attribute: default for attribute, _, default in cls._FIELDS}
        cls._ATTRIBUTES = {kwarg: attribute for attribute, kwarg, _ in cls._FIELDS}
        _CLASSES[qualified_name(cls)] = cls

    def _assign(self, dtype: torch.dtype, fields: dict[str, Any]) -> None:
        """Set every declared attribute from the constructor kwargs `fields`; raise TypeError for an undeclared one."""
        self._check_fields(fields)
        _set_each(self, dtype, fields)

    @classmethod
    def _check_fields(cls, fields: Iterable[str]) -> None:
        """Raise TypeError if one of these constructor kwargs is not declared."""
        declared = [kwarg for _, kwarg, _ in cls._FIELDS]
        unknown = sorted([name for name in fields if name not in declared])
        if unknown:
            raise TypeError(f"{cls.__name__} got {unknown}, which it does not declare; it takes {declared}")

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (attribute, tensor) for every buffer that is held."""
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            buffer = getattr(self, attribute)
            if buffer is not None:
                yield attribute, buffer

    def _plain_values(self) -> dict[str, Any]:
        """Return the plain values as constructor kwargs."""
        return {kwarg: getattr(self, attribute) for attribute, kwarg, _ in self._VALUES}

    @classmethod
    def _restore_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values`, in which enums were pickled as ints, with a `DType` for each whose default is one."""
        enums = {kwarg for _, kwarg, default in cls._VALUES if isinstance(default, DType)}
        return {k: DType(v) if k in enums else v for k, v in values.items()}

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor kwargs of an object with the same buffers and values."""
        buffers = {kwarg: getattr(self, attribute) for attribute, kwarg in self._FLATTEN_TENSOR_BUFFERS}
        return {**buffers, **self._plain_values()}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return the names of the held buffers, and the context that `__tensor_unflatten__` needs besides them."""
        values = self._plain_values()
        quantizer = values.get("quantizer")
        if quantizer is not None and not quantizer._is_value():
            values["quantizer"] = None  # it holds tensors, and a graph cannot guard on those
        return [name for name, _ in self._buffers()], flatten_context(type(self), self._dtype, values)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor],
        context: dict[str, Any],
        outer_size: Any = None,
        outer_stride: Any = None,
    ) -> Any:
        """Rebuild the object from inner tensors by attribute name and the context of `__tensor_flatten__`."""
        cls, values = context["cls"], context["nontensor_kwargs"]
        kwargs = {kwarg: inner_tensors.get(attribute) for attribute, kwarg in cls._FLATTEN_TENSOR_BUFFERS}
        kwargs.update({kwarg: values[kwarg] for _, kwarg, _ in cls._VALUES})
        made = cls._build(outer_size, values["fake_dtype"], kwargs)
        return made.requires_grad_(True) if context["requires_grad"] else made

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError(f"{cls.__name__} must say how it is built")


def _set_each(made: Any, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    made._dtype = dtype
    for attribute, kwarg, default in made._FIELDS:
        setattr(made, attribute, fields.get(kwarg, default))


@traced_as(_set_each)
def fill(made: Any, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    """Set every declared attribute of an object that is no tensor from `fields`, all of whose names are declared."""
    held = made.__dict__
    held.update(made._DEFAULTS)
    held["_dtype"] = dtype
    held.update(zip(map(made._ATTRIBUTES.__getitem__, fields), fields.values(), strict=True))


def flatten_context(
    cls: type, dtype: torch.dtype, values: dict[str, Any], requires_grad: bool = False
) -> dict[str, Any]:
    """Return what a graph knows of a quantized tensor besides its buffers: the class, the nominal dtype (the
    high-precision dtype that the tensor stands for) and plain values.

    For an existing tensor `requires_grad` is False: whoever unflattens it, autograd or the compiler, tracks that.
    """
    return {
        "cls": cls,
        "is_tensor": issubclass(cls, torch.Tensor),
        "requires_grad": requires_grad,
        "nontensor_kwargs": {"fake_dtype": dtype, **values},
    }


def qualified_name(cls: type) -> str:
    """Return module.qualname, by which the registry, graphs and checkpoints refer to a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_by_name(name: str) -> type[Flattenable]:
    """Return the storage or tensor class of that qualified name; raise ValueError if there is none."""
    found = _CLASSES.get(name)
    if found is None:
        raise ValueError(
            f"no quantized class is called {name!r}: import the module that defines it; known: {sorted(_CLASSES)}"
        )
    return found
