"""Every quantizer that the contract suite runs over, once: how it is made and what its tensors can do.

A format that is added to the package is added to `FORMATS`, and nowhere else in the tests of `tensor` and `dynamo`.
(`tests/formats.py` is the same for the kernels underneath.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import DType, QuantizedTensorStorage, Quantizer

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

# (rowwise, columnwise)
USAGES = ((True, False), (False, True), (True, True))

# 2-D, 3-D, ragged for every block size, odd, one row, one element, one dimension, no rows, no columns.
SHAPES = ((32, 128), (2, 16, 64), (40, 48), (5, 7), (1, 33), (1, 1), (33,), (0, 64), (16, 0))


@dataclass(frozen=True, slots=True)
class Format:
    """One quantizer configuration and what holds for the tensors that it makes."""

    name: str
    make: Callable[[], Any]  # a new quantizer with both usages
    storage: type
    tensor: type
    derives: tuple[str, ...] = ()  # directions that update_usage makes out of the other one
    is_value: bool = True  # False: it holds tensors, and is equal to nothing but itself
    row_block: int | None = 1  # whole multiples of so many rows can be sliced off; None: slices are plain tensors
    row_block_rowwise: int | None = 1  # the same where only the row-wise copy is held
    is_transformed: bool = False  # the column-wise copy is of something else than the tensor (Hadamard)
    is_random: bool = False  # draws from torch's generator
    has_scales: bool = True
    read_as: str = ""  # the format, if another, whose tensors mean the same by their bytes
    tolerance: float = 0.05  # |dequantized - x| / |x| of normal data

    def quantizer(self, rowwise: bool = True, columnwise: bool = True, internal: bool = False) -> Any:
        made = self.make()
        made.set_usage(rowwise=rowwise, columnwise=columnwise)
        made.internal = internal
        return made

    def quantize(self, x: torch.Tensor, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        """`x` quantized by a new quantizer, with the same random numbers every time."""
        torch.manual_seed(seed)
        return self.quantizer(*args, **kwargs).quantize(x)


def _swizzled(quantizer: Quantizer) -> Quantizer:
    quantizer.optimize_for_gemm = True
    return quantizer


def _delayed(dtype: DType = E4M3, scale: float = 16.0) -> Any:
    return mz.Float8Quantizer(torch.full((1,), scale), torch.zeros(1), dtype)


def _hybrid(rowwise: Any, columnwise: Any, source: str = "original") -> Any:
    return mz.HybridQuantizer(rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source=source)


def _float8_formats() -> Iterator[Format]:
    float8: dict[str, Any] = {
        "storage": mz.Float8TensorStorage,
        "tensor": mz.Float8Tensor,
        "derives": ("rowwise", "columnwise"),
    }
    current = mz.Float8CurrentScalingQuantizer
    yield Format("float8_current", lambda: current(E4M3), **float8)
    yield Format("float8_current_e5m2", lambda: current(E5M2), tolerance=0.1, **float8)
    yield Format(
        "float8_current_pow2", lambda: current(E4M3, force_pow_2_scales=True), read_as="float8_current", **float8
    )
    yield Format("float8_delayed", _delayed, is_value=False, read_as="float8_current", **float8)

    row: dict[str, Any] = {"storage": mz.Float8RowwiseTensorStorage, "tensor": mz.Float8RowwiseTensor}
    yield Format("float8_rowwise", lambda: mz.Float8RowwiseQuantizer(E4M3), **row)

    block: dict[str, Any] = {
        "storage": mz.Float8BlockwiseQTensorStorage,
        "tensor": mz.Float8BlockwiseQTensor,
        "row_block": 128,
    }
    yield Format("float8_block_1d", lambda: mz.Float8BlockQuantizer(E4M3, block_scaling_dim=1), **block)
    yield Format(
        "float8_block_2d",
        lambda: mz.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
        derives=("rowwise", "columnwise"),
        row_block_rowwise=128,
        **block,
    )


_SWIZZLED: dict[str, Any] = {"row_block": None, "row_block_rowwise": None}


def _mxfp8_formats() -> Iterator[Format]:
    mx = mz.MXFP8Quantizer
    classes: dict[str, Any] = {"storage": mz.MXFP8TensorStorage, "tensor": mz.MXFP8Tensor}
    mxfp8 = {"row_block": 32, **classes}
    yield Format("mxfp8", lambda: mx(E4M3), **mxfp8)
    yield Format("mxfp8_e5m2", lambda: mx(E5M2), tolerance=0.1, **mxfp8)
    yield Format("mxfp8_2d", lambda: mx(E4M3, with_2d_quantization=True), derives=("rowwise", "columnwise"), **mxfp8)
    yield Format("mxfp8_floor", lambda: mx(E4M3, scale_rule="floor"), tolerance=0.1, read_as="mxfp8", **mxfp8)
    yield Format("mxfp8_swizzled", lambda: _swizzled(mx(E4M3)), **_SWIZZLED, **classes)


_RHT = {"with_rht": True, "with_post_rht_amax": True}


def _nvfp4_formats() -> Iterator[Format]:
    nv = mz.NVFP4Quantizer
    classes: dict[str, Any] = {"storage": mz.NVFP4TensorStorage, "tensor": mz.NVFP4Tensor, "tolerance": 0.2}
    nvfp4 = {"row_block": 16, **classes}
    rht = {"is_transformed": True, **nvfp4}
    yield Format("nvfp4", lambda: nv(), **nvfp4)
    yield Format("nvfp4_rht", lambda: nv(**_RHT), **rht)
    yield Format("nvfp4_rht_no_signs", lambda: nv(**_RHT, with_random_sign_mask=False), **rht)
    yield Format(
        "nvfp4_rht_stochastic", lambda: nv(**_RHT, stochastic_rounding=True), is_random=True, read_as="nvfp4_rht", **rht
    )
    yield Format("nvfp4_stochastic", lambda: nv(stochastic_rounding=True), is_random=True, read_as="nvfp4", **nvfp4)
    yield Format(
        "nvfp4_2d", lambda: nv(with_2d_quantization=True), derives=("columnwise",), row_block_rowwise=16, **nvfp4
    )
    yield Format("nvfp4_row_scaled", lambda: nv(row_scaled_nvfp4=True), **nvfp4)
    yield Format("nvfp4_4over6_mae", lambda: nv(nvfp4_use_4over6=True), **nvfp4)
    yield Format(
        "nvfp4_4over6_mse",
        lambda: nv(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
        read_as="nvfp4_4over6_mae",
        **nvfp4,
    )
    yield Format("nvfp4_e4m3_256", lambda: nv(nvfp4_e4m3_max=256), **nvfp4)
    yield Format("nvfp4_swizzled", lambda: _swizzled(nv()), **_SWIZZLED, **classes)


def _mxfp4_formats() -> Iterator[Format]:
    mx = mz.MXFP4Quantizer
    classes: dict[str, Any] = {"storage": mz.MXFP4TensorStorage, "tensor": mz.MXFP4Tensor, "tolerance": 0.25}
    mxfp4 = {"row_block": 32, **classes}
    both = ("rowwise", "columnwise")
    yield Format("mxfp4", lambda: mx(), **mxfp4)
    yield Format("mxfp4_roundup", lambda: mx(scale_rule="roundup"), read_as="mxfp4", **mxfp4)
    yield Format("mxfp4_2d", lambda: mx(with_2d_quantization=True), derives=both, row_block_rowwise=32, **mxfp4)
    yield Format("mxfp4_rht", lambda: mx(with_rht=True), is_transformed=True, **mxfp4)
    yield Format("mxfp4_stochastic", lambda: mx(stochastic_rounding=True), is_random=True, read_as="mxfp4", **mxfp4)
    yield Format("mxfp4_swizzled", lambda: _swizzled(mx()), **_SWIZZLED, **classes)


def _mxfp6_formats() -> Iterator[Format]:
    mx, e2m3, e3m2 = mz.MXFP6Quantizer, DType.kFloat6E2M3, DType.kFloat6E3M2
    classes: dict[str, Any] = {"storage": mz.MXFP6TensorStorage, "tensor": mz.MXFP6Tensor, "tolerance": 0.1}
    mxfp6 = {"row_block": 32, **classes}
    both = ("rowwise", "columnwise")
    yield Format("mxfp6", lambda: mx(e2m3), **mxfp6)
    yield Format("mxfp6_e3m2", lambda: mx(e3m2, scale_rule="roundup"), **mxfp6)
    yield Format("mxfp6_2d", lambda: mx(e2m3, with_2d_quantization=True), derives=both, row_block_rowwise=32, **mxfp6)
    yield Format("mxfp6_swizzled", lambda: _swizzled(mx(e3m2)), **_SWIZZLED, **classes)


def _other_formats() -> Iterator[Format]:
    identity: dict[str, Any] = {
        "storage": mz.IdentityTensorStorage,
        "tensor": mz.IdentityTensor,
        "derives": ("rowwise", "columnwise"),
        "has_scales": False,
    }
    yield Format("identity", lambda: mz.IdentityQuantizer(), **identity)
    yield Format("identity_bf16", lambda: mz.IdentityQuantizer(dtype=torch.bfloat16), **identity)

    current, mx, nv = mz.Float8CurrentScalingQuantizer, mz.MXFP8Quantizer, mz.NVFP4Quantizer
    hybrid: dict[str, Any] = {"storage": mz.HybridQuantizedTensorStorage, "tensor": mz.HybridQuantizedTensor}
    mixed = {"row_block": 16, "tolerance": 0.2, **hybrid}
    yield Format("hybrid", lambda: _hybrid(mx(E4M3), nv()), **mixed)
    yield Format("hybrid_chained", lambda: _hybrid(mx(E4M3), nv(), "rowwise_dequantized"), read_as="hybrid", **mixed)
    yield Format("hybrid_nvfp4_rht", lambda: _hybrid(nv(), nv(**_RHT)), is_transformed=True, **mixed)
    yield Format("hybrid_float8_identity", lambda: _hybrid(current(E4M3), mz.IdentityQuantizer()), **hybrid)


FORMATS = {
    found.name: found
    for group in (_float8_formats, _mxfp8_formats, _nvfp4_formats, _mxfp4_formats, _mxfp6_formats, _other_formats)
    for found in group()
}


def over_formats(*names: str, **wanted: Any) -> pytest.MarkDecorator:
    """Parametrize `fmt` over all formats, or those of some names or with some options."""
    picked = [FORMATS[name] for name in names or FORMATS]
    picked = [f for f in picked if all(getattr(f, option) == value for option, value in wanted.items())]
    return pytest.mark.parametrize("fmt", picked, ids=lambda f: f.name)


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same every time."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape, generator=generator).to(dtype)


def buffers(quantized: QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """Attribute → every buffer that is held."""
    return dict(quantized._buffers())


def snapshot(quantized: QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """The same as copies."""
    return {name: buffer.clone() for name, buffer in quantized._buffers()}


def assert_same_bytes(actual: Any, expected: Any) -> None:
    """Both hold the same buffers with the same bytes (storages, tensors, or what `buffers` gave)."""
    actual = buffers(actual) if isinstance(actual, QuantizedTensorStorage) else actual
    expected = buffers(expected) if isinstance(expected, QuantizedTensorStorage) else expected
    assert list(actual) == list(expected), f"{list(actual)} is not {list(expected)}"
    for name, buffer in actual.items():
        other = expected[name]
        assert (buffer.dtype, buffer.shape) == (other.dtype, other.shape), f"{name}: {buffer.shape}, {other.shape}"
        assert torch.equal(buffer.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


def same_bytes(actual: Any, expected: Any) -> bool:
    try:
        assert_same_bytes(actual, expected)
    except AssertionError:
        return False
    return True
