"""Launches from a record, in Triton's interpreter, on the CPU: the bytes of the reference for values that are new in
each call. A record knows addresses alone, out of which the interpreter is given tensors."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_fused_interpreted import as_on_a_gpu
from tests.kernels.test_pointwise_interpreted import draw

BF16, FP32 = torch.bfloat16, torch.float32
CALLS = 4  # of which the first two run the op's code


def test_interpreted() -> None:
    run_interpreted(main)


def tensor_at(like: Any, given: Any) -> Any:
    """What a launch was given by its address, as a tensor like the one of the launch that was recorded."""
    if isinstance(like, tuple):
        return tuple(map(tensor_at, like, given))
    if not isinstance(like, torch.Tensor):
        return given
    count = like.untyped_storage().nbytes() - like.storage_offset() * like.itemsize
    return torch.frombuffer((ctypes.c_ubyte * count).from_address(given), dtype=like.dtype)


def note_launches() -> None:
    """Have each launch run its kernel, and be noted."""
    from mezzotint.kernels._relaunch import note_launch
    from mezzotint.kernels.triton._launch import Fast

    def launch(self: Fast, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        def run(*call: Any) -> None:
            size, given = call[:3], call[9:]
            self.kernel[size](*map(tensor_at, args, given), **constants)

        with _disable_current_modes():  # A GPU's driver calls nothing of PyTorch's either.
            self.kernel[grid](*args, **constants)
        note_launch(SimpleNamespace(run=run, function=None, packed_metadata=None), grid, args, None)

    Fast.launch = launch  # type: ignore[method-assign]


def check(run: Callable[..., Any], expected: Callable[..., Any], draw_args: Callable[[int], tuple[Any, ...]]) -> None:
    """`run` is the op's code for CUDA; both write the tensors among their arguments, and return their results."""
    from mezzotint.kernels._relaunch import Relaunched
    from tests.values import raw

    runs: list[None] = []

    def counted(*args: Any) -> Any:
        runs.append(None)
        return run(*args)

    op, held = Relaunched(counted), []
    for seed in range(CALLS):
        mine, other = draw_args(seed), draw_args(seed)
        got, want = op(*mine), expected(*other)
        results = [[result] if isinstance(result, torch.Tensor) else [*(result or ())] for result in (got, want)]
        for a, b in zip([*results[0], *mine], [*results[1], *other], strict=True):
            if isinstance(b, torch.Tensor):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), (run, seed)
                assert torch.equal(raw(a), raw(b)), (run, seed)
        held.append((mine, got))  # so that no buffer is made where an earlier one was
    assert len(runs) == 2, run


def main() -> None:
    from mezzotint import hw
    from mezzotint.constants import E4M3, E5M2
    from mezzotint.kernels import _lib, quantize_ops
    from mezzotint.kernels.activation import column_sum
    from mezzotint.kernels.delayed import delayed_snapshot_, delayed_step_
    from mezzotint.kernels.float8 import float8_quantize, float8_quantize_scaled
    from mezzotint.kernels.float8_block import float8_block_quantize
    from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
    from mezzotint.kernels.mxfp8 import mxfp8_quantize
    from mezzotint.kernels.quantize_ops import fused

    as_on_a_gpu()
    note_launches()
    hw.has_triton_kernels = lambda: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]

    def code(op: Any) -> Callable[..., Any]:
        return _lib._IMPLEMENTATIONS[op][1].run  # type: ignore[attr-defined]

    def casts(shape: tuple[int, int], *options: Any) -> Callable[[int], tuple[Any, ...]]:
        return lambda seed: (draw(shape, BF16, seed), *options)

    for shape in ((40, 90), (130, 160)):
        for op, *options in (
            (float8_quantize, None, E4M3, False, 0.0, True, True),
            (float8_quantize, None, E5M2, True, 0.5, True, False),
            (float8_rowwise_quantize, None, None, E4M3, False, 0.0, True, True),
            (float8_block_quantize, E4M3, True, 0.0, False, True, True),
            (float8_block_quantize, E4M3, True, 0.0, True, True, True),
            (mxfp8_quantize, E4M3, False, False, True, True, True),
        ):
            check(code(op), op, casts(shape, *options))
        cpu, cuda = quantize_ops._ENTERING[float8_quantize_scaled]

        def entered(seed: int, shape: tuple[int, int] = shape) -> tuple[Any, ...]:
            scales, history = torch.tensor([1.0, 3.0, 2.0]), torch.full((2, 3), 0.5)
            return draw(shape, BF16, seed), scales, 1, history, E4M3, True, True

        check(cuda.run, cpu, entered)  # type: ignore[attr-defined]
        check(code(column_sum), column_sum, casts(shape, FP32))
        width = shape[1]

        def normed(seed: int, shape: tuple[int, int] = shape, width: int = width) -> tuple[Any, ...]:
            mu, rs = draw((shape[0],), FP32, seed + 10), draw((shape[0],), FP32, seed + 20).abs()
            gamma, beta = draw((width,), BF16, seed + 30), draw((width,), BF16, seed + 40)
            return draw(shape, BF16, seed), mu, rs, gamma, beta, False, False, E4M3, False, False, True, True, True

        check(code(fused(mxfp8_quantize, "norm")), fused(mxfp8_quantize, "norm"), normed)

    # The reference adds column sums in another order, so that this is compared with the code itself.
    of_source: Any = quantize_ops._ENTERING_SOURCES[float8_quantize_scaled][1]

    def entered_source(seed: int) -> tuple[Any, ...]:
        history, shape, wide = torch.full((2, 3), 0.5), (40, 256), (40, 512)  # both halves of a gradient, tile by tile
        call = "activation_backward", 6, torch.empty(wide[1], dtype=FP32), torch.tensor([1.0, 3.0, 2.0]), 1, history
        gradient = draw(shape, BF16, seed + 50), draw(wide, BF16, seed), None, "reglu", [], None
        return *call, *gradient, E4M3, True, True

    check(of_source.run, of_source.run, entered_source)

    def states(seed: int) -> tuple[Any, ...]:
        return draw((3,), FP32, seed).abs(), draw((4, 3), FP32, seed + 1).abs(), [], [], 4, 448.0, False

    check(code(delayed_step_), delayed_step_, states)
    check(code(delayed_snapshot_), delayed_snapshot_, lambda seed: tuple(draw((3,), FP32, seed + i) for i in range(3)))
