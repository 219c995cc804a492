"""Tokens sorted by expert and back, against loops over tokens and experts."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint.constants import DType

HIDDEN = 3
Place = tuple[int, int]  # a token, and which of its choices


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def places_of(table: list[list[int]], map_type: str, rows: int = -1) -> list[Place | None]:
    """What stands in each row: expert by expert, tokens in order; nothing in rows past the last."""
    experts = range(len(table[0]) if map_type == "mask" else 1 + max([-1, *[e for line in table for e in line]]))
    found: list[Place | None] = []
    for expert in experts:
        for token, line in enumerate(table):
            for choice, value in enumerate(line):
                if (choice == expert and value != 0) if map_type == "mask" else value == expert:
                    found.append((token, choice))
    return found if rows == -1 else [*found, *[None] * rows][:rows]


def permuted(x: torch.Tensor, places: list[Place | None]) -> torch.Tensor:
    rows = [x.new_zeros(x.shape[1]) if place is None else x[place[0]] for place in places]
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


def unpermuted(y: torch.Tensor, places: list[Place | None], tokens: int, probs: torch.Tensor | None) -> torch.Tensor:
    """In FP32, rounded at the end."""
    total = torch.zeros(tokens, y.shape[1])
    for row, place in enumerate(places):
        if place is not None:
            total[place[0]] += y[row].float() * (1.0 if probs is None else probs[place].float())
    return total.to(y.dtype)


@st.composite
def routings(given: Any) -> tuple[list[list[int]], str, int]:
    """A table [tokens, choices], its type, and how many rows are asked for."""
    tokens, experts = given(st.integers(0, 7)), given(st.integers(1, 5))
    map_type = given(st.sampled_from(["mask", "index"]))
    if map_type == "mask":
        line = st.lists(st.sampled_from([0, 1]), min_size=experts, max_size=experts)
    else:
        choices = given(st.integers(1, 3))
        line = st.lists(st.integers(-1, experts - 1), min_size=choices, max_size=choices)
    table = given(st.lists(line, min_size=tokens, max_size=tokens))
    routed = len(places_of(table, map_type)) if tokens else 0
    return table, map_type, given(st.integers(-1, routed + 2))


def as_map(table: list[list[int]], choices: int = 2, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(table, dtype=dtype) if table else torch.zeros(0, choices, dtype=dtype)


@settings(max_examples=150, deadline=None)
@given(routings(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_permute_and_unpermute(routing: tuple[list[list[int]], str, int], dtype: torch.dtype) -> None:
    table, map_type, count = routing
    tokens = len(table)
    places = places_of(table, map_type, count) if tokens else [None] * max(count, 0)
    x = draw(tokens, HIDDEN, dtype=dtype).requires_grad_()
    routing_map = as_map(table)
    y, row_id_map = mz.moe_permute(x, routing_map, count, map_type=map_type)
    assert y.dtype == dtype
    assert torch.equal(y, permuted(x, places))
    dy = draw(*y.shape, seed=1, dtype=dtype)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], unpermuted(dy, places, tokens, None))

    y = draw(*y.shape, seed=2, dtype=dtype).requires_grad_()
    plain = mz.moe_unpermute(y, row_id_map, restore_shape=(tokens, HIDDEN), map_type=map_type)
    assert torch.equal(plain, unpermuted(y, places, tokens, None))
    dx = draw(tokens, HIDDEN, seed=3, dtype=dtype)
    assert torch.equal(torch.autograd.grad(plain, y, dx)[0], permuted(dx, places))

    probs = draw(*routing_map.shape, seed=4).abs().requires_grad_()
    merged = mz.moe_unpermute(y, row_id_map, probs, map_type=map_type)
    assert torch.equal(merged, unpermuted(y, places, tokens, probs))
    dy, dprobs = torch.autograd.grad(merged, (y, probs), dx)
    expected_dy, expected_dprobs = torch.zeros_like(y), torch.zeros_like(probs)
    for row, place in enumerate(places):
        if place is not None:
            expected_dy[row] = (dx[place[0]].float() * probs[place]).to(dtype)
            expected_dprobs[place] = (dx[place[0]].float() * y[row].float()).sum()
    assert torch.equal(dy, expected_dy)
    torch.testing.assert_close(dprobs, expected_dprobs, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(routings().filter(lambda routing: routing[1] == "mask"), st.integers(1, 4))
def test_probs_go_with_their_rows_and_padding(routing: tuple[list[list[int]], str, int], align: int) -> None:
    table, _, count = routing
    tokens = len(table)
    mask = as_map(table)
    x, probs = draw(tokens, HIDDEN).requires_grad_(), draw(*mask.shape, seed=1).requires_grad_()
    places = places_of(table, "mask", count) if tokens else [None] * max(count, 0)
    check_with_probs(mz.moe_permute_with_probs(x, probs, mask, count)[:2], x, probs, places)

    counts = mask.sum(0)
    y, weights, row_id_map, offsets, padded = mz.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
    wanted: list[Place | None] = []
    for expert in range(mask.shape[1]):
        rows = [(token, expert) for token in range(tokens) if table[token][expert]]
        wanted += [*rows, *[None] * (-len(rows) % align)]
    assert padded.tolist() == [-(-size // align) * align for size in counts.tolist()]
    check_with_probs((y, weights), x, probs, wanted)
    back = mz.moe_unpermute(y, row_id_map, merging_probs=probs, pad_offsets=offsets)
    assert torch.equal(back, unpermuted(y, wanted, tokens, probs))


def check_with_probs(made: Any, x: torch.Tensor, probs: torch.Tensor, places: list[Place | None]) -> None:
    y, weights = made
    assert torch.equal(y, permuted(x, places))
    assert weights.tolist() == [0.0 if place is None else probs[place].item() for place in places]
    slopes = draw(len(places), seed=5)
    dx, dprobs = torch.autograd.grad((y, weights), (x, probs), (torch.ones_like(y), slopes))
    expected_dx, expected_dprobs = torch.zeros_like(x), torch.zeros_like(probs)
    for place, slope in zip(places, slopes, strict=True):
        if place is not None:
            expected_dx[place[0]] += 1.0
            expected_dprobs[place] += slope
    assert torch.equal(dx, expected_dx)
    assert torch.equal(dprobs, expected_dprobs)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_chunks(sizes: list[int], random: Any, as_tensors: bool) -> None:
    order = random.sample(range(len(sizes)), len(sizes))
    x, probs = draw(sum(sizes), HIDDEN).requires_grad_(), draw(sum(sizes), seed=1).requires_grad_()
    given_sizes, given_order = (torch.tensor(sizes), torch.tensor(order)) if as_tensors else (sizes, order)
    y, weights = mz.moe_sort_chunks_by_index_with_probs(x, probs, given_sizes, given_order)
    assert torch.equal(y, torch.cat([x.split(sizes)[chunk] for chunk in order]))
    assert torch.equal(weights, torch.cat([probs.split(sizes)[chunk] for chunk in order]))
    assert torch.equal(mz.moe_sort_chunks_by_index(x, given_sizes, given_order), y)
    dy, dweights = draw(*y.shape, seed=2), draw(*weights.shape, seed=3)
    dx, dprobs = torch.autograd.grad((y, weights), (x, probs), (dy, dweights))
    inverse = [order.index(chunk) for chunk in range(len(sizes))]
    sorted_sizes = [sizes[chunk] for chunk in order]
    assert torch.equal(dx, torch.cat([dy.split(sorted_sizes)[chunk] for chunk in inverse]))
    assert torch.equal(dprobs, torch.cat([dweights.split(sorted_sizes)[chunk] for chunk in inverse]))


MASK = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)  # the middle expert is empty
QUANTIZERS = {
    "current": (mz.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, None), True),
    "rowwise": (mz.Float8RowwiseQuantizer(DType.kFloat8E4M3), True),
    "mxfp8": (mz.MXFP8Quantizer(DType.kFloat8E4M3), True),
    "block": (mz.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1), True),
    "block_2d": (mz.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True), False),
    "nvfp4": (mz.NVFP4Quantizer(), False),
}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("rows", [5, 7])
def test_quantized_rows(name: str, rows: int) -> None:
    """Those that move as bytes stand for what they stood for; their gradient is the plain one."""
    quantizer, moves = QUANTIZERS[name]
    x = quantizer(draw(4, 128, dtype=torch.bfloat16)).requires_grad_()
    plain = x.detach().dequantize().requires_grad_()
    y, row_id_map = mz.moe_permute(x, MASK, rows)
    expected, _ = mz.moe_permute(plain, MASK, rows)
    assert isinstance(y, mz.QuantizedTensor) is moves
    assert torch.equal(y.dequantize(), expected)
    dy = draw(rows, 128, dtype=torch.bfloat16)
    gradients = [torch.autograd.grad(made, leaf, dy)[0] for made, leaf in ((y, x), (expected, plain))]
    assert torch.equal(*gradients)
    chunks = mz.moe_sort_chunks_by_index(x, [1, 3], [1, 0])
    assert torch.equal(chunks.dequantize(), plain[[1, 2, 3, 0]])
    assert torch.equal(mz.moe_unpermute(y.detach(), row_id_map), mz.moe_unpermute(expected, row_id_map))


@pytest.mark.parametrize("name", ["current", "rowwise", "mxfp8", "block"])
def test_quantized_rows_feed_a_product(name: str) -> None:
    """Moved bytes and their geometry are what quantizing the moved rows with the same scales gives."""
    quantizer, _ = QUANTIZERS[name]
    y, _ = mz.moe_permute(quantizer(draw(4, 128, dtype=torch.bfloat16)), MASK, 5)
    assert y.get_usages() == {"rowwise": True, "columnwise": False}
    described = y._quantizer._describe_buffers((5, 128))
    held = {name.removeprefix("_"): (tuple(buffer.shape), buffer.dtype) for name, buffer in y._buffers()}
    assert held == described


class SumDtypes(TorchDispatchMode):
    """The dtype of every sum of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_added_in_fp32(dtype: torch.dtype, weighted: bool, device: str) -> None:
    """2048 and sixteen times 1, which 16 bits would lose one by one: in unpermute, and in the gradient of permute. A
    CPU adds 16 bits in FP32 by itself, so what is added is looked at, too."""
    values = torch.tensor([2048.0] + [1.0] * 16, device=device)
    mask = torch.ones(1, len(values), dtype=torch.int32, device=device)
    x = torch.ones(1, HIDDEN, dtype=dtype, device=device).requires_grad_()
    rows, row_id_map = mz.moe_permute(x, mask, len(values))
    probs = values[None] if weighted else None
    y = torch.ones(len(values), HIDDEN, device=device) if weighted else values[:, None].expand(-1, HIDDEN)
    with SumDtypes() as seen:
        rows.backward(values[:, None].expand(-1, HIDDEN).to(dtype))
        made = mz.moe_unpermute(y.to(dtype), row_id_map, probs)
    expected = torch.full((1, HIDDEN), 2064.0, dtype=dtype, device=device)
    assert torch.equal(x.grad, expected)
    assert torch.equal(made, expected)
    assert seen.found == [torch.float32, torch.float32]


