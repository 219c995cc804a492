"""D = A·Bᵀ on the CPU: every kind against FP64, the flags, the errors, the ops."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import formats, hw
from mezzotint.constants import E4M3, E5M2
from mezzotint.formats import FORMATS, HIGH
from mezzotint.kernels import gemm as gemm_file
from mezzotint.kernels.gemm import Operand, check_output, flat, gemm, gemm_reference
from mezzotint.kernels.operand import check_pair, exact_of
from mezzotint.recipe import MXFP8BlockScaling
from tests.operands import (
    BACKENDS,
    KINDS,
    QUANTIZED,
    decode,
    empty,
    error_of,
    fields,
    product_and_bound,
    quantize,
    relative_error,
)

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16

SIZES = [(1, 1, 1), (16, 32, 64), (5, 7, 33), (40, 24, 130), (129, 131, 257)]  # tokens, out, in

# Format → the kinds of input, weight and gradient.
ROLES = {"high": (HIGH, HIGH, HIGH)} | {
    name: (*made.products[0], made.products[1][0]) for name, made in FORMATS.items()
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check_close(got: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None = None) -> None:
    expected, bound = product_and_bound(a, b, bias, got.dtype)
    assert got.shape == expected.shape
    excess = (got.double() - expected).abs() - bound
    assert bool((excess <= 0).all()), f"off by {float(excess.max())} more than its bound"


def products(
    name: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> dict[str, tuple[Operand, Operand, torch.Tensor]]:
    """The three GEMMs of a linear layer, with the product of what was not quantized."""
    kind_x, kind_w, kind_dy = ROLES[name]
    dtype = E5M2 if name == "float8" else None
    return {
        "fprop": (quantize(x, kind_x), quantize(w, kind_w), x.double() @ w.double().t()),
        "dgrad": (
            quantize(dy, kind_dy, dtype=dtype),
            quantize(w, kind_w, columnwise=True),
            dy.double() @ w.double(),
        ),
        "wgrad": (
            quantize(dy, kind_dy, dtype=dtype, columnwise=True),
            quantize(x, kind_x, columnwise=True),
            dy.double().t() @ x.double(),
        ),
    }


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ROLES)
def test_products_of_a_linear_layer(name: str, sizes: tuple[int, int, int], which: str) -> None:
    tokens, out, into = sizes
    x, w, dy = torch.randn(tokens, into), torch.randn(out, into), torch.randn(tokens, out)
    a, b, unquantized = products(name, x.bfloat16(), w.bfloat16(), dy.bfloat16())[which]
    got = gemm(a, b, out_dtype=F32 if name != "high" else B16)
    check_close(got, a, b)
    if min(sizes) > 16:
        error = error_of(a.kind, b.kind) * (2 if a.dtype == E5M2 else 1)
        assert relative_error(got, unquantized) < error


@pytest.mark.parametrize("kind_b", KINDS)
@pytest.mark.parametrize("kind_a", KINDS)
def test_any_pair_of_kinds(kind_a: str, kind_b: str) -> None:
    a, b = quantize(torch.randn(37, 100), kind_a), quantize(torch.randn(45, 100), kind_b)
    for out_dtype in (F32, B16):
        check_close(gemm(a, b, out_dtype=out_dtype), a, b)


@pytest.mark.parametrize("dtype", [F32, F16, B16])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_an_unquantized_operand_sets_the_dtype(kind: str, dtype: torch.dtype) -> None:
    x, q = torch.randn(20, 65).to(dtype), quantize(torch.randn(13, 65), kind)
    check_close(gemm(Operand(x), q, out_dtype=dtype), Operand(x), q)
    check_close(gemm(q, Operand(x), out_dtype=F32), q, Operand(x))


def test_unequal_unquantized_operands_promote() -> None:
    a, b = Operand(torch.randn(4, 9).half()), Operand(torch.randn(5, 9).bfloat16())
    assert torch.equal(gemm(a, b, out_dtype=F32), a.data.float() @ b.data.float().t())


@pytest.mark.parametrize("is_slow", [False, True])
def test_bf16_where_its_product_is_slow(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ARM CPUs without BF16 instructions the product of FP32 copies, rounded once; of FP32 there is one way."""
    monkeypatch.setattr(hw, "SLOW_BF16", is_slow)
    a, b = torch.randn(40, 130).bfloat16(), torch.randn(24, 130).bfloat16()
    exactly = (a.float() @ b.float().t()).bfloat16() if is_slow else a @ b.t()
    assert torch.equal(gemm(Operand(a), Operand(b), out_dtype=B16), exactly)
    assert torch.equal(gemm(Operand(a.float()), Operand(b.float()), out_dtype=F32), a.float() @ b.float().t())


