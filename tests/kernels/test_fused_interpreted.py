"""FP8 quantizations that take their producer in, in Triton's interpreter, on the CPU, against the reference's bytes.

Every mode of `SOURCE_MODES`. The cast itself is PTX on a GPU and torch's here. The rest is the same: what a source
reads, halves, tiles, every index.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_pointwise_interpreted import convert, draw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Whole tiles in both directions, cut rows, halves that are no whole tiles.
SHAPES = ((128, 512), (72, 512), (40, 90))
USAGES = ((False, True), (True, True))
TWO_PASSES = ("current", "rowwise")


@pytest.mark.parametrize("tiles", ["cut", pytest.param("whole", marks=pytest.mark.slow)])
def test_interpreted(tiles: str) -> None:
    run_interpreted(main, tiles)


def cast_fp8(value: Any, DTYPE: Any) -> Any:
    """Of `_jit.py`, whose PTX the interpreter does not know."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from mezzotint.kernels.elements import cast_fp8 as cast

    codes = cast(torch.from_numpy(value.handle.data.copy()), int(getattr(DTYPE, "value", DTYPE)))
    return tl.tensor(TensorHandle(codes.view(torch.uint8).numpy(), tl.uint8), tl.block_type(tl.uint8, value.shape))


def cases(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Without exponentials: the interpreter's are numpy's."""
    M, K = shape
    x, dy, bias, scales = draw(shape, dtype, 0), draw((M, K // 2), dtype, 1), draw((K,), dtype, 2), draw((M,), FP32, 3)
    yield "activation", (draw((M, 2 * K), dtype, 4), None, "reglu", [], scales)
    yield "activation_backward", (dy, x, bias, "sreglu", [], scales, FP32)
    if shape == SHAPES[0]:
        yield "activation_backward", (dy, x, None, "reglu", [], None, None)


def compare(launch: Any, op: Any, source: str, args: tuple[Any, ...], options: tuple[Any, ...], how: str) -> None:
    from mezzotint.kernels.quantize_ops import SourceCall, fused
    from tests.values import raw

    class Taken(SourceCall):
        def tensor(self) -> torch.Tensor:
            assert how == "before" or self.shape == SHAPES[-1], (op.name(), source, how)
            return super().tensor()

    want = fused(op, source)(*args, *options)
    got = [torch.full_like(buffer, 0x5A) for buffer in want]
    if source == "activation_backward":
        sums = None if args[-1] is None else got[-1]
        launch(Taken(source, args[:-1], sums), got[:-1], None, *options)
        total, _ = got.pop().double(), want.pop()
        if sums is not None:
            summed = SourceCall(source, args[:-1]).tensor().double()
            assert ((total - summed.sum(0)).abs() <= summed.abs().sum(0) * 2.0**-20).all()
    else:
        launch(Taken(source, args), got, None, *options)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(raw(a), raw(b)), (op.name(), source, how, tuple(args[0].shape), options, index)


def check_copied_input(launch: Any, op: Any) -> None:
    """Of a tensor that is copied first one program sees a whole tile, or as much as it takes of what is contiguous."""
    from mezzotint.constants import E4M3
    from tests.values import as_view

    for shape, view in (((64, 128), "transposed"), ((64, 128), "inner"), ((8, 8, 128), "inner")):
        x, options = as_view(draw(shape, BF16, 5), view), (None, E4M3, False, 0.0, True, False)
        want = op(x, *options)
        got = [torch.full_like(buffer, 0x5A) for buffer in want]
        launch(x, got, None, *options)
        assert all(map(torch.equal, got, want)), (shape, view)


def check_given_amaxes(rowwise: Any, op: Any, amax: Any) -> None:
    """Quantize rows, columns or both of shards by amaxes of the whole, also rows that no program holds whole."""
    from mezzotint.constants import E4M3
    from mezzotint.kernels.triton import _jit_rowwise

    x, whole_row = draw((40, 130), BF16, 6), rowwise.WHOLE_ROW
    tops = [rowwise.amax(x, way) for way in (False, True)]
    assert all(torch.equal(top, amax(x, way)) for top, way in zip(tops, (False, True), strict=True))
    for given, usage, longest in (
        ((True, False), (True, True), whole_row),
        ((False, True), (True, True), whole_row),
        ((True, True), (True, True), whole_row),
        ((True, True), (False, True), whole_row),
        ((True, False), (True, False), whole_row),
        ((True, False), (True, False), 128),
    ):
        rowwise.WHOLE_ROW = _jit_rowwise.WHOLE_ROW = longest
        larger = [top * 3 if is_given else None for top, is_given in zip(tops, given, strict=True)]
        options = (*larger, E4M3, False, 0.0, *usage)
        want = op(x, *options)
        got = [torch.full_like(buffer, 0x5A) for buffer in want]
        rowwise.quantize(x, got, None, *options)
        assert all(map(torch.equal, got, want)), (given, usage, longest)
    rowwise.WHOLE_ROW = _jit_rowwise.WHOLE_ROW = whole_row


def as_if_large(rowwise: Any) -> Any:
    """Return the row-wise quantization of a large tensor, whose scales are finished in a launch of their own."""

    def launch(*args: Any) -> None:
        small, rowwise.SMALL = rowwise.SMALL, 0
        rowwise.quantize(*args)
        rowwise.SMALL = small

    return launch


def check_written_as_fp8(launch: Any, op: Any, options: tuple[Any, ...]) -> None:
    """In a graph a launch writes codes into tensors of FP8: the same bytes, not the values of the codes."""
    whole, narrow = (300, 130), (300, 60)
    for shape, usage in ((whole, (True, False)), (whole, (False, True)), (whole, (True, True)), (narrow, (True, True))):
        x = draw(shape, BF16, 7)
        want = op(x, *options, *usage)
        got = [torch.full_like(buffer, 0x5A) for buffer in want]
        codes = [buffer.view(torch.float8_e5m2) if buffer.dtype == torch.uint8 else buffer for buffer in got]
        launch(x, codes, None, *options, *usage)
        assert all(map(torch.equal, got, want)), (op.name(), usage)


def as_on_a_gpu() -> None:
    """What the interpreter does in another way, or not at all."""
    import numpy as np
    from triton.runtime import interpreter

    from mezzotint.kernels.triton import _jit_float8, _jit_rowwise, float8_block, mxfp8

    # On a GPU the maximum of NaN and a number is the number.
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter._convert_float = convert
    for module in (_jit_float8, float8_block, _jit_rowwise, mxfp8):
        module.cast_fp8 = cast_fp8


def check_entered(source: str, args: tuple[Any, ...]) -> None:
    """The same bytes as by the op, while the amax raises its place in a history, and no other; or nothing."""
    from mezzotint.constants import E4M3
    from mezzotint.kernels.float8 import float8_quantize_scaled
    from mezzotint.kernels.quantize_ops import SOURCES, SourceCall, fused
    from mezzotint.kernels.triton import float8
    from tests.values import raw

    scales, given = torch.tensor([1.0, 3.0, 2.0]), args[: SOURCES[source].count - SOURCES[source].sums]
    for usage in ((True, False), (True, True)):
        *want, amax = fused(float8_quantize_scaled, source)(*args, scales[1:2], E4M3, *usage)[: sum(usage) + 2]
        plain = SourceCall(source, given).tensor()
        for x in (SourceCall(source, given), plain):
            for seen in (0.0, 2.0 * amax.item(), None):
                history = torch.tensor([[1.0, 0.0 if seen is None else seen, 2.0], [9.0, 9.0, 9.0]])
                got = [torch.full_like(buffer, 0x5A) for buffer in want]
                float8.enter_scaled(x, got, None, scales, 1, None if seen is None else history, E4M3, *usage)
                assert all(torch.equal(raw(a), raw(b)) for a, b in zip(got, want, strict=True)), (source, usage)
                raised = 0.0 if seen is None else max(seen, amax.item())
                assert history.tolist() == [[1.0, raised, 2.0], [9.0, 9.0, 9.0]]


def main(tiles: str) -> None:
    """`tiles`: shapes that are whole ones, or those that cut them."""
    from mezzotint.constants import E4M3, E5M2
    from mezzotint.kernels.float8 import float8_quantize, float8_quantize_scaled
    from mezzotint.kernels.float8_block import float8_block_quantize
    from mezzotint.kernels.float8_rowwise import float8_rowwise_amax, float8_rowwise_quantize
    from mezzotint.kernels.mxfp8 import mxfp8_quantize
    from mezzotint.kernels.triton import _jit_source, float8, float8_block, float8_rowwise, mxfp8

    as_on_a_gpu()
    scale, ways = torch.tensor([3.0]), _jit_source.SOURCE_MODES
    tested: tuple[tuple[str, Any, Any, tuple[Any, ...]], ...] = (
        ("current", float8.quantize, float8_quantize, (None, E4M3, False, 0.0)),
        ("delayed", float8.quantize_scaled, float8_quantize_scaled, (scale, E5M2)),
        ("block", float8_block.quantize, float8_block_quantize, (E4M3, True, 0.0, False)),
        ("blocks of 32", mxfp8.quantize, mxfp8_quantize, (E4M3, False, False, False)),
        ("rowwise", float8_rowwise.quantize, float8_rowwise_quantize, (None, None, E4M3, True, 0.0)),
        ("rowwise", as_if_large(float8_rowwise), float8_rowwise_quantize, (None, None, E4M3, False, 0.5)),
    )
    check_copied_input(float8.quantize, float8_quantize)
    check_given_amaxes(float8_rowwise, float8_rowwise_quantize, float8_rowwise_amax)
    for name, launch, op, options in tested:
        if name != "blocks of 32":
            check_written_as_fp8(launch, op, options)
    chosen = list(zip(SHAPES, (BF16, FP32, FP16), strict=True))
    for shape, dtype in chosen[:1] if tiles == "whole" else chosen[1:]:
        for source, args in cases(shape, dtype):
            check_entered(source, args)
            for name, launch, op, options in tested:
                for how in ("inside", "first", "before") if name in TWO_PASSES else ("inside", "before"):
                    _jit_source.SOURCE_MODES = {**ways, name: dict.fromkeys(ways[name], how)}
                    for usage in USAGES[how == "before" or shape != SHAPES[0] :]:
                        compare(launch, op, source, args, (*options, *usage), how)
