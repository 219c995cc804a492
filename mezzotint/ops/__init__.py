"""Fusible operations: they are put together as `ops.Sequential(ops.LayerNorm(...), ops.Linear(...), ops.GELU(),
ops.Linear(...))`.

A pipeline hands quantized tensors from operation to operation, and runs neighbours as one operation where there is a
fusion for them (`ops.fused`). Users add operations (`ops.op`) and fusions (`ops.fusion`) of their own.
"""

from mezzotint.ops import fused
from mezzotint.ops.basic import *  # noqa: F403
from mezzotint.ops.basic import __all__ as _basic
from mezzotint.ops.context import OperationContext
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.fuser import OperationFuser
from mezzotint.ops.fusion import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from mezzotint.ops.linear import Linear
from mezzotint.ops.op import BasicOperation, FusibleOperation
from mezzotint.ops.sequential import Sequential

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "Sequential",
    "fused",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    *_basic,
]
