"""D = A·Bᵀ on the GPU against FP64, for every backend that this GPU takes, odd sizes included.

Tolerances, as a fraction of (|A|·|B|ᵀ), on top of the output's own rounding:
    BF16 tensor cores, FP32                          2^-18
    FP8 tensor cores, promoted every 128             2^-11: inside of 128 they keep some 14 bits
    the same with fast_accum                         2^-9
"""

import pytest
import torch

from mezzotint import hw
from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.gemm import Operand, choose, gemm
from mezzotint.kernels.grouped_gemm import grouped_gemm, grouped_gemm_packed
from tests.operands import KINDS, QUANTIZED, product_and_bound, quantize, to

pytestmark = pytest.mark.gpu

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
SIZES = [(256, 512, 1024), (1, 1, 1), (3, 17, 40), (20, 130, 129), (130, 48, 640), (257, 300, 700)]

# Kinds that some GPU multiplies natively, and some that none does.
PAIRS = [
    ("high", "high"),
    ("tensor", "tensor"),
    ("row", "row"),
    ("block1d", "block1d"),
    ("block1d", "block2d"),
    ("block2d", "block1d"),
    ("block2d", "block2d"),
    ("mx", "mx"),
    ("nv", "nv"),
    ("high", "nv"),
    ("mx", "high"),
    ("row", "mx"),
]


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    """New tensors reuse memory that holds NaN: what is left unwritten shows."""
    torch.manual_seed(0)
    blocks = [torch.full((2**n,), float("nan"), device="cuda") for n in range(8, 24) for _ in range(4)]
    del blocks


def check_close(
    got: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None = None, fast_accum: bool = False
) -> None:
    """`a`, `b` and `bias` are on the CPU."""
    is_fp8 = hw.gemm_backend(a.kind, b.kind, hw.capability()).how == "native" and "high" not in (a.kind, b.kind)
    is_fp8 = is_fp8 and not a.dtype == b.dtype == E5M2 and not ("block" in a.kind and E5M2 in (a.dtype, b.dtype))
    share = (2.0**-9 if fast_accum else 2.0**-11) if is_fp8 else 2.0**-18
    expected, bound = product_and_bound(a, b, bias, got.dtype, share)
    excess = (got.cpu().double() - expected).abs() - bound
    assert bool((excess <= 0).all()), f"off by {float(excess.max())} more than its bound"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind_a", "kind_b"), PAIRS)
def test_sizes(kind_a: str, kind_b: str, sizes: tuple[int, int, int]) -> None:
    rows_a, rows_b, size = sizes
    a = quantize(torch.randn(rows_a, size).bfloat16(), kind_a, pow2=True)
    b = quantize(torch.randn(rows_b, size).bfloat16(), kind_b, pow2=True)
    for dtype in (B16, F32):
        check_close(gemm(to(a, "cuda"), to(b, "cuda"), out_dtype=dtype), a, b)


