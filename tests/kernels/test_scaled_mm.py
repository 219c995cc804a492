"""How PyTorch's scaled GEMMs are called: sizes, layouts and dtypes, on a model of them that runs on the CPU."""

import pytest
import torch

from mezzotint import hw
from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels import scaled_mm
from tests import scaled_mm_model
from tests.operands import BACKENDS, product_and_bound, quantize, to

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16

SIZES = [(16, 16, 128), (1, 1, 1), (3, 17, 40), (20, 130, 129), (130, 48, 640), (257, 300, 700)]

# Backend → the kinds that it is called with.
PAIRS = [
    ("tensor", "tensor", "tensor"),
    ("row", "row", "row"),
    ("row16", "row", "row"),
    ("row_unit", "row", "row"),
    ("block", "block1d", "block1d"),
    ("block", "block1d", "block2d"),
    ("block", "block2d", "block1d"),
    ("mx", "mx", "mx"),
    ("nv", "nv", "nv"),
]


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(scaled_mm, "scaled_mm", scaled_mm_model.scaled_mm)
    monkeypatch.setattr(scaled_mm, "scaled_mm_v2", scaled_mm_model.scaled_mm_v2)


def run(name: str, a, b, bias=None, dtype=F32) -> None:  # type: ignore[no-untyped-def]
    rows_a, rows_b = (op.data.shape[1 if op.transposed else 0] for op in (a, b))
    out = torch.full((rows_a, rows_b), float("nan"), dtype=dtype)
    BACKENDS[name](out, a, b, bias, False)
    expected, bound = product_and_bound(a, b, bias, dtype)
    excess = (out.double() - expected).abs() - bound
    assert bool((excess <= 0).all()), f"off by {float(excess.max())} more than its bound"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("name", "kind_a", "kind_b"), PAIRS)
def test_sizes(name: str, kind_a: str, kind_b: str, sizes: tuple[int, int, int]) -> None:
    rows_a, rows_b, size = sizes
    run(name, quantize(torch.randn(rows_a, size), kind_a), quantize(torch.randn(rows_b, size), kind_b), dtype=B16)


