"""The compiler's view of this package: here it learns of quantizers that are constants in a graph, tensors without
data, and operators."""

from mezzotint.dynamo.decompositions import decompositions
from mezzotint.dynamo.fakes import fake_backward, fake_forward, fake_linear_backward, fake_linear_forward
from mezzotint.dynamo.keep_bits import keep_bits
from mezzotint.dynamo.opaque import is_value_opaque_quantizer, register_value_opaque_quantizer
from mezzotint.tensor.proto import TensorProto, to_tensor_proto

TensorSpec = TensorProto
to_tensor_spec = to_tensor_proto

__all__ = [
    "TensorProto",
    "TensorSpec",
    "decompositions",
    "fake_backward",
    "fake_forward",
    "fake_linear_backward",
    "fake_linear_forward",
    "is_value_opaque_quantizer",
    "keep_bits",
    "register_value_opaque_quantizer",
    "to_tensor_proto",
    "to_tensor_spec",
]