@pytest.mark.parametrize("dtype_b", [E4M3, E5M2])
@pytest.mark.parametrize("dtype_a", [E4M3, E5M2])
@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if E5M2 in formats.KINDS[kind].elements])
def test_element_types(kind: str, dtype_a: int, dtype_b: int) -> None:
    a = quantize(torch.randn(18, 70), kind, dtype=dtype_a)
    b = quantize(torch.randn(21, 70), kind, dtype=dtype_b)
    check_close(gemm(a, b, out_dtype=F32), a, b)


@pytest.mark.parametrize("kind", ["mx", "nv"])
def test_swizzled_scales_are_the_same_scales(kind: str) -> None:
    x, w = torch.randn(150, 200), torch.randn(40, 200)
    plain = gemm(quantize(x, kind), quantize(w, kind), out_dtype=F32)
    for sides in ((True, True), (True, False), (False, True)):
        a, b = (quantize(t, kind, swizzled=s) for t, s in zip((x, w), sides, strict=True))
        assert torch.equal(gemm(a, b, out_dtype=F32), plain)


@pytest.mark.parametrize("swizzled", [False, True])
def test_mx_columnwise(swizzled: bool) -> None:
    stored = quantize(torch.randn(96, 64), "mx", columnwise=True, swizzled=swizzled)
    other = quantize(torch.randn(33, 96), "mx")
    check_close(gemm(stored, other, out_dtype=F32), stored, other)
    check_close(gemm(other, stored, out_dtype=F32), other, stored)


