"""The basic operations: this package exports them all."""

from mezzotint.ops.basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from mezzotint.ops.basic.add_extra_input import AddExtraInput
from mezzotint.ops.basic.basic_linear import BasicLinear
from mezzotint.ops.basic.bias import Bias
from mezzotint.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from mezzotint.ops.basic.constant_scale import ConstantScale
from mezzotint.ops.basic.dropout import Dropout
from mezzotint.ops.basic.grouped_linear import GroupedLinear
from mezzotint.ops.basic.identity import Identity
from mezzotint.ops.basic.l2normalization import L2Normalization
from mezzotint.ops.basic.make_extra_output import MakeExtraOutput
from mezzotint.ops.basic.normalization import LayerNorm, RMSNorm
from mezzotint.ops.basic.quantize import Quantize
from mezzotint.ops.basic.reshape import Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]
