"""The fused operations, which do the work of several: this package registers when they take their place, longer runs
first."""

from mezzotint.ops.fused.backward_activation_bias import BackwardActivationBias, fuse_backward_activation_bias
from mezzotint.ops.fused.backward_add_rmsnorm import BackwardAddRMSNorm, fuse_backward_add_rmsnorm
from mezzotint.ops.fused.backward_linear import (
    BackwardLinearAdd,
    BackwardLinearScale,
    fuse_backward_linear_add,
    fuse_backward_linear_scale,
)
from mezzotint.ops.fused.forward_linear_bias import (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    fuse_forward_linear_bias_activation,
    fuse_forward_linear_bias_add,
    fuse_forward_linear_scale_add,
)
from mezzotint.ops.fused.forward_linear_reduce_scatter import (
    ForwardLinearReduceScatter,
    fuse_forward_linear_reduce_scatter,
)
from mezzotint.ops.fused.grouped_mlp import GroupedMLP, fuse_grouped_mlp
from mezzotint.ops.fusion import (
    end_own_fusions,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearReduceScatter",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
]

register_forward_backward_fusion(fuse_grouped_mlp)
register_forward_fusion(fuse_forward_linear_reduce_scatter)
register_forward_fusion(fuse_forward_linear_scale_add)
register_forward_fusion(fuse_forward_linear_bias_add)
register_forward_fusion(fuse_forward_linear_bias_activation)
register_backward_fusion(fuse_backward_linear_add)
register_backward_fusion(fuse_backward_linear_scale)
register_backward_fusion(fuse_backward_activation_bias)
register_backward_fusion(fuse_backward_add_rmsnorm)
end_own_fusions()
