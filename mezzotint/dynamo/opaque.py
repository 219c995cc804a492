"""Registering quantizers as value-opaque types, so that a custom op may take one and a graph bakes it in."""

from typing import Any

from mezzotint.dynamo.trace import trace_quantizer_methods
from mezzotint.tensor.flatten import qualified_name
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer, Float8ScaledQuantizer
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.float8_rowwise import Float8RowwiseQuantizer
from mezzotint.tensor.hybrid import HybridQuantizer
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer
from mezzotint.tensor.opaque import register_value
from mezzotint.tensor.quantizer import Quantizer

# Methods that take or give tensors: the compiler traces into them. All else of a quantizer is a constant to it.
_TRACED = frozenset(
    {
        "quantize",
        "__call__",
        "quantize_impl",
        "multi_quantize",
        "update_quantized",
        "make_empty",
        "alloc_tensors",
        "calibrate",
        "create_tensor_from_data",
        "is_quantizable",
    }
)


def register_value_opaque_quantizer(cls: type) -> type:
    """Register a quantizer class whose `_value_fields` are plain; usable as a decorator.

    On a PyTorch without the API the class keeps its value semantics in eager code.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"cls is {cls!r}: give a subclass of Quantizer")
    if register_value(cls, _TRACED):
        cls._registered_as = qualified_name(cls)
    return cls


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Whether the compiler takes `quantizer` as a constant."""
    return isinstance(quantizer, Quantizer) and quantizer._is_constant()


for _cls in (
    Float8CurrentScalingQuantizer,
    Float8ScaledQuantizer,
    Float8RowwiseQuantizer,
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    IdentityQuantizer,
    HybridQuantizer,
):
    register_value_opaque_quantizer(_cls)

trace_quantizer_methods(_TRACED)