@pytest.mark.parametrize(("map_type", "table"), [("mask", [[1, 0], [1, 1], [0, 1]]), ("index", [[0], [0], [1], [1]])])
def test_the_map_says_which_rows_are_dropped(map_type: str, table: list[list[int]]) -> None:
    """Rows are 0, 1, …, N - 1; the one past them is nobody's, nor are those behind it."""
    routing_map, x = torch.tensor(table), draw(len(table), HIDDEN)
    _, whole = mz.moe_permute(x, routing_map, 4, map_type=map_type)
    for rows in range(5):
        _, row_id_map = mz.moe_permute(x, routing_map, rows, map_type=map_type)
        assert torch.equal(row_id_map, torch.where(whole < rows, whole, -1))
    if map_type == "mask":
        _, _, row_id_map = mz.moe_permute_with_probs(x, draw(3, 2), routing_map, 3)
        assert row_id_map.max() == 2


def test_nothing_is_read_where_nothing_is() -> None:
    """Rows that no token has are zeros, whatever lies in them: poison does not spread."""
    x = draw(4, HIDDEN)
    y, row_id_map = mz.moe_permute(x, MASK, 8)
    assert not y[5:].any()
    y[5:] = torch.nan
    probs = MASK.float().requires_grad_()
    y.requires_grad_()
    back = mz.moe_unpermute(y, row_id_map, probs)
    dy, dprobs = torch.autograd.grad(back, (y, probs), x)
    assert back.isfinite().all()
    assert dprobs.isfinite().all()
    assert not dy[5:].any()