@pytest.mark.parametrize("bias_dtype", [None, F32, F16, B16])
@pytest.mark.parametrize("dtype", [F32, F16, B16])
@pytest.mark.parametrize(("kind_a", "kind_b"), PAIRS)
def test_output_and_bias(kind_a: str, kind_b: str, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    a, b = (quantize(torch.randn(n, 256).bfloat16(), k, pow2=True) for n, k in ((64, kind_a), (96, kind_b)))
    bias = None if bias_dtype is None else torch.randn(96).to(bias_dtype)
    got = gemm(to(a, "cuda"), to(b, "cuda"), out_dtype=dtype, bias=None if bias is None else bias.cuda())
    assert got.dtype == dtype
    check_close(got, a, b, bias)


@pytest.mark.parametrize(("dtype_a", "dtype_b"), [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize(("kind_a", "kind_b"), [p for p in PAIRS if "nv" not in p and "high" not in p])
def test_element_types(kind_a: str, kind_b: str, dtype_a: int, dtype_b: int) -> None:
    a = quantize(torch.randn(48, 384), kind_a, dtype=dtype_a, pow2=True)
    b = quantize(torch.randn(80, 384), kind_b, dtype=dtype_b, pow2=True)
    check_close(gemm(to(a, "cuda"), to(b, "cuda"), out_dtype=B16), a, b)


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if kind != "block2d"])
def test_long_contraction(kind: str, fast_accum: bool) -> None:
    """Scales that are no powers of two, too, but for blocks that are rounded to BF16."""
    pow2 = kind == "block1d" and hw.gemm_backend(kind, kind, hw.capability()).how == "emulated"
    a, b = (quantize(torch.randn(n, 8192).bfloat16(), kind, pow2=pow2) for n in (64, 96))
    got = gemm(to(a, "cuda"), to(b, "cuda"), out_dtype=F32, fast_accum=fast_accum)
    check_close(got, a, b, fast_accum=fast_accum)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("kind", ["high", "tensor", "row", "block1d", "mx", "nv"])
def test_contraction_over_tokens(kind: str, swizzled: bool) -> None:
    dy, x = torch.randn(200, 48).bfloat16(), torch.randn(200, 72).bfloat16()
    a, b = (quantize(t, kind, columnwise=True, swizzled=swizzled, pow2=True) for t in (dy, x))
    check_close(gemm(to(a, "cuda"), to(b, "cuda"), out_dtype=F32), a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_empty_and_autocast(kind: str) -> None:
    a, b = (to(quantize(torch.randn(n, 64).bfloat16(), kind), "cuda") for n in (32, 48))
    for dtype in (F32, B16):
        total = torch.randn(32, 48, device="cuda").to(dtype)
        expected = total + gemm(a, b, out_dtype=dtype)
        with torch.autocast("cuda", dtype=F16):
            assert gemm(a, b, out_dtype=dtype, accumulate=total) is total
        assert torch.equal(total, expected)
    if kind in ("high", "tensor"):
        empty = Operand(a.data[:, :0], a.scale, kind=kind, dtype=a.dtype)
        other = Operand(b.data[:, :0], b.scale, kind=kind, dtype=b.dtype)
        assert not gemm(empty, other, out_dtype=B16).any()


@pytest.mark.parametrize("offset", [1, 16, 48])
@pytest.mark.parametrize("kind", ["high", "tensor", "row"])
def test_operands_that_start_anywhere(kind: str, offset: int) -> None:
    """Rows cut from a larger matrix: 16-byte alignment, or less."""
    x, b = quantize(torch.randn(128, 80).bfloat16(), kind), quantize(torch.randn(64, 80).bfloat16(), kind)
    scale = x.scale[offset:] if kind == "row" and x.scale is not None else x.scale
    cut = Operand(x.data[offset:], scale, kind=kind, dtype=x.dtype)
    on_gpu = to(x, "cuda")
    scale = on_gpu.scale[offset:] if kind == "row" and on_gpu.scale is not None else on_gpu.scale
    got = gemm(Operand(on_gpu.data[offset:], scale, kind=kind, dtype=x.dtype), to(b, "cuda"), out_dtype=B16)
    check_close(got, cut, b)


def test_more_than_2_31_outputs() -> None:
    a, b = (to(quantize(torch.randn(n, 32).bfloat16(), "tensor"), "cuda") for n in (70_000, 32_000))
    got = gemm(a, b, out_dtype=B16)
    last = Operand(a.data[-8:], a.scale, kind="tensor", dtype=E4M3)
    assert torch.equal(got[-8:], gemm(last, b, out_dtype=B16))


@pytest.mark.parametrize(("kind_a", "kind_b"), PAIRS)
def test_captured_in_a_graph(kind_a: str, kind_b: str) -> None:
    a, b = (to(quantize(torch.randn(64, 128).bfloat16(), kind, pow2=True), "cuda") for kind in (kind_a, kind_b))
    expected = gemm(a, b, out_dtype=B16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemm(a, b, out_dtype=B16)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, expected)


def test_the_table_names_what_runs() -> None:
    if hw.capability() == (9, 0) and hw.cuda_version() >= (12, 9):
        one = {kind: to(quantize(torch.randn(16, 128), kind), "cuda") for kind in KINDS}
        names = {kind: choose(one[kind], one[kind]).name for kind in KINDS}
        native = {"high": "plain", "tensor": "tensor", "row": "row", "block1d": "block"}
        assert names == {kind: native.get(kind, "emulated") for kind in KINDS}


# Groups.

SPLITS = [[64, 128, 32], [3, 0, 5, 0], [0, 9], [0, 0], [16, 0, 48], [1000, 24, 0, 2000]]


def _groups(kind: str, splits: list[int], which: str) -> tuple[list[Operand], list[Operand]]:
    """On the CPU; empty groups of unquantized operands and of row-wise FP8 only."""
    w = [torch.randn(96, 64).bfloat16() for _ in splits]
    x, dy = torch.randn(sum(splits), 64).bfloat16(), torch.randn(sum(splits), 96).bfloat16()
    if which == "fprop":
        return [_side(t, kind, False) for t in x.split(splits)], [_side(t, kind, False) for t in w]
    return [_side(t, kind, True) for t in dy.split(splits)], [_side(t, kind, True) for t in x.split(splits)]


def _side(x: torch.Tensor, kind: str, columnwise: bool) -> Operand:
    if x.numel() or kind == "high":
        return quantize(x, kind, columnwise=columnwise)
    rows, size = x.shape[::-1] if columnwise else x.shape
    return Operand(torch.empty(rows, size, dtype=torch.uint8), torch.ones(rows), kind=kind, dtype=E4M3)


@pytest.mark.parametrize("which", ["fprop", "wgrad"])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("kind", ["high", "row"])
def test_groups(kind: str, splits: list[int], which: str) -> None:
    a, b = _groups(kind, splits, which)
    for dtype in (B16, F32):
        got = grouped_gemm([to(op, "cuda") for op in a], [to(op, "cuda") for op in b], out_dtype=dtype)
        for d, x, y in zip(got, a, b, strict=True):
            assert d.shape == (x.data.shape[0], y.data.shape[0])
            if x.data.numel():
                check_close(d, x, y)
            else:
                assert not d.any()


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("which", ["fprop", "wgrad"])
def test_groups_that_lie_side_by_side(which: str, splits: list[int]) -> None:
    """One buffer of tokens and one of weights: the grouped kernels take them as they are, in a graph too."""
    x, dy = torch.randn(sum(splits), 64), torch.randn(sum(splits), 96)
    w = torch.randn(96 * len(splits), 64)
    x, dy, w = (t.bfloat16().cuda() for t in (x, dy, w))
    if which == "fprop":
        a, b = [Operand(t) for t in x.split(splits)], [Operand(t) for t in w.split([96] * len(splits))]
    else:
        a, b = [Operand(t.t()) for t in dy.split(splits)], [Operand(t.t()) for t in x.split(splits)]
    got = grouped_gemm(a, b, out_dtype=B16)
    for d, p, q in zip(got, a, b, strict=True):
        if p.data.numel():
            check_close(d, to(p, "cpu"), to(q, "cpu"))
        else:
            assert not d.any()
    if sum(splits):
        expected = grouped_gemm_packed(a, b, out_dtype=B16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            packed = grouped_gemm_packed(a, b, out_dtype=B16)
        packed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(packed, expected)


@pytest.mark.parametrize("kind", ["tensor", "mx", "nv"])
def test_groups_one_after_another(kind: str) -> None:
    splits = [64, 7, 33]
    a, b = _groups(kind, splits, "fprop")
    biases = [torch.randn(96) for _ in splits]
    got = grouped_gemm(
        [to(op, "cuda") for op in a], [to(op, "cuda") for op in b], out_dtype=B16, bias=[t.cuda() for t in biases]
    )
    for d, x, y, bias in zip(got, a, b, biases, strict=True):
        check_close(d, x, y, bias)


def test_groups_accumulate() -> None:
    a, b = _groups("row", [64, 0, 32], "wgrad")
    a, b = [to(op, "cuda") for op in a], [to(op, "cuda") for op in b]
    totals = [torch.ones(96, 64, device="cuda") for _ in a]
    expected = [1 + d for d in grouped_gemm(a, b, out_dtype=F32)]
    grouped_gemm(a, b, out_dtype=F32, accumulate=totals)
    assert all(torch.equal(one, other) for one, other in zip(totals, expected, strict=True))
