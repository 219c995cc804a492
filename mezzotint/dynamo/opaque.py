"""Registration of quantizers as value-opaque types, so that a custom op may take one and a graph bakes it in."""

import inspect
from types import FunctionType
from typing import Any

from mezzotint.dynamo.trace import trace_quantizers
from mezzotint.tensor.flatten import qualified_name
from mezzotint.tensor.opaque import register_value
from mezzotint.tensor.quantizer import Quantizer, value_classes

_BUILT_IN = value_classes()

# The compiler traces into these methods, which take or return tensors. All other methods are queries: called with
# constants, they return what is a constant to the compiler.
_TRACED = frozenset(
    {
        "quantize",
        "__call__",
        "quantize_impl",
        "multi_quantize",
        "update_quantized",
        "make_empty",
        "alloc_tensors",
        "_built",
        "calibrate",
        "create_tensor_from_data",
        "is_quantizable",
    }
)
_QUESTIONS = frozenset(name for cls in _BUILT_IN for name in dir(cls)) - _TRACED


def is_traced(cls: type, name: str) -> bool:
    """Return whether the compiler traces into this method of a quantizer class, whatever it is called with: one of
    those above or, in a user's class, one that this package's classes do not have."""
    method = inspect.getattr_static(cls, name, None)
    return isinstance(method, FunctionType) and name not in _QUESTIONS


def register_value_opaque_quantizer(cls: type) -> type:
    """Make the instances of a quantizer class values, and return the class; this can be used as a decorator.

    Two instances are then equal if all attributes are, and a graph bakes one in. Attributes must be plain: ints, bools,
    floats, strings, enums, or quantizers that are values. On a PyTorch without the API for opaque types, the class is
    one of values in eager code alone.

    Args:
        cls: The class, derived from `Quantizer`.

    Returns:
        The class.

    Raises:
        TypeError: If it is none.

    Example:
        >>> import mezzotint as mz
        >>> @mz.register_value_opaque_quantizer
        ... class Mine(mz.MXFP8Quantizer):
        ...     pass
        >>> Mine() == Mine(), Mine() == Mine(columnwise=False)
        (True, False)
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"cls is {cls!r}: give a subclass of Quantizer")
    if register_value(cls, is_traced):
        cls._registered_as = qualified_name(cls)
    cls._by_value = True
    return cls


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Return whether the compiler takes `quantizer` as a constant.

    Args:
        quantizer: A quantizer, or anything else.

    Returns:
        True or False.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.is_value_opaque_quantizer(mz.MXFP8Quantizer())
        True
        >>> mz.is_value_opaque_quantizer(mz.Float8Quantizer(torch.ones(1), torch.zeros(1), mz.DType.kFloat8E4M3))
        False
    """
    return isinstance(quantizer, Quantizer) and quantizer._is_constant()


for _cls in _BUILT_IN:
    register_value_opaque_quantizer(_cls)

trace_quantizers(is_traced)