def test_a_second_backward_gives_the_same() -> None:
    x, probs = draw(4, HIDDEN).requires_grad_(), draw(4, 3).requires_grad_()
    y, row_id_map = mz.moe_permute(x, MASK, 5)
    loss = mz.moe_unpermute(y * 2.0, row_id_map, probs).square().sum()
    first = torch.autograd.grad(loss, (x, probs), retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, (x, probs)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """One graph for every routing, when the number of rows is given. Inductor multiplies and adds in one go."""

    def route(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        y, weights, row_id_map = mz.moe_permute_with_probs(x, probs, mask, 8)
        y = mz.moe_sort_chunks_by_index(y, order * 2 + 3, order) * weights[:, None]  # of 5 rows and 3
        if backend == "inductor":  # which takes long
            return mz.moe_unpermute(y, row_id_map, probs)
        indexed, index_map = mz.moe_permute(x, mask.long().topk(2).indices, 8, map_type="index")
        return mz.moe_unpermute(y, row_id_map, probs) + mz.moe_unpermute(indexed, index_map, map_type="index")

    counter = CompileCounterWithBackend(backend)
    call = torch.compile(route, fullgraph=True, backend=counter)
    for seed in range(2):
        mask = torch.zeros(4, 3, dtype=torch.bool).scatter(1, draw(4, 3, seed=seed).topk(2).indices, True)
        x = draw(4, HIDDEN, seed=seed).requires_grad_()
        probs = draw(4, 3, seed=seed + 2).requires_grad_()
        order = torch.tensor([1, 0])
        made = []
        for function in (call, route):
            y = function(x, probs, mask, order)
            made.append((y, *torch.autograd.grad(y.square().sum(), (x, probs))))
        rounding = 0.0 if backend == "aot_eager" else 1e-5
        for got, wanted in zip(*made, strict=True):
            torch.testing.assert_close(got, wanted, rtol=rounding, atol=rounding)
    assert counter.frame_count == 1


@pytest.mark.compile
def test_rows_counted_inside_a_graph() -> None:
    """Which PyTorch allows when it is told so."""

    def count(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y, row_id_map = mz.moe_permute(x, mask)
        padded, *_ = mz.moe_permute_and_pad_with_probs(x, mask.float(), mask, mask.sum(0), 4)
        return mz.moe_unpermute(y * 2.0, row_id_map) + padded.sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = torch.compile(count, fullgraph=True, backend="aot_eager")
        for mask in (MASK, ~MASK):
            assert torch.equal(call(draw(4, HIDDEN), mask), count(draw(4, HIDDEN), mask))


def test_bad_input() -> None:
    x, probs = draw(4, HIDDEN), draw(4, 3)
    y, row_id_map = mz.moe_permute(x, MASK)
    cases: list[tuple[str, type[Exception], Any]] = [
        ("map_type is 'list'", ValueError, lambda: mz.moe_permute(x, MASK, map_type="list")),
        ("routing_map \\(3, 3\\)", ValueError, lambda: mz.moe_permute(x, MASK[:3])),
        ("routing_map \\(4, 0\\)", ValueError, lambda: mz.moe_permute(x, MASK[:, :0])),
        ("routing_map is torch.float32", TypeError, lambda: mz.moe_permute(x, probs)),
        ("num_out_tokens is -2", ValueError, lambda: mz.moe_permute(x, MASK, -2)),
        ("probs has shape \\(4, 2\\)", ValueError, lambda: mz.moe_permute_with_probs(x, probs[:, :2], MASK)),
        ("probs is torch.bool", TypeError, lambda: mz.moe_permute_with_probs(x, MASK, MASK)),
        ("restore_shape is \\(5, 3\\)", ValueError, lambda: mz.moe_unpermute(y, row_id_map, None, (5, 3))),
        ("merging_probs has shape", ValueError, lambda: mz.moe_unpermute(y, row_id_map, probs[:3])),
        ("row_id_map \\(12,\\)", ValueError, lambda: mz.moe_unpermute(y, row_id_map.flatten())),
        ("pad_offsets has shape", ValueError, lambda: mz.moe_unpermute(y, row_id_map, pad_offsets=torch.zeros(2))),
        ("split_sizes is \\[1, 2\\]", ValueError, lambda: mz.moe_sort_chunks_by_index(x, [1, 2], [0, 1])),
        ("sorted_index is \\[0, 0\\]", ValueError, lambda: mz.moe_sort_chunks_by_index(x, [1, 3], [0, 0])),
        ("sorted_index \\(1,\\)", ValueError, lambda: mz.moe_sort_chunks_by_index(x, [1, 3], [0])),
    ]
    for counts, align, said in (
        (MASK.sum(0), 0, "align_size is 0"),
        (MASK.sum(0)[:2], 1, "tokens_per_expert has shape"),
        (torch.tensor([2, 1, 2]), 1, "routing_map routes \\[2, 0, 3\\]"),
    ):
        pad = lambda c=counts, a=align: mz.moe_permute_and_pad_with_probs(x, probs, MASK, c, a)  # noqa: E731
        cases.append((said, ValueError, pad))
    for said, kind, call in cases:
        with pytest.raises(kind, match=said):
            call()
    with pytest.warns(DeprecationWarning, match="is called merging_probs"):
        assert torch.equal(
            mz.moe_unpermute(y, row_id_map, probs=probs), mz.moe_unpermute(y, row_id_map, merging_probs=probs)
        )
