"""`general_gemm`, `general_grouped_gemm`: every layout, format and option against an FP32 product of the operands."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import mezzotint as mz
from mezzotint import DType
from mezzotint.compat.cpp_extensions import general_gemm, general_grouped_gemm, is_custom, replace_raw_data
from tests.module.test_own_quantizers import Int8Quantizer
from tests.quantizer_formats import FORMATS, sample

LAYOUTS = ("TN", "NN", "NT")
# One of each kind of operand; None is unquantized.
KINDS = (
    None,
    "float8_current",
    "float8_delayed",
    "float8_rowwise",
    "float8_block_1d",
    "float8_block_2d",
    "mxfp8",
    "mxfp8_swizzled",
    "nvfp4",
    "nvfp4_row_scaled",
    "hybrid",
)
M, N, K = 48, 32, 64


def sides(layout: str, dtype: torch.dtype = torch.bfloat16, rows: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a linear's product."""
    x, w, dy = (sample(shape, dtype, seed) for seed, shape in enumerate(((rows, K), (N, K), (rows, N))))
    return {"TN": (w, x), "NN": (w, dy), "NT": (x, dy)}[layout]


def quantized(x: torch.Tensor, kind: str | None, columnwise: bool) -> tuple[Any, torch.Tensor]:
    """With only the copy that the product reads; and what that copy stands for."""
    if kind is None:
        return x, x.float()
    made = FORMATS[kind].quantize(x, not columnwise, columnwise)
    return made, made.dequantize(dtype=torch.float32)


