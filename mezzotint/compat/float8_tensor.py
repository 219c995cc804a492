"""This module has the names of `transformer_engine.pytorch.float8_tensor`. Import them from `mezzotint`."""

import warnings

from mezzotint.tensor.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "Float8TensorStorage"]

warnings.warn(
    "mezzotint.compat.float8_tensor is deprecated: import these names from mezzotint", DeprecationWarning, stacklevel=2
)
