"""What type checkers make of a user's program: `make check` reads this file, nothing runs it."""

from typing import Any, assert_type

import torch

import mezzotint as mz
from mezzotint import ops

x = torch.randn(32, 64)

# Options decide what else a module returns, so its output is a tensor or Any: a tensor's methods are known, and it may
# be unpacked.
linear = mz.Linear(64, 64)
assert_type(linear(x), torch.Tensor | Any)
assert_type(linear.forward(x), torch.Tensor | Any)
assert_type(linear(x).sum(), torch.Tensor | Any)
assert_type(mz.LayerNormLinear(64, 64)(x), torch.Tensor | Any)
assert_type(mz.LayerNormMLP(64, 256)(x), torch.Tensor | Any)
assert_type(mz.GroupedLinear(2, 64, 64)(x, [16, 16]), torch.Tensor | Any)
assert_type(mz.MultiheadAttention(64, 4)(x), torch.Tensor | Any)
assert_type(mz.DotProductAttention(4, 16)(x, x, x), torch.Tensor | Any)
assert_type(ops.Linear(64, 64)(x), torch.Tensor | Any)
assert_type(ops.GELU()(x), torch.Tensor | Any)
assert_type(ops.Sequential(ops.Linear(64, 64), ops.GELU())(x), torch.Tensor | Any)
y, bias = mz.Linear(64, 64, return_bias=True)(x)

# These return one tensor whatever they are told.
assert_type(mz.LayerNorm(64)(x), torch.Tensor)
assert_type(mz.RMSNorm(64)(x), torch.Tensor)
assert_type(mz.TransformerLayer(64, 256, 4)(x), torch.Tensor)

# Parameters
assert_type(linear.weight, torch.nn.Parameter)
assert_type(linear.bias, torch.nn.Parameter | None)
assert_type(mz.LayerNormLinear(64, 64).layer_norm_weight, torch.nn.Parameter)
assert_type(mz.LayerNormMLP(64, 256).fc1_weight, torch.nn.Parameter)
assert_type(mz.RMSNorm(64).weight, torch.nn.Parameter)
assert_type(ops.BasicLinear(64, 64).weight, torch.nn.Parameter)
assert_type(ops.Bias(64).bias, torch.nn.Parameter)

# Quantized tensors
quantizer = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3)
assert_type(quantizer(x), mz.QuantizedTensor)
assert_type(quantizer.quantize(x), mz.QuantizedTensor)
assert_type(quantizer.make_empty((32, 64)), mz.QuantizedTensor)
assert_type(quantizer(x).dequantize(), torch.Tensor)

# A converted model is of the class that it was
assert_type(mz.convert(torch.nn.Sequential()), torch.nn.Sequential)
assert_type(mz.unconvert(torch.nn.Sequential()), torch.nn.Sequential)

# What this machine can do
assert_type(mz.is_mxfp8_available(), bool)
assert_type(mz.is_mxfp8_available(True, native=True), tuple[bool, str])
assert_type(mz.is_bf16_available(), bool)
assert_type(mz.checkpoint(linear, x), Any)