def case(layout: str, kind: str | None, rows: int = M) -> tuple[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B, D in FP32, and A and B in FP32."""
    a, b = sides(layout, rows=rows)
    (a, a32), (b, b32) = quantized(a, kind, layout[0] == "N"), quantized(b, kind, layout[1] == "T")
    left, right = b32.t() if layout[1] == "T" else b32, a32.t() if layout[0] == "T" else a32
    return a, b, left @ right, a32, b32


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected.float()).norm() <= bound * expected.float().norm()


BF16 = 2.0**-8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_formats_and_options(layout: str, kind: str | None) -> None:
    a, b, wanted, _, b32 = case(layout, kind)
    d, *rest = general_gemm(a, b, torch.float32, layout=layout, use_split_accumulator=True)
    assert_near(d, wanted)
    assert rest == [None, None, None]
    assert general_gemm(a, b, layout=layout)[0].dtype == torch.bfloat16  # A's
    assert torch.equal(general_gemm(a, b, layout=layout, workspace=d)[0], general_gemm(a, b, layout=layout)[0])

    bias = sample((wanted.shape[1],), seed=7)
    d = general_gemm(a, b, torch.float32, layout=layout, bias=bias, alpha=0.5)[0]
    assert_near(d, 0.5 * wanted + bias)

    out = sample(tuple(wanted.shape), seed=8)
    start = out.clone()
    given = general_gemm(a, b, layout=layout, out=out, accumulate=True)[0]
    assert given is out
    assert_near(out, wanted + start)
    out.copy_(start)
    general_gemm(a, b, layout=layout, out=out, accumulate=True, alpha=2.0, beta=0.25, bias=bias)
    assert_near(out, 2 * wanted + 0.25 * start + bias)
    general_gemm(a, b, layout=layout, out=out)
    assert_near(out, wanted)

    _, db, *_ = general_gemm(a, b, layout=layout, grad=True, bias=bias)
    assert db is not None
    assert_near(db, (b32.bfloat16() if kind else b32).float().sum(0))


@pytest.mark.parametrize("kind", [None, "float8_current", "mxfp8", "nvfp4"])
def test_gelu(kind: str | None) -> None:
    a, b, wanted, *_ = case("TN", kind)
    bias = sample((N,), torch.bfloat16, 7)
    given = torch.empty(M, N, dtype=torch.bfloat16)
    d, db, pre, _ = general_gemm(a, b, gelu=True, gelu_in=given, bias=bias)
    assert pre is given or (pre is not None and pre.data_ptr() == given.data_ptr())
    assert db is None
    assert_near(pre, wanted + bias.float(), BF16)
    assert_near(d, functional.gelu(pre.float(), approximate="tanh"), BF16)
    again = general_gemm(a, b, gelu=True, bias=bias)
    assert torch.equal(again[0], d)
    assert torch.equal(again[2], pre)

    a, b, wanted, *_ = case("NN", kind)
    before = sample((M, K), torch.bfloat16, 9)
    leaf = before.float().requires_grad_()
    functional.gelu(leaf, approximate="tanh").backward(wanted)
    bias = sample((K,), seed=3)
    d, db, pre, _ = general_gemm(a, b, layout="NN", gelu=True, gelu_in=before, grad=True, bias=bias)
    assert leaf.grad is not None
    assert_near(d, leaf.grad, 2 * BF16)
    assert db is not None
    assert_near(db, d.float().sum(0))
    assert torch.equal(pre, before)


def test_leading_dimensions() -> None:
    a, b = sides("TN")
    d = general_gemm(a, b.view(4, 12, K))[0]
    assert torch.equal(d, general_gemm(a, b)[0].view(4, 12, N))
    out = torch.empty(4, 12, N, dtype=torch.bfloat16)
    assert general_gemm(a, b.view(4, 12, K), out=out)[0] is out
    assert torch.equal(out, d)
    x, dy = sides("NT")
    assert torch.equal(
        general_gemm(x.view(4, 12, K), dy.view(4, 12, N), layout="NT")[0], general_gemm(x, dy, layout="NT")[0]
    )


def test_mixed_operands() -> None:
    """One side quantized; E4M3 by E5M2; both sides transformed, which cancels."""
    w, x = sides("TN")
    w_q = mz.MXFP8Quantizer(DType.kFloat8E4M3).quantize(w)
    assert_near(general_gemm(w_q, x)[0], x.float() @ w_q.dequantize().float().t(), BF16)
    w, dy = sides("NN")
    w_q = mz.Float8CurrentScalingQuantizer(DType.kFloat8E4M3).quantize(w)
    dy_q = mz.Float8CurrentScalingQuantizer(DType.kFloat8E5M2).quantize(dy)
    d = general_gemm(w_q, dy_q, torch.float32, layout="NN")[0]
    assert_near(d, dy_q.dequantize(dtype=torch.float32) @ w_q.dequantize(dtype=torch.float32))
    x, dy = sides("NT")
    rht = FORMATS["nvfp4_rht"]
    d = general_gemm(rht.quantize(x), rht.quantize(dy), torch.float32, layout="NT")[0]
    assert_near(d, dy.float().t() @ x.float(), 0.3)


def test_storages_and_parameters() -> None:
    w, x = sides("TN")
    quantizer = mz.MXFP8Quantizer(DType.kFloat8E4M3)
    tensor = torch.nn.Parameter(quantizer.quantize(w))
    quantizer.internal = True
    assert torch.equal(
        general_gemm(tensor, quantizer.quantize(x))[0], general_gemm(quantizer.quantize(w), quantizer.quantize(x))[0]
    )
    assert not general_gemm(tensor, x.requires_grad_())[0].requires_grad


@pytest.mark.parametrize("kind", ["float8_current", "float8_delayed", "mxfp8", "nvfp4"])
def test_output_is_quantized(kind: str) -> None:
    w, x = sides("TN")
    plain = general_gemm(w, x)[0]
    made = general_gemm(w, x, quantization_params=FORMATS[kind].quantizer())[0]
    expected = FORMATS[kind].quantize(plain)
    assert type(made) is type(expected)
    assert torch.equal(made.dequantize(), expected.dequantize())
    out = FORMATS[kind].quantize(plain * 3)
    given = general_gemm(w, x, quantization_params=FORMATS[kind].quantizer(), out=out)[0]
    assert given is out
    assert torch.equal(out.dequantize(), expected.dequantize())


@pytest.mark.parametrize("shape", [(0, N, K), (M, N, 0), (M, 0, K)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    d = general_gemm(torch.zeros(n, k), torch.zeros(m, k), bias=torch.ones(n))[0]
    assert d.shape == (m, n)
    assert (d == 1).all()


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("kind", [None, "float8_current", "mxfp8", "nvfp4"])
def test_compiled(kind: str | None) -> None:
    """A product, its GELU and a sum into a given tensor, in one graph, bit for bit."""
    a, b, *_ = case("TN", kind)
    bias = sample((N,), torch.bfloat16, 7)

    def call(a: Any, b: Any, out: torch.Tensor) -> Any:
        general_gemm(a, b, out=out, accumulate=True)
        return general_gemm(a, b, bias=bias, gelu=True)[:3:2], general_grouped_gemm([a, a], [b, b], None, None, None)[0]

    first, second = torch.ones(M, N), torch.ones(M, N)
    (d, pre), (one, two) = torch.compile(call, fullgraph=True, backend="aot_eager")(a, b, first)
    (d2, pre2), (one2, two2) = call(a, b, second)
    for x, y in ((d, d2), (pre, pre2), (one, one2), (two, two2), (first, second)):
        assert torch.equal(x, y)


def test_own_quantizer_multiplies() -> None:
    """Of a user's: its `qgemm` is told which product it is."""
    calls: list[dict[str, Any]] = []
    quantizer = Int8Quantizer(calls)
    for layout in LAYOUTS:
        a, b = sides(layout)
        left, right = b.float().t() if layout[1] == "T" else b.float(), a.float().t() if layout[0] == "T" else a.float()
        d = general_gemm(quantizer.quantize(a), quantizer.quantize(b), torch.float32, layout=layout)[0]
        assert_near(d, left @ right, 0.02)
    assert [call["gemm_type"].name for call in calls] == ["FPROP", "DGRAD", "WGRAD"]
    a, b = sides("TN")
    made, *_ = general_grouped_gemm([quantizer.quantize(a)] * 2, [quantizer.quantize(b)] * 2, None, None, torch.float32)
    assert len(calls) == 5
    assert torch.equal(made[0], made[1])


# Groups

SPLITS = (16, 0, 48)


def groups(layout: str, kind: str | None) -> tuple[list[Any], list[Any], list[torch.Tensor], list[torch.Tensor]]:
    cases = [case(layout, kind, rows) for rows in SPLITS]
    return [c[0] for c in cases], [c[1] for c in cases], [c[2] for c in cases], [c[4] for c in cases]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups(layout: str, kind: str | None) -> None:
    a, b, wanted, b32 = groups(layout, kind)
    splits = None if layout == "NT" else SPLITS
    out = [torch.full(w.shape, torch.nan) for w in wanted]
    bias = [sample((w.shape[1],), seed=i) for i, w in enumerate(wanted)]
    made, biases, pre = general_grouped_gemm(a, b, out, None, None, layout, splits, bias=bias, use_bias=True)
    assert all(x is y for x, y in zip(made, out, strict=True))
    assert biases == bias
    assert pre == [None] * 3
    for x, y, one in zip(out, wanted, bias, strict=True):
        assert_near(x, y + one)
    _, dbs, _ = general_grouped_gemm(
        a, b, out, None, None, layout, grad=True, accumulate=True, bias=bias, use_bias=True, use_split_accumulator=True
    )
    for x, y, one, db, values in zip(out, wanted, bias, dbs, b32, strict=True):
        assert_near(x, 2 * y + one)
        assert db is not None
        assert_near(db, (values.bfloat16() if kind else values).float().sum(0))


def test_groups_in_one_output() -> None:
    a, b, wanted, _ = groups("TN", "mxfp8")
    out = torch.empty(sum(SPLITS), N)
    made, *_ = general_grouped_gemm(a, b, [out], None, None, "TN", SPLITS, single_output=True, D_dtype=DType.kFloat32)
    assert made[0] is out
    assert len(made) == 1
    assert_near(out, torch.cat(wanted))
    made, *_ = general_grouped_gemm(a, b, None, None, torch.float32)
    assert torch.equal(torch.cat(made), out)


def test_groups_one_by_one() -> None:
    """With GELU, and quantized."""
    a, b, _, _ = groups("TN", "float8_current")
    quantizers = [mz.MXFP8Quantizer(DType.kFloat8E4M3) for _ in SPLITS]
    bias = [sample((N,), torch.bfloat16, i) for i in range(3)]
    made, _, pre = general_grouped_gemm(a, b, None, quantizers, None, gelu=True, bias=bias, use_bias=True)
    for one, x, y, p, z in zip(made, a, b, pre, bias, strict=True):
        single = general_gemm(x, y, gelu=True, bias=z, quantization_params=quantizers[0])
        assert torch.equal(one.dequantize(), single[0].dequantize())
        assert torch.equal(p, single[2])


# The rest


def test_replace_raw_data() -> None:
    x = sample((M, K))
    for kind in ("float8_current", "float8_block_1d", "mxfp8", "nvfp4"):
        tensor = FORMATS[kind].quantize(x)
        value, name = tensor.dequantize(), type(tensor)._ROWWISE[0]
        new = torch.zeros_like(getattr(tensor, name))
        replace_raw_data(tensor, new)
        assert getattr(tensor, name).data_ptr() == new.data_ptr()
        assert torch.equal(tensor.dequantize(), value)
    with pytest.raises(ValueError, match="new_raw_data"):
        replace_raw_data(tensor, new[:1])
    with pytest.raises(ValueError, match="no row-wise"):
        replace_raw_data(FORMATS["mxfp8"].quantize(x, False, True), new)
    with pytest.raises(TypeError, match="give a quantized one"):
        replace_raw_data(x, new)  # type: ignore[arg-type]


def test_is_custom() -> None:
    class Mine(mz.MXFP8Quantizer):
        custom = True

    assert is_custom(Mine(DType.kFloat8E4M3))
    assert not is_custom()
    assert not is_custom(torch.zeros(2))
    assert not is_custom(mz.MXFP8Quantizer(DType.kFloat8E4M3))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layout": "TT"}, ValueError, "layout is 'TT'"),
        ({"ub": object()}, NotImplementedError, "ub is given"),
        ({"bulk_overlap": True}, NotImplementedError, "functional collectives"),
        ({"extra_output": torch.zeros(1)}, NotImplementedError, "extra_output"),
        ({"beta": 1.0}, ValueError, "beta is 1.0"),
        ({"accumulate": True}, ValueError, "give out"),
        ({"out": torch.zeros(2, 2)}, ValueError, r"out has shape \(2, 2\)"),
        ({"out": torch.zeros(M, N), "out_dtype": torch.float16}, ValueError, "out_dtype"),
        ({"out_dtype": torch.float64}, ValueError, "out_dtype is torch.float64"),
        ({"out": torch.zeros(M, N), "accumulate": True, "gelu": True}, ValueError, "gelu"),
        ({"gelu": True, "grad": True}, ValueError, "gelu_in is None"),
        ({"gelu": True, "gelu_in": torch.zeros(3)}, ValueError, "gelu_in has shape"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias has shape \(3,\)"),
        ({"layout": "NN"}, ValueError, "B and A contract over"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], words: str) -> None:
    w, x = sides("TN", torch.float32)
    with pytest.raises(error, match=words):
        general_gemm(w, x, **options)


def test_bad_groups() -> None:
    w, x = sides("TN")
    for arguments, words in (
        (([w], [], None, None, None), "A has 1 groups, B has 0"),
        (([w], [x], [x, x], None, None), "out has 2 tensors"),
        (([w], [x], None, None, None, "TN", [3]), "m_splits"),
        (([w], [x], [x], None, None, "TN", None, False, False, False, None, False, False, None, True), "single_output"),
        (([w], [x], None, None, None, "TN", None, False, False, False, None, True), "use_bias"),
        (([w, w], [x, x[:, 1:]], None, None, None), r"B\[1\] and A\[1\] contract over"),
    ):
        with pytest.raises(ValueError, match=words):
            general_grouped_gemm(*arguments)  # type: ignore[arg-type]
    needs_columnwise = mz.MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False).quantize(w)
    with pytest.raises(ValueError, match="columnwise"):
        general_gemm(needs_columnwise, sides("NN")[1], layout="NN")
