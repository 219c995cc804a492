"""Quantizations that take their producer in, on a GPU: the bytes of the two ops one after the other.

The norm's are also those of the CPU: all of it is pointwise once the statistics are given.
"""

from itertools import product
from typing import Any

import pytest
import torch

from mezzotint.kernels.norm import norm_stats
from mezzotint.kernels.quantize_ops import fused
from mezzotint.kernels.triton import _jit_source
from mezzotint.kernels.triton._jit_source import SOURCE_MODES
from tests.formats import HIGH, VARIANTS, Variant, variants_of
from tests.kernels.test_fused import check, draw, sources
from tests.values import as_view, raw

pytestmark = pytest.mark.gpu

BLOCKS, MX = variants_of("float8_block"), variants_of("mxfp8")
TESTED = [
    *(variants_of(name)[0] for name in ("float8", "float8_scaled", "float8_rowwise")),
    *(next(v for v in found if ("two_d" in v.traits) == two_d) for found in (BLOCKS, MX) for two_d in (False, True)),
]
CASES = ["layernorm", "rmsnorm", "gelu", "swiglu", "dgelu", "dswiglu"]
CASES += ["gelu_scaled", "swiglu_scaled", "dgelu_scaled", "dswiglu_scaled"]


def on_cuda(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", TESTED, ids=str)
def test_fused_is_one_after_the_other(variant: Variant, case: str) -> None:
    """Whole tiles in both directions, and cut ones in each: other kernels, other dtypes."""
    start = TESTED.index(variant) + len(case)
    for number, (shape, usage) in enumerate(
        zip(((256, 1024), (131, 90), (3, 5, 272)), variant.usages()[::-1], strict=True)
    ):
        source, args = sources(shape, HIGH[0 if number == 0 else (start + number) % 3])[case]
        check(variant, source, on_cuda(args), usage)
        if source == "norm":
            options = variant.arguments("cpu", usage)
            got = fused(variant.quantize, source)(*on_cuda(args), *variant.arguments("cuda", usage))
            for a, b in zip(got, fused(variant.quantize, source)(*args, *options), strict=True):
                assert torch.equal(raw(a.cpu()), raw(b)), (shape, usage)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(("current", "rowwise"), ("inside", "first", "before")),
        *product(("delayed", "block", "blocks of 32"), ("inside", "before")),
    ],
)
def test_every_way(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    """Whichever `SOURCE_MODES` may name; halves are whole tiles, and rows are cut."""
    monkeypatch.setattr(_jit_source, "SOURCE_MODES", {**SOURCE_MODES, name: dict.fromkeys(SOURCE_MODES[name], how)})
    formats = {"current": "float8", "delayed": "float8_scaled", "rowwise": "float8_rowwise", "block": "float8_block"}
    formats["blocks of 32"] = "mxfp8"
    variant = variants_of(formats.get(name, name))[0]
    for shape in ((256, 1024), (72, 2048)):
        for case in ("swiglu", "dgelu", "dclamped", "dswiglu", "dswiglu_scaled"):
            source, args = sources(shape, torch.bfloat16)[case]
            check(variant, source, on_cuda(args), variant.usages()[-1])


def test_empty() -> None:
    """Nothing to quantize; the sums of nothing are zeros."""
    for variant, shape in product(TESTED, ((0, 32), (2, 0, 16))):
        for source, args in sources(shape, torch.bfloat16).values():
            check(variant, source, on_cuda(args), variant.usages()[-1])


@pytest.mark.parametrize("case", ["rmsnorm", "dswiglu", "dswiglu_scaled"])
def test_strided_rows(case: str) -> None:
    """x and dy are slices of wider tensors, scales a column of one."""
    for variant in TESTED:
        source, args = sources((64, 96), torch.bfloat16)[case]
        views = {1: "every_second", 2: "inner"}
        moved = (as_view(a, views[a.dim()]) if isinstance(a, torch.Tensor) else a for a in on_cuda(args))
        check(variant, source, tuple(moved), variant.usages()[-1])


@pytest.mark.parametrize("name", sorted({v.format for v in VARIANTS} - {v.format for v in TESTED}))
def test_quantizations_that_take_no_source(name: str) -> None:
    variant = variants_of(name)[0]
    for source, args in sources((64, 96), torch.bfloat16).values():
        check(variant, source, on_cuda(args), variant.usages()[-1])


@pytest.mark.parametrize("width", [16384, 32768])
def test_wide_rows(width: int) -> None:
    """Rows at and above what row-wise scaling holds in registers."""
    variant = variants_of("float8_rowwise")[0]
    x, gamma = draw((5, width), torch.bfloat16, 0).cuda(), draw((width,), torch.float32, 1).cuda()
    check(variant, "norm", (x, *norm_stats(x, 1e-5, True), gamma, None, True, True), (True, False))
    dy = draw((5, width // 2), torch.bfloat16, 2).cuda()
    scales = draw((5,), torch.float32, 3).cuda()
    for factors in (None, scales):
        check(variant, "activation_backward", (dy, x, None, "swiglu", [], factors, torch.float32), (True, False))


def test_more_elements_than_32_bits_count() -> None:
    """The last rows alone, and behind 2^31 elements; x is twice that."""
    variant = BLOCKS[0]
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((1 + 2**10) * 128, 2**15, dtype=torch.bfloat16, device="cuda", generator=generator)
    options = variant.arguments("cuda", (True, False))
    op = fused(variant.quantize, "activation")
    factors = torch.rand(len(x), device="cuda", generator=generator)
    data, scales = op(x, None, "swiglu", [], factors, *options)
    few, few_scales = op(x[-128:].clone(), None, "swiglu", [], factors[-128:], *options)
    assert torch.equal(data[-128:], few)
    assert torch.equal(scales[:, -128:], few_scales)
    del x, data
    torch.cuda.empty_cache()
