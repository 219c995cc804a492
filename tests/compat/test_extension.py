"""Functions of Transformer Engine's C++ extension, against PyTorch."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.compat import extension as tex
from mezzotint.kernels.activation import GATED

QUANTIZER = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3)
PLAIN = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def reference(name: str, x: torch.Tensor) -> torch.Tensor:
    if name in PLAIN:
        return PLAIN[name](x)
    gate, linear = x.chunk(2, -1)
    return PLAIN[GATED[name]](gate) * linear


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu", *GATED])
def test_activations(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    y = reference(name, x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(getattr(tex, name)(x.detach(), None), y)
    torch.testing.assert_close(getattr(tex, f"d{name}")(dy, x.detach(), None), dx)
    assert getattr(tex, name).__name__ == name
    quantized = getattr(tex, name)(x.detach(), QUANTIZER)
    assert torch.equal(quantized.dequantize(), QUANTIZER(getattr(tex, name)(x.detach(), None)).dequantize())
    if name in PLAIN:
        dbias, made = getattr(tex, f"dbias_d{name}")(dy, x.detach(), None)
        torch.testing.assert_close((dbias, made), (dx.sum(0), dx), rtol=1e-4, atol=1e-5)


def test_clamped_swiglu() -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(8, 32)).requires_grad_()
    gate, linear = x.chunk(2, -1)
    gate = gate.clamp(max=3.0)
    y = gate * torch.sigmoid(1.5 * gate) * (linear.clamp(-3.0, 3.0) + 0.5)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(tex.clamped_swiglu(x.detach(), None, 3.0, 1.5, 0.5), y)
    torch.testing.assert_close(tex.clamped_dswiglu(torch.ones_like(y), x.detach(), None, 3.0, 1.5, 0.5), dx)


def test_norms() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size).requires_grad_() for size in ((16, 32), (32,), (32,)))
    dy = torch.randn(16, 32)
    y = torch.nn.functional.layer_norm(x, (32,), weight, bias, 1e-5)
    gradients = torch.autograd.grad(y, (x, weight, bias), dy)
    given = [each.detach() for each in (x, weight, bias)]
    made, mean, rstd = tex.layernorm_fwd(*given, 1e-5, None, None, mz.DType.kFloat32, 0, False)
    torch.testing.assert_close(made, y)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(tex.layernorm_bwd(dy, given[0], mean, rstd, given[1], 0, False), gradients)
    y = torch.nn.functional.rms_norm(x, (32,), weight + 1, 1e-5)
    gradients = torch.autograd.grad(y, (x, weight), dy)
    made, none, rstd = tex.rmsnorm_fwd(given[0], given[1], 1e-5, None, None, mz.DType.kBFloat16, 0, True)
    torch.testing.assert_close(made, y.bfloat16())
    assert none is None
    torch.testing.assert_close(tex.rmsnorm_bwd(dy, given[0], rstd, given[1], 0, True), gradients)
    quantized = tex.rmsnorm_fwd(given[0], given[1], 1e-5, None, QUANTIZER, mz.DType.kFloat32, 0, True)[0]
    torch.testing.assert_close(quantized.dequantize(), y, rtol=0.1, atol=0.02)


def test_quantizing() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    made = tex.quantize(x, QUANTIZER)
    assert torch.equal(tex.dequantize(made, mz.DType.kBFloat16), made.dequantize(dtype=torch.bfloat16))
    into = tex.create_empty_quantized_tensor(QUANTIZER, [64, 64], torch.float32, torch.device("cpu"), False)
    tex.quantize(x, QUANTIZER, into)
    assert torch.equal(into.dequantize(), made.dequantize())
    before = into.dequantize()
    tex.quantize(x + 1, QUANTIZER, into, torch.ones(1))
    assert torch.equal(into.dequantize(), before)
    parts = tex.split_quantize(x, [32, 32], [QUANTIZER] * 2)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), made.dequantize())
    dbias, quantized = tex.bgrad_quantize(x, QUANTIZER)
    torch.testing.assert_close(dbias, x.sum(0))
    assert torch.equal(quantized.dequantize(), made.dequantize())
    amax = torch.zeros(1)
    x[3, 4], x[0, 0] = -9.0, torch.nan
    tex.compute_amax(x, amax)
    assert amax.item() == 9.0


def test_layouts() -> None:
    codes = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    assert torch.equal(tex.fp8_transpose(codes, mz.DType.kFloat8E4M3), codes.permute(2, 0, 1))
    assert torch.equal(tex.swap_first_dims(codes), codes.transpose(0, 1))
    assert tex.splits_to_offsets(torch.tensor([2, 0, 3]), 4).tolist() == [0, 8, 8, 20]


def test_products() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, 32), torch.randn(8, 32)
    rest: tuple[Any, ...] = (None, mz.DType.kFloat32, None, None, False, None, False, None, 0, False, False)
    made, *_ = tex.generic_gemm(weight, True, x, False, None, *rest)
    torch.testing.assert_close(made, x @ weight.t())


def test_numbers() -> None:
    assert tex.FP8FwdTensors.GEMM3_OUTPUT == 8
    assert tex.FP8BwdTensors.GRAD_OUTPUT2 == 2
    assert tex.CommOverlapAlgo.ATOMIC_GEMM_RS == 5
    assert tex.CommOverlapType.AG == 1
    assert tex.get_cublasLt_version() == 0
    assert not any((tex.ubuf_built_with_mpi(), tex.nvte_built_with_cublasmp(), tex.device_supports_multicast()))
    assert tex.get_cudnn_version() >= 0


def test_scales_of_delayed_scaling() -> None:
    """The largest of the history, or the last, gives the scale; the history moves on."""
    for algorithm, amax in (("max", 8.0), ("most_recent", 2.0)):
        history = torch.tensor([[0.0, 0.0], [4.0, 1.0], [8.0, 1.0]])
        scale = torch.ones(2)
        reduced = torch.tensor([2.0, torch.inf])
        tex.fused_amax_and_scale_update_after_reduction(reduced, [history], [scale], algorithm, mz.DType.kFloat8E4M3, 1)
        assert scale.tolist() == [448 / amax / 2, 1.0]
        assert history[:, 0].tolist() == [0.0, 8.0, 2.0]