@pytest.mark.parametrize(
    ("size", "kinds_of_v1"), [(48, ()), (128, ()), (256, ("block1d",)), (500, ("block1d", "block2d"))]
)
@pytest.mark.parametrize("kind", ["block1d", "block2d"])
def test_blocks_take_one_call_whatever_is_contracted(
    kind: str, size: int, kinds_of_v1: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are padded, but rows are not: then the product takes more than a call. The call is `_scaled_mm` where that
    guesses right what the scales are."""
    a, b, bias = quantize(torch.randn(24, size), "block1d"), quantize(torch.randn(128, size), kind), None
    one_call = next(row for row in hw.gemm_backends() if (row.name, row.kind_b) == ("block", kind)).one_call
    assert one_call is not None
    out = torch.empty(24, 128, dtype=B16)
    BACKENDS["block"](out, a, b, bias, False)
    monkeypatch.setattr(scaled_mm, "scaled_mm_v2" if kind in kinds_of_v1 else "scaled_mm", None)
    made = one_call(a, b, bias, B16, False)
    assert made is not None
    assert torch.equal(made, out)
    assert one_call(quantize(torch.randn(20, size), "block1d"), b, bias, B16, False) is None


@pytest.mark.cover(2)
@pytest.mark.parametrize("bias_dtype", [None, F32, F16, B16])
@pytest.mark.parametrize("dtype", [F32, F16, B16])
@pytest.mark.parametrize(("name", "kind_a", "kind_b"), PAIRS)
@pytest.mark.parametrize("rows_b", [48, 33])
def test_output_and_bias(
    name: str, kind_a: str, kind_b: str, rows_b: int, dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    bias = None if bias_dtype is None else torch.randn(rows_b).to(bias_dtype)
    run(name, quantize(torch.randn(24, 256), kind_a), quantize(torch.randn(rows_b, 256), kind_b), bias, dtype)


@pytest.mark.parametrize(("dtype_a", "dtype_b"), [(E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize(("name", "kind_a", "kind_b"), [pair for pair in PAIRS if pair[0] != "nv"])
def test_mixed_element_types(name: str, kind_a: str, kind_b: str, dtype_a: int, dtype_b: int) -> None:
    a, b = torch.randn(24, 256), torch.randn(32, 256)
    run(name, quantize(a, kind_a, dtype=dtype_a), quantize(b, kind_b, dtype=dtype_b))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("columns_a", "columns_b"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(32, 48, 64), (150, 33, 300)])
def test_mx_columnwise(columns_a: bool, columns_b: bool, swizzled: bool, sizes: tuple[int, int, int]) -> None:
    rows_a, rows_b, size = sizes
    shapes = [(size, n) if columns else (n, size) for n, columns in ((rows_a, columns_a), (rows_b, columns_b))]
    a, b = (
        quantize(torch.randn(shape), "mx", columnwise=columns, swizzled=swizzled)
        for shape, columns in zip(shapes, (columns_a, columns_b), strict=True)
    )
    run("mx", a, b)


def test_mx_columnwise_is_transposed_where_the_gpu_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device: (12, 0))
    seen = []
    monkeypatch.setattr(
        scaled_mm, "scaled_mm", lambda x, *args, **kwargs: seen.append(x.is_contiguous()) or torch.zeros(32, 32)
    )
    a = quantize(torch.randn(64, 32), "mx", columnwise=True)
    BACKENDS["mx"](torch.empty(32, 32), a, a, None, False)
    assert seen == [True]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("scaled_a", "scaled_b"), [(True, False), (False, True), (True, True), (False, False)])
def test_nv_row_scaled(scaled_a: bool, scaled_b: bool, swizzled: bool) -> None:
    a = quantize(torch.randn(24, 72), "nv", row_scaled=scaled_a, swizzled=swizzled, e4m3_max=256)
    b = quantize(torch.randn(33, 72), "nv", row_scaled=scaled_b, swizzled=swizzled)
    for dtype in (F32, F16, B16):
        run("nv", a, b, torch.randn(33).bfloat16(), dtype)


def test_whole_sizes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes go to the GEMM as they lie, and it writes the output itself."""
    seen = {}

    def spy(x, yt, *args, out=None, **kwargs):  # type: ignore[no-untyped-def]
        seen.update(x=x.data_ptr(), y=yt.data_ptr(), out=out)
        return out

    monkeypatch.setattr(scaled_mm, "scaled_mm", spy)
    monkeypatch.setattr(scaled_mm, "scaled_mm_v2", spy)
    for name, kind_a, kind_b in PAIRS:
        if name == "row_unit":
            continue
        a, b, out = quantize(torch.randn(128, 256), kind_a), quantize(torch.randn(256, 256), kind_b), None
        out = torch.empty(128, 256, dtype=B16)
        BACKENDS[name](out, a, b, torch.zeros(256, dtype=B16), False)
        assert (seen["x"], seen["y"]) == (a.data.data_ptr(), b.data.data_ptr()), name
        assert seen["out"] is out, name


@pytest.mark.parametrize(("name", "kind_a", "kind_b"), [pair for pair in PAIRS if pair[0] != "row_unit"])
def test_pytorch_accepts_the_arguments(name: str, kind_a: str, kind_b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape functions of the real ops check layouts as for a GPU when they get meta tensors."""
    monkeypatch.setattr(scaled_mm, "scaled_mm", lambda *args, out, **kwargs: torch._scaled_mm(*args, **kwargs))
    monkeypatch.setattr(scaled_mm, "scaled_mm_v2", lambda *args, out: torch.ops.aten._scaled_mm_v2.default(*args))
    for rows_a, rows_b, size in SIZES:
        a, b = quantize(torch.randn(rows_a, size), kind_a), quantize(torch.randn(rows_b, size), kind_b)
        out, bias = (torch.empty(shape, dtype=B16, device="meta") for shape in ((rows_a, rows_b), (rows_b,)))
        BACKENDS[name](out, to(a, "meta"), to(b, "meta"), bias, False)


def test_pytorch_refuses_other_arguments() -> None:
    """So the test above can fail."""
    x = torch.empty(32, 64, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(1, device="meta")
    with pytest.raises(RuntimeError, match="mat2 must be col_major"):
        torch._scaled_mm(x, x.t().contiguous(), scale, scale, out_dtype=B16)
    rows = torch.empty(32, 1, device="meta")
    with pytest.raises(RuntimeError, match="1x128"):
        torch.ops.aten._scaled_mm_v2.default(x, x.t(), [rows], [4], [0], [rows], [4], [0], None, B16)


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("name", ["tensor", "row", "row16", "row_unit"])
def test_fast_accumulation_is_what_was_asked_for(name: str, fast_accum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the call itself; its sign shows on a GPU only, in the last bits of a long sum."""
    seen = []

    def spy(*args, use_fast_accum=None, out=None, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(use_fast_accum)
        return scaled_mm_model.scaled_mm(*args, **kwargs, out=out)

    monkeypatch.undo()
    monkeypatch.setattr(torch, "_scaled_mm", spy)
    kind = "tensor" if name == "tensor" else "row"
    a, b = quantize(torch.randn(32, 64), kind), quantize(torch.randn(48, 64), kind)
    for dtype in (F32, B16):
        BACKENDS[name](torch.empty(32, 48, dtype=dtype), a, b, None, fast_accum)
    row = next(row for row in hw.gemm_backends() if row.name == name)
    made = None if row.one_call is None else row.one_call(a, b, None, B16, fast_accum)
    assert seen == [fast_accum] * (2 if made is None else 3)
    assert (made is None) == (name == "row_unit")
