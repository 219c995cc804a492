"""Ragged groups on the CPU: as one GEMM after another, empty groups included."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mezzotint.constants import E4M3
from mezzotint.kernels import grouped_gemm as file
from mezzotint.kernels.gemm import Operand, gemm
from mezzotint.kernels.grouped_gemm import group_ends, grouped_gemm, grouped_gemm_packed, join_rows
from tests.operands import KINDS, empty, quantize

F32, B16 = torch.float32, torch.bfloat16
OUT, INTO = 24, 40


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fprop(kind: str, splits: list[int]) -> tuple[list[Operand], list[Operand]]:
    """Tokens by weights. An empty group is cut from a full one: a quantizer may refuse it."""
    a = [_rows(quantize(torch.randn(max(n, 1), INTO), kind), n) for n in splits]
    return a, [quantize(torch.randn(OUT, INTO), kind) for _ in splits]


def wgrad(kind: str, splits: list[int]) -> tuple[list[Operand], list[Operand]]:
    """Gradients by inputs, contracted over tokens. An empty one is a view of nothing."""
    sides = []
    for width in (OUT, INTO):
        sides.append([quantize(torch.randn(max(n, 1), width), kind, columnwise=True) for n in splits])
        sides[-1] = [_tokens(op, n) for op, n in zip(sides[-1], splits, strict=True)]
    return sides[0], sides[1]


def _rows(op: Operand, rows: int) -> Operand:
    return op if rows else empty(op.kind, 0, INTO)


def _tokens(op: Operand, tokens: int) -> Operand:
    return op if tokens else empty(op.kind, op.data.shape[1 if op.transposed else 0], 0, columnwise=True)


def one_by_one(a, b, out_dtype, biases=None) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    biases = biases or [None] * len(a)
    return [gemm(x, y, out_dtype=out_dtype, bias=bias) for x, y, bias in zip(a, b, biases, strict=True)]


SPLITS = [[16, 32], [7], [3, 0, 5, 0], [0, 9], [0, 0]]


@pytest.mark.cover(2)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("make", [fprop, wgrad])
@pytest.mark.parametrize("kind", KINDS)
def test_as_one_after_another(kind: str, make, splits: list[int], with_bias: bool) -> None:  # type: ignore[no-untyped-def]
    a, b = make(kind, splits)
    width = OUT if make is fprop else INTO
    biases = [torch.randn(width) for _ in splits] if with_bias else None
    expected = one_by_one(a, b, B16, biases)
    got = grouped_gemm(a, b, out_dtype=B16, bias=biases)
    packed = grouped_gemm_packed(a, b, out_dtype=B16, bias=biases)
    assert [t.shape for t in got] == [t.shape for t in expected]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(packed, torch.cat(expected))
    if make is wgrad and not with_bias:
        assert all(not g.any() for g, n in zip(got, splits, strict=True) if n == 0)


@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulate(kind: str, dtype: torch.dtype) -> None:
    a, b = wgrad(kind, [3, 0, 5])
    totals = [torch.randn(OUT, INTO).to(dtype) for _ in a]
    expected = [total + d for total, d in zip(totals, one_by_one(a, b, dtype), strict=True)]
    got = grouped_gemm(a, b, out_dtype=F32, accumulate=totals)
    assert all(one is other for one, other in zip(got, totals, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["high", "row", "mx"])
def test_compiled_is_eager_and_one_node(kind: str) -> None:
    splits = [16, 0, 32]
    graphs = []

    def step(x: torch.Tensor, ws: list[torch.Tensor], totals: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [_rows(quantize(part, kind), n) if n else None for part, n in zip(x.split(splits), splits, strict=True)]
        kept = [i for i, part in enumerate(parts) if part is not None]
        a, b = [parts[i] for i in kept], [quantize(ws[i], kind) for i in kept]
        y = grouped_gemm(a, b, out_dtype=B16)
        grouped_gemm(a, b, out_dtype=F32, accumulate=totals)
        return [*y, *totals]

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x, ws = torch.randn(48, INTO).bfloat16(), [torch.randn(OUT, INTO).bfloat16() for _ in splits]
    totals = [[torch.ones(n, OUT) for n in splits if n] for _ in range(3)]
    eager = step(x, ws, totals[0])
    for backend, total in zip((keep, "inductor"), totals[1:], strict=True):
        torch._dynamo.reset()
        got = torch.compile(step, fullgraph=True, backend=backend)(x, ws, total)
        assert all(torch.equal(one, other) for one, other in zip(got, eager, strict=True))
    names = [str(node.target) for node in graphs[0].graph.nodes if "gemm" in str(node.target)]
    assert names == ["mezzotint.grouped_gemm.default", "mezzotint.grouped_gemm_.default"]


@pytest.mark.parametrize("make", [fprop, wgrad])
@pytest.mark.parametrize("kind", ["high", "nv", "mx"])
def test_opcheck(kind: str, make) -> None:  # type: ignore[no-untyped-def]
    a, b = make(kind, [3, 0, 5])
    arguments = file._checked(a, b, F32, None, None)
    torch.library.opcheck(torch.ops.mezzotint.grouped_gemm.default, (*arguments, F32, False))
    outs = [torch.ones(t.shape) for t in grouped_gemm(a, b, out_dtype=F32)]
    torch.library.opcheck(torch.ops.mezzotint.grouped_gemm_.default, (outs, *arguments, False))


def test_results_share_one_buffer() -> None:
    a, b = fprop("high", [4, 8])
    got = grouped_gemm(a, b, out_dtype=F32)
    assert got[1].data_ptr() == got[0].data_ptr() + got[0].numel() * 4


def test_join() -> None:
    x = torch.randn(12, 8)
    parts = list(x.split([4, 3, 5]))
    joined = join_rows(parts, False)
    assert joined is not None
    assert joined.data_ptr() == x.data_ptr()
    assert torch.equal(joined, x)
    assert torch.equal(join_rows(parts[1:], False), x[4:])  # type: ignore[arg-type]
    for apart in ([parts[0], parts[2]], [parts[1], parts[0]], [parts[0], parts[1].clone()], [x.t(), x.t()]):
        assert join_rows(apart, False) is None
        assert torch.equal(join_rows(apart, True), torch.cat(apart))  # type: ignore[arg-type]


def test_offsets() -> None:
    got = group_ends([3, 5, 1], torch.device("cpu"))
    assert got.dtype == torch.int32
    assert got.tolist() == [3, 8, 9]


# What a GPU's grouped kernels are called with, on models of them.


def grouped_mm_model(x, y, offs, out_dtype):  # type: ignore[no-untyped-def]
    """`torch._grouped_mm`: 2-D by 3-D is ragged in the rows of x, 2-D by 2-D in the contraction."""
    assert out_dtype == B16
    assert all(t.stride(-1) == 1 or t.stride(-2) == 1 for t in (x, y))
    assert all(max(t.stride()[-2:]) * t.element_size() % 16 == 0 for t in (x, y))
    starts = [0, *offs.tolist()]
    assert all(low < high for low, high in pairwise(starts)), "an empty group"
    spans = [slice(*span) for span in pairwise(starts)]
    if y.dim() == 3:
        assert starts[-1] == x.shape[0]
        return torch.cat([x[span].float() @ y[i].float() for i, span in enumerate(spans)]).to(B16)
    return torch.stack([x[:, span].float() @ y[span].float() for span in spans]).to(B16)


def scaled_grouped_mm_model(x, y, scale_x, scale_y, offs, out_dtype, use_fast_accum):  # type: ignore[no-untyped-def]
    assert x.dtype == y.dtype == torch.float8_e4m3fn
    assert x.is_contiguous()
    assert y.transpose(1, 2).is_contiguous()
    assert scale_x.shape == (x.shape[0],)
    assert scale_y.shape == (y.shape[0], y.shape[2])
    assert all(size % 16 == 0 for size in (x.shape[1], y.shape[2], *offs.tolist()))
    wide = y.float() * scale_y[:, None, :]
    return grouped_mm_model(x.float() * scale_x[:, None], wide, offs, out_dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU pass for a GPU; the list tells which kernels ran."""
    used: list[str] = []

    def noted(name, function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            used.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(file, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(torch, "_grouped_mm", noted("bf16", grouped_mm_model), raising=False)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", noted("row", scaled_grouped_mm_model), raising=False)
    return used


def _close(got: torch.Tensor | None, expected: list[torch.Tensor]) -> bool:
    return got is not None and torch.allclose(got.float(), torch.cat(expected).float(), rtol=0.02, atol=0.02)


def test_grouped_kernels_are_called_as_they_ask(hopper: list[str]) -> None:
    splits = [16, 48, 32]
    x, dy = torch.randn(96, INTO).bfloat16(), torch.randn(96, OUT).bfloat16()
    w = torch.randn(3 * OUT, INTO).bfloat16().split([OUT] * 3)
    a, b = [Operand(t) for t in x.split(splits)], [Operand(t) for t in w]
    assert _close(file._joined_gemm(a, b, False), one_by_one(a, b, B16))
    apart = [replace(op, data=op.data.clone()) for op in b]
    assert _close(file._joined_gemm(a, apart, False), one_by_one(a, b, B16))  # small groups are joined by a copy
    da, db = [Operand(t.t()) for t in dy.split(splits)], [Operand(t.t()) for t in x.split(splits)]
    assert _close(file._joined_gemm(da, db, False), one_by_one(da, db, B16))
    qa, qb = ([quantize(op.data[:, :32].contiguous(), "row") for op in side] for side in (a, b))
    qb = [replace(op, data=op.data[:16], scale=op.scale[:16]) for op in qb]
    assert _close(file._joined_gemm(qa, qb, False), one_by_one(qa, qb, B16))
    assert hopper == ["bf16", "bf16", "bf16", "row"]


def test_grouped_kernels_are_left_alone_where_they_do_not_fit(
    hopper: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = fprop("row", [16, 8])
    assert file._joined_gemm(a, b, False) is None  # 8 tokens, 40 features
    a, b = fprop("mx", [16, 32])
    assert file._joined_gemm(a, b, False) is None
    a, b = ([Operand(op.data.half()) for op in side] for side in fprop("high", [16, 32]))
    assert file._joined_gemm(a, b, False) is None
    a, b = ([Operand(op.data.bfloat16()) for op in side] for side in fprop("high", [16, 32]))
    monkeypatch.setattr(file, "SMALL_GROUP", 8)
    assert file._joined_gemm(a, b, False) is None  # copying the weights would cost more than it saves
    monkeypatch.setattr(file, "capability_of", lambda x: (8, 9))
    assert file._joined_gemm(a, b, False) is None
    assert hopper == []


@pytest.mark.parametrize("splits", [[16, 0, 8, 0], [0, 3, 5], [0, 7], [0, 0]])
def test_grouped_kernels_see_no_empty_group(hopper: list[str], splits: list[int]) -> None:
    x, dy = torch.randn(sum(splits), INTO).bfloat16(), torch.randn(sum(splits), OUT).bfloat16()
    w = torch.randn(len(splits) * OUT, INTO).bfloat16().split([OUT] * len(splits))
    xs, dys = x.split(splits), dy.split(splits)
    for a, b in (
        ([Operand(t) for t in xs], [Operand(t) for t in w]),
        ([Operand(t.t()) for t in dys], [Operand(t.t()) for t in xs]),
    ):
        packed = grouped_gemm_packed(a, b, out_dtype=B16)
        assert packed.is_contiguous()
        assert _close(packed, one_by_one(a, b, B16))
    assert hopper == ["bf16"] * (2 if sum(n > 0 for n in splits) > 1 else 0)


def test_zeros_are_put_where_groups_were_left_out() -> None:
    product = torch.randn(4, 3)
    assert torch.equal(file._spread(product, [2, 0, 2], {0, 2}), product)
    spread = file._spread(product, [2, 2, 2], {0, 2})
    assert torch.equal(spread[:2], product[:2])
    assert torch.equal(spread[4:], product[2:])
    assert not spread[2:4].any()


def test_errors_name_the_argument() -> None:
    a, b = fprop("tensor", [4, 8])
    with pytest.raises(ValueError, match="a has 2 groups, b has 1"):
        grouped_gemm(a, b[:1], out_dtype=F32)
    with pytest.raises(ValueError, match="at least one"):
        grouped_gemm([], [], out_dtype=F32)
    with pytest.raises(ValueError, match=r"b\[1\] is .* groups must be alike"):
        grouped_gemm(a, [b[0], quantize(torch.randn(OUT, INTO), "row", dtype=E4M3)], out_dtype=F32)
    with pytest.raises(ValueError, match=r"b\[1\] has 5 rows"):
        grouped_gemm(a, [b[0], replace(b[1], data=b[1].data[:5])], out_dtype=F32)
    with pytest.raises(ValueError, match="bias has 1 entries"):
        grouped_gemm(a, b, out_dtype=F32, bias=[torch.zeros(OUT)])
    with pytest.raises(ValueError, match=r"bias\[1\] is \(3,\)"):
        grouped_gemm(a, b, out_dtype=F32, bias=[torch.zeros(OUT), torch.zeros(3)])
    with pytest.raises(ValueError, match=r"accumulate\[1\] is \(4, 24\)"):
        grouped_gemm(a, b, out_dtype=F32, accumulate=[torch.zeros(4, OUT)] * 2)