@pytest.mark.parametrize(("scaled_a", "scaled_b"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("max_a", "max_b"), [(448, 448), (256, 448), (256, 256)])
def test_nvfp4_factor_rounds_as_written(scaled_a: bool, scaled_b: bool, max_a: int, max_b: int) -> None:
    a = quantize(torch.randn(12, 48) * 3, "nv", row_scaled=scaled_a, e4m3_max=max_a)
    b = quantize(torch.randn(9, 48), "nv", row_scaled=scaled_b, e4m3_max=max_b)
    assert a.amax is not None
    assert b.amax is not None
    values = exact_of(a)(a, 48, F32), exact_of(b)(b, 48, F32)
    assert torch.equal(values[0].double() * a.amax.double().view(-1, 1) / (6 * max_a), decode(a))
    y, unit = values[0] @ values[1].t(), torch.tensor(1.0 / (36.0 * max_a * max_b))
    if not scaled_a and not scaled_b:
        y = y * (a.amax * b.amax * unit)
    elif scaled_a and scaled_b:
        y = y * unit * a.amax[:, None] * b.amax[None, :]
    else:
        y = (y * unit) * (a.amax.view(-1, 1) * b.amax.view(1, -1))
    assert torch.equal(gemm(a, b, out_dtype=F32), y)


def test_nvfp4_odd_sizes_and_hadamard_padding() -> None:
    x = torch.randn(21, 12)
    a = quantize(x, "nv", columnwise=True)  # (12, 11 bytes): 22 codes for 21 tokens
    for other in (quantize(torch.randn(21, 8), "nv", columnwise=True), quantize(torch.randn(8, 21), "mx")):
        check_close(gemm(a, other, out_dtype=F32), a, other)
        check_close(gemm(other, a, out_dtype=F32), other, a)
    padded = replace(a, data=torch.nn.functional.pad(a.data, (0, 5)))  # 32 codes, as after a Hadamard transform
    b = quantize(torch.randn(21, 8), "nv", columnwise=True)
    assert torch.equal(gemm(padded, b, out_dtype=F32), gemm(a, b, out_dtype=F32))


@pytest.mark.cover(2)
@pytest.mark.parametrize("bias_dtype", [F32, F16, B16])
@pytest.mark.parametrize("out_dtype", [F32, F16, B16])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_is_added_in_fp32_before_the_cast(kind: str, out_dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    a, b = quantize(torch.randn(19, 64), kind), quantize(torch.randn(11, 64), kind)
    bias = torch.randn(11).to(bias_dtype)
    wide = gemm(a, b, out_dtype=F32)
    got = gemm(a, b, out_dtype=out_dtype, bias=bias)
    assert got.dtype == out_dtype
    assert torch.equal(got, (wide + bias.float()).to(out_dtype))
    if kind != "high":
        assert torch.equal(gemm(a, b, out_dtype=out_dtype), wide.to(out_dtype))


# Without gradients, as in a backward, eager code goes straight to the product; else through the op.
through_the_op_or_not = pytest.mark.parametrize("is_op", [True, False])


@pytest.mark.parametrize("dtype", [F32, F16, B16])
@pytest.mark.parametrize("kind", KINDS)
@through_the_op_or_not
def test_accumulate(kind: str, dtype: torch.dtype, is_op: bool) -> None:
    a, b = quantize(torch.randn(10, 40), kind), quantize(torch.randn(6, 40), kind)
    total = torch.randn(10, 6).to(dtype)
    expected = total + gemm(a, b, out_dtype=dtype, bias=torch.ones(6))
    with torch.set_grad_enabled(is_op):
        got = gemm(a, b, out_dtype=F32, bias=torch.ones(6), accumulate=total)
    assert got is total
    assert torch.equal(got, expected)


@through_the_op_or_not
def test_accumulate_into_a_view(is_op: bool) -> None:
    a, b = Operand(torch.randn(4, 8)), Operand(torch.randn(3, 8))
    whole = torch.ones(6, 8)
    with torch.set_grad_enabled(is_op):
        gemm(a, b, out_dtype=F32, accumulate=whole[1:5, ::3])
    assert torch.equal(whole[1:5, ::3], 1 + gemm(a, b, out_dtype=F32))
    assert int((whole != 1).sum()) == 12


@pytest.mark.cover(2)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(0, 4, 8), (4, 0, 8), (4, 6, 0), (0, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty(kind: str, sizes: tuple[int, int, int], with_bias: bool) -> None:
    rows_a, rows_b, size = sizes
    a, b = (empty(kind, rows, size) for rows in (rows_a, rows_b))
    bias = torch.randn(rows_b) if with_bias else None
    expected = torch.zeros(rows_a, rows_b) if bias is None else bias.expand(rows_a, rows_b)
    for dtype in (F32, B16):
        assert torch.equal(gemm(a, b, out_dtype=dtype, bias=bias), expected.to(dtype))
        total = torch.ones(rows_a, rows_b, dtype=dtype)
        assert torch.equal(gemm(a, b, out_dtype=dtype, bias=bias, accumulate=total), 1 + expected.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_fast_accum_is_a_permission(kind: str) -> None:
    a, b = quantize(torch.randn(10, 40), kind), quantize(torch.randn(6, 40), kind)
    assert torch.equal(gemm(a, b, out_dtype=F32, fast_accum=True), gemm(a, b, out_dtype=F32))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind: str) -> None:
    a, b = quantize(torch.randn(10, 40), kind), quantize(torch.randn(6, 40), kind)
    expected = gemm(a, b, out_dtype=F32, bias=torch.ones(6))
    with torch.autocast("cpu", dtype=B16):
        assert torch.equal(gemm(a, b, out_dtype=F32, bias=torch.ones(6)), expected)


def test_strided_views() -> None:
    x = quantize(torch.randn(20, 64), "tensor")
    wide = replace(x, data=torch.stack((x.data, x.data), -1)[..., 0])
    assert not wide.data.is_contiguous()
    b = quantize(torch.randn(8, 64), "tensor")
    assert torch.equal(gemm(wide, b, out_dtype=F32), gemm(x, b, out_dtype=F32))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_emulation_in_bf16_is_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU without a GEMM for the kind runs, here with FP32 instead of its tensor cores."""
    monkeypatch.setattr(gemm_file, "_mm_fp32", lambda x, y, out: torch.mm(x.float(), y.float().t()))
    a, b = quantize(torch.randn(30, 70), kind, pow2=True), quantize(torch.randn(12, 70), kind, pow2=True)
    for dtype, bias in ((F32, None), (B16, torch.randn(12))):
        out, expected = torch.empty(2, 30, 12, dtype=dtype)
        BACKENDS["emulated"](out, a, b, bias, False)
        gemm_reference(expected, a, b, bias)
        assert torch.equal(out, expected)


@pytest.fixture
def no_news() -> Iterator[None]:
    """Nobody was told of anything yet."""
    hw.tell_emulated.cache_clear()
    yield
    hw.tell_emulated.cache_clear()


def at_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of Hopper's, with the CPU's tensors."""
    monkeypatch.setattr(gemm_file, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(gemm_file, "_mm_fp32", lambda x, y, out: torch.mm(x.float(), y.float().t()))


def test_emulation_is_told_once(monkeypatch: pytest.MonkeyPatch, no_news: None) -> None:
    at_hopper(monkeypatch)
    mx, nv = ((quantize(torch.randn(32, 64), kind), quantize(torch.randn(16, 64), kind)) for kind in ("mx", "nv"))
    with pytest.warns(hw.EmulationWarning) as told:
        _ = [gemm(*pair, out_dtype=dtype) for dtype in (B16, F32, B16) for pair in (mx, nv)]
    assert [str(warning.message).split(" are ")[0] for warning in told] == ["MXFP8 products", "NVFP4 products"]
    assert "native products need an NVIDIA GPU of compute capability 10.0" in str(told[0].message)
    assert 'filterwarnings("ignore", category=mezzotint.EmulationWarning)' in str(told[0].message)


def test_nothing_is_told_of_two_element_types(monkeypatch: pytest.MonkeyPatch, no_news: None) -> None:
    """No GPU multiplies E5M2 by E5M2, and Hopper has the format."""
    at_hopper(monkeypatch)
    a, b = (quantize(torch.randn(16, 64), "tensor", dtype=E5M2) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm(a, b, out_dtype=B16)


def test_nothing_is_told_on_the_cpu(no_news: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm(quantize(torch.randn(16, 64), "nv"), quantize(torch.randn(16, 64), "nv"), out_dtype=B16)


@pytest.mark.compile
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_tells_of_emulation(compiled: bool, monkeypatch: pytest.MonkeyPatch, no_news: None) -> None:
    """Compiled too: the product of a graph tells when it runs, and the graph is whole."""
    at_hopper(monkeypatch)
    module = mz.Linear(64, 64, params_dtype=B16, device="cpu")
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x = torch.randn(32, 64, dtype=B16, requires_grad=True)

    def steps() -> None:
        for _ in range(2):
            with mz.autocast(recipe=MXFP8BlockScaling()):
                y = call(x)
            y.sum().backward()

    with pytest.warns(hw.EmulationWarning, match=r"MXFP8 products are emulated on this GPU \(sm_90") as told:
        steps()
    assert len(told) == 1


@pytest.mark.gpu
def test_a_gpu_tells_of_emulation(no_news: None) -> None:
    module = mz.Linear(64, 64, params_dtype=B16, device="cuda")
    with warnings.catch_warnings(record=True) as told, mz.autocast(recipe=MXFP8BlockScaling()):
        warnings.simplefilter("always")
        module(torch.randn(32, 64, dtype=B16, device="cuda"))
    found = [warning for warning in told if warning.category is mz.EmulationWarning]
    assert len(found) == (not mz.is_mxfp8_available(native=True))


def test_every_backend_of_the_table_exists() -> None:
    assert all(callable(product) for product in BACKENDS.values())
    native = {kind for row in hw.gemm_backends() for kind in (row.kind_a, row.kind_b)}
    assert native - {*KINDS, hw.ANY} == set()
    assert {*KINDS} - native == {"mx4", "mx6"}  # which no GPU multiplies through PyTorch


# Compiled.


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_eager(kind: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        a, b = quantize(x, kind), quantize(w, kind)
        y = gemm(a, b, out_dtype=B16, bias=bias)
        dw = gemm(quantize(y, kind, columnwise=True), quantize(x, kind, columnwise=True), out_dtype=F32)
        gemm(quantize(y, kind, columnwise=True), quantize(x, kind, columnwise=True), out_dtype=F32, accumulate=total)
        return [y, dw, total]

    x, w, bias = torch.randn(48, 96).bfloat16(), torch.randn(32, 96).bfloat16(), torch.randn(32)
    eager = step(x, w, bias, torch.ones(32, 96))
    compiled = torch.compile(step, fullgraph=True)(x, w, bias, torch.ones(32, 96))
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


@pytest.mark.compile
def test_dynamic_tokens_compile_once() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = (quantize(t, "mx", columnwise=True, swizzled=True) for t in (x, w))
        return gemm(a, b, out_dtype=F32)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (96, 128, 160):
        x, w = torch.randn(tokens, 32), torch.randn(tokens, 64)
        assert torch.equal(compiled(x, w), step(x, w))
    assert counter.frame_count == 1


# The ops themselves.


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    a = quantize(torch.randn(6, 40), kind, swizzled=True)
    b = quantize(torch.randn(40, 5), kind, columnwise=True, swizzled=True)
    for bias, dtype in ((None, B16), (torch.randn(5), F32)):
        arguments = (*flat(a), *flat(b), bias)
        torch.library.opcheck(torch.ops.mezzotint.gemm.default, (*arguments, dtype, False))
        torch.library.opcheck(torch.ops.mezzotint.gemm_.default, (torch.ones(6, 5, dtype=dtype), *arguments, False))


def test_flat_is_the_order_of_the_fields() -> None:
    op = quantize(torch.randn(4, 32), "nv")
    assert all(one is other for one, other in zip(flat(op), fields(op), strict=True))
    assert flat(op) == tuple(getattr(op, name) for name in Operand.__slots__)


# Errors.


def _pair() -> tuple[Operand, Operand]:
    return quantize(torch.randn(4, 32), "tensor"), quantize(torch.randn(6, 32), "tensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "int8"}, r"a\.kind is 'int8'"),
        ({"scale": None}, r"a\.scale is missing"),
        ({"scale": torch.ones(2)}, r"a\.scale has shape \(2,\): expected \(1,\)"),
        ({"dtype": 0}, r"a\.dtype is 0"),
        ({"data": torch.zeros(32, dtype=torch.uint8)}, r"a\.data has shape \(32,\)"),
        ({"data": torch.zeros(4, 32)}, r"a\.data is torch\.float32: codes are torch\.uint8"),
        ({"data": torch.zeros(4, 31, dtype=torch.uint8)}, r"a and b contract over 31 and 32"),
        ({"transposed": True}, r"a\.transposed is for kind 'mx'"),
        ({"kind": "high"}, r"a\.data is torch\.uint8: an unquantized operand"),
        ({"scale": torch.ones(1, device="meta")}, r"a\.scale is on meta, a\.data on cpu"),
    ],
)
def test_a_bad_operand_is_named(change: dict, message: str) -> None:
    a, b = _pair()
    with pytest.raises(ValueError, match=message):
        check_pair(replace(a, **change), b)


def test_other_bad_arguments_are_named() -> None:
    a, b = _pair()
    shape, cpu = (4, 6), torch.device("cpu")
    with pytest.raises(ValueError, match=r"b\.scale is missing"):
        check_pair(a, replace(b, scale=None))
    with pytest.raises(ValueError, match=r"b\.data is on meta"):
        check_pair(a, replace(b, data=b.data.to("meta")))
    with pytest.raises(ValueError, match=r"out_dtype is torch\.int8"):
        check_output(shape, cpu, torch.int8, None, None)
    with pytest.raises(ValueError, match=r"bias is \(4,\) on cpu: expected \(6,\)"):
        check_output(shape, cpu, F32, torch.zeros(4), None)
    with pytest.raises(ValueError, match=r"accumulate is \(6, 4\) on cpu: expected \(4, 6\)"):
        check_output(shape, cpu, F32, None, torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"accumulate is torch\.uint8"):
        check_output(shape, cpu, F32, None, torch.zeros(4, 6, dtype=torch.uint8))
    nv = quantize(torch.randn(4, 32), "nv")
    with pytest.raises(ValueError, match=r"a\.amax is missing"):
        check_pair(replace(nv, amax=None), b)
    with pytest.raises(ValueError, match=r"a\.amax has shape \(3,\)"):
        check_pair(replace(nv, amax=torch.ones(3)), b)
