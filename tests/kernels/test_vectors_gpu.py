"""The test vectors on CUDA tensors, and the CUDA kernels against the CPU reference: the same bytes."""

import pytest
import torch

from tests import compare
from tests.compare import Entry
from tests.formats import VARIANTS, Variant
from tests.values import CONTENTS, VIEWS, as_view, fill, raw

pytestmark = pytest.mark.gpu

SHAPES = ((128, 256), (33, 70), (2, 3, 48), (1, 130), (300, 1), (17,), (0, 32), (32, 0))


@pytest.mark.parametrize("entry", compare.checked_entries(), ids=lambda entry: entry["name"])
def test_vector(entry: Entry) -> None:
    assert not compare.failures(compare.compare(entry, "cuda"))


@pytest.mark.parametrize("entry", compare.cast_entries(), ids=lambda entry: entry["name"])
def test_casts(entry: Entry) -> None:
    assert not compare.failures(compare.compare_casts(entry, "cuda"))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_cuda_is_cpu(variant: Variant, content: str) -> None:
    for shape in SHAPES[:2]:
        x = fill(shape, variant.dtypes[0], content, 0)
        same(variant, x, x.cuda(), variant.usages()[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_cuda_is_cpu_for_every_shape(variant: Variant, shape: tuple[int, ...]) -> None:
    for dtype in variant.dtypes:
        x = fill(shape, dtype, "mixed", 1)
        for usage in variant.usages():
            same(variant, x, x.cuda(), usage)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_view_on_cuda_is_cpu(variant: Variant, view: str) -> None:
    for shape in SHAPES[:3]:
        x = fill(shape, variant.dtypes[0], "normal", 1)
        seen = as_view(x.cuda(), view)
        same(variant, seen.cpu(), seen, variant.usages()[-1])


def same(variant: Variant, x: torch.Tensor, on_cuda: torch.Tensor, usage: tuple[bool, ...]) -> None:
    """Both ops on CUDA, the in-place one into poisoned buffers, against the op on the CPU."""
    want = variant.buffers(x, usage)
    got = variant.buffers(on_cuda, usage)
    out = [
        torch.full((b.nbytes,), 0xA5, dtype=torch.uint8, device="cuda").view(b.dtype).view(b.shape)
        for b in want.values()
    ]
    variant.refresh(on_cuda, out, torch.ones(1, device="cuda"), usage)
    assert all((raw(b) == 0xA5).all() for b in out), "noop is 1: nothing is written"
    variant.refresh(on_cuda, out, torch.zeros(1, device="cuda"), usage)
    for (name, expected), buffer in zip(want.items(), out, strict=True):
        case = f"{name} of {tuple(x.shape)}, {x.dtype}, {usage}"
        assert (got[name].shape, got[name].dtype) == (expected.shape, expected.dtype), case
        assert got[name].is_contiguous(), case
        assert torch.equal(raw(got[name]).cpu(), raw(expected)), case
        assert torch.equal(raw(buffer).cpu(), raw(expected)), f"in place: {case}"
    for way in variant.ways(usage):
        back = variant.dequantize(got, way, x.shape)
        assert torch.equal(raw(back).cpu(), raw(variant.dequantize(want, way, x.shape))), f"{way}: {x.shape}"
