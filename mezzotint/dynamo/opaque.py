"""Registering quantizers as value-opaque types, so that a custom op may take one and a graph bakes it in."""

import inspect
from types import FunctionType
from typing import Any

from mezzotint.dynamo.trace import trace_quantizers
from mezzotint.tensor.flatten import qualified_name
from mezzotint.tensor.opaque import register_value
from mezzotint.tensor.quantizer import Quantizer, value_classes

_BUILT_IN = value_classes()

# Methods of ours that take or give tensors: the compiler traces into them. All others are questions, whose answer is a
# constant to it where what they are asked with is one.
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
    """Whether the compiler traces into this method of a quantizer class, whatever it is called with: one of those above
    or, of a user's class, one that ours do not have."""
    method = inspect.getattr_static(cls, name, None)
    return isinstance(method, FunctionType) and name not in _QUESTIONS


def register_value_opaque_quantizer(cls: type) -> type:
    """Make a quantizer class one of values; usable as a decorator. Two instances are then equal where all attributes
    are, and a graph bakes one in. Attributes must be plain: ints, bools, floats, strings, enums, quantizers that are
    values.

    On a PyTorch without the API the class has its value semantics in eager code.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"cls is {cls!r}: give a subclass of Quantizer")
    if register_value(cls, is_traced):
        cls._registered_as = qualified_name(cls)
    cls._by_value = True
    return cls


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Whether the compiler takes `quantizer` as a constant."""
    return isinstance(quantizer, Quantizer) and quantizer._is_constant()


for _cls in _BUILT_IN:
    register_value_opaque_quantizer(_cls)

trace_quantizers(is_traced)
