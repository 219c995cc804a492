"""Optimizers for plain and quantized parameters, and functions over many tensors: this package exports them."""

from mezzotint.optimizers.adam import FusedAdam
from mezzotint.optimizers.multi_tensor import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_fp8,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from mezzotint.optimizers.newton_schulz import newton_schulz
from mezzotint.optimizers.sgd import FusedSGD

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "newton_schulz",
]
