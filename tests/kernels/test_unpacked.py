"""Unpacked directions: a quantization writes the values that an emulated product reads out of codes."""

from typing import Any

import pytest
import torch

from mezzotint import recipe
from mezzotint.kernels.operand import codes, exact_of
from mezzotint.kernels.quantize_ops import COLUMNWISE, ROWWISE, fused
from mezzotint.recipe import QuantizerRole
from mezzotint.tensor.quantize import quantize_storage
from mezzotint.tensor.quantizer import Quantizer
from tests.kernels.interpreted import run_interpreted
from tests.values import fill

SHAPES = ((64, 96), (50, 81), (3, 40, 48))
USAGES = ((True, True), (True, False), (False, True))
ROLES = ("input", "weight", "grad_output")
UNPACKED = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")


def quantizers() -> dict[str, Quantizer]:
    """Return the quantizers that can unpack, of all tensors of each recipe."""
    made: dict[str, Quantizer] = {}
    for name, kind in recipe.RECIPES.items():
        for tensor_type in ROLES if name in UNPACKED else ():
            found: Any = kind().quantizer(QuantizerRole("linear", tensor_type, ""))
            if found.unpacking() is not None:
                made[f"{name}-{tensor_type}"] = found
    return made


QUANTIZERS = quantizers()


def exact(x: Any, columnwise: bool) -> torch.Tensor:
    """Return the bits of one direction as an emulated product reads it."""
    operand = x.gemm_operand(columnwise)
    return exact_of(operand)(operand, codes(operand), torch.bfloat16).contiguous().view(torch.int16)


def assert_same_values(x: torch.Tensor, quantizer: Quantizer, unpacked: int, usage: tuple[bool, bool]) -> None:
    rowwise, columnwise = usage
    quantizer = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
    torch.manual_seed(0)
    want: Any = quantize_storage(x, quantizer)
    torch.manual_seed(0)  # of stochastic rounding
    flags = {"rowwise": bool(unpacked & ROWWISE), "columnwise": bool(unpacked & COLUMNWISE)}
    got: Any = quantize_storage(x, quantizer.as_unpacked(**flags))
    assert got.shape == want.shape
    for direction, is_made in (("rowwise", rowwise), ("columnwise", columnwise)):
        if not is_made:
            continue
        data = getattr(got, f"_{direction}_data")
        if flags[direction]:
            assert data.dtype == torch.bfloat16
            assert torch.equal(exact(got, direction == "columnwise"), exact(want, direction == "columnwise"))
        else:
            assert torch.equal(data, getattr(want, f"_{direction}_data"))
        assert torch.equal(getattr(got, f"_{direction}_scale_inv"), getattr(want, f"_{direction}_scale_inv"))


def test_formats_that_unpack() -> None:
    assert set(QUANTIZERS) == {f"{name}-{role}" for name in UNPACKED for role in ROLES}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("unpacked", [ROWWISE, COLUMNWISE, ROWWISE | COLUMNWISE])
def test_values_are_those_of_the_codes(name: str, unpacked: int) -> None:
    for index, shape in enumerate(SHAPES):
        x = fill(shape, torch.bfloat16, "mixed", index)
        for usage in USAGES:
            assert_same_values(x, QUANTIZERS[name], unpacked, usage)


def test_kernels_write_the_values() -> None:
    run_interpreted(check_kernels)


def check_kernels() -> None:
    """Kernels, of whole and of cut blocks, against the references of their ops, byte for byte."""
    from triton.runtime import interpreter

    from mezzotint.kernels import _lib
    from tests.kernels import test_fused_interpreted, test_nvfp4_interpreted
    from tests.kernels.test_formats_interpreted import decode

    test_fused_interpreted.as_on_a_gpu()
    test_nvfp4_interpreted.as_on_a_gpu()
    interpreter._convert_float = decode
    names = {quantizer: name for name, quantizer in QUANTIZERS.items()}  # each once: roles share quantizers
    for quantizer, name in names.items():
        for shape, unpacked, columnwise in (
            ((128, 128), ROWWISE | COLUMNWISE, True),
            ((50, 81), ROWWISE, True),
            ((50, 81), ROWWISE, False),
        ):
            x = fill(shape, torch.bfloat16, "normal", 1)
            asked = quantizer.with_usage(rowwise=True, columnwise=columnwise)
            asked = asked.as_unpacked(rowwise=bool(unpacked & ROWWISE), columnwise=bool(unpacked & COLUMNWISE))
            call = asked.call_for(x.dtype)
            assert call is not None
            tensors = [torch.tensor([7, 3]) if one == "rng!" else None for one in call.tensors]
            want = _lib._IMPLEMENTATIONS[call.op][0](x, *tensors, *call.options)
            got = [torch.full_like(buffer, 0x5A) for buffer in want]
            launch = _lib.load_triton(f"{name.split('-')[0]}:quantize")
            launch(x, got, None, *tensors, *call.options)
            for index, (buffer, expected) in enumerate(zip(got, want, strict=True)):
                where = f"buffer {index}, {name}, {shape}, {unpacked}, {columnwise}"
                assert torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8)), where


def test_a_source_is_taken_in() -> None:
    quantizer = QUANTIZERS["mxfp8-input"].as_unpacked(rowwise=True, columnwise=False)
    x = fill((64, 192), torch.bfloat16, "normal", 1)
    call = quantizer.call_for(x.dtype)
    assert call is not None
    source = x, None, "swiglu", [], None
    made = fused(call.op, "activation")(*source, *call.options)
    want = call.op(torch.ops.mezzotint.activation_forward(*source), *call.options)
    for buffer, expected in zip(made, want, strict=True):
        assert torch.equal(buffer, expected)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of x, with one NaN for all, whose bits a GPU and a CPU choose in their own ways."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.uint8) if x.is_floating_point() else x


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_gpu_writes_the_bytes_of_the_reference(name: str) -> None:
    for index, shape in enumerate((*SHAPES, (512, 1024), (1024, 640))):
        x = fill(shape, torch.bfloat16, "mixed", index)
        for unpacked in (ROWWISE, COLUMNWISE, ROWWISE | COLUMNWISE):
            flags = {"rowwise": bool(unpacked & ROWWISE), "columnwise": bool(unpacked & COLUMNWISE)}
            call = QUANTIZERS[name].as_unpacked(**flags).call_for(x.dtype)
            assert call is not None
            tensors = [torch.tensor([7, 3]) if one == "rng!" else None for one in call.tensors]
            want = call.op(x, *tensors, *call.options)
            got = call.op(x.cuda(), *[None if one is None else one.cuda() for one in tensors], *call.options)
            for buffer, expected in zip(got, want, strict=True):
                assert torch.equal(bits(buffer.cpu()), bits(expected)), (shape, unpacked)
