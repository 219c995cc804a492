"""A product in a graph: PyTorch's own call where it is that alone, on tensors of a GPU that need not be there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from mezzotint import hw
from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels import gemm
from mezzotint.kernels.float8 import FLOAT8
from mezzotint.kernels.operand import Operand

OURS, NATIVE = torch.ops.mezzotint.gemm.default, torch.ops.aten._scaled_mm.default


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gemm, "capability_of", lambda x: (9, 0) if x.is_cuda else None)
    monkeypatch.setattr(hw, "cuda_version", lambda: (12, 9))
    hw.gemm_backend.cache_clear()
    yield
    hw.gemm_backend.cache_clear()


def products(
    kind: str = "tensor",
    sizes: tuple[int, int, int] = (64, 32, 48),
    dtype: int = E4M3,
    bias: torch.dtype | None = None,
    out: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    offset: int = 0,
    scale_offset: int = 0,
) -> list[Any]:
    """What multiplies in the graph of A (M, C) · B (N, C)ᵀ."""
    M, C, N = sizes

    def product(a: Any, a_scale: Any, b: Any, b_scale: Any, *added: Any) -> Any:
        sides = [Operand(a, a_scale, kind=kind, dtype=dtype), Operand(b, b_scale, kind=kind, dtype=E4M3)]
        return gemm.gemm(*sides, out_dtype=out, bias=added[0] if added else None, fast_accum=True)

    with FakeTensorMode():
        options: dict[str, Any] = {"device": device}
        a, b = (
            torch.empty(rows * C + offset, dtype=torch.uint8, **options).as_strided((rows, C), (C, 1), offset)
            for rows in (M, N)
        )
        a_scale, b_scale = (
            torch.empty(scale_offset + count, **options).as_strided((count,), (1,), scale_offset)
            for count in ((M, N) if kind == "row" else (1, 1))
        )
        added = () if bias is None else (torch.empty(N, dtype=bias, **options),)
        graph = make_fx(product)(a, a_scale, b, b_scale, *added).graph
    return [node.target for node in graph.nodes if node.target in (OURS, NATIVE)]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"kind": "row"},
        {"dtype": E5M2},
        {"bias": torch.bfloat16},
        {"out": torch.float16, "bias": torch.float16},
        {"sizes": (7, 32, 48)},
    ],
    ids=str,
)
def test_one_call(case: dict[str, Any]) -> None:
    assert products(**case) == [NATIVE]


@pytest.mark.parametrize(
    "case",
    [
        {"device": "cpu"},
        {"sizes": (64, 24, 48)},
        {"sizes": (64, 32, 40)},
        {"sizes": (0, 32, 48)},
        {"bias": torch.float32},
        {"out": torch.float32},
        {"offset": 8},
        {"kind": "row", "scale_offset": 2},
    ],
    ids=str,
)
def test_the_op(case: dict[str, Any]) -> None:
    assert products(**case) == [OURS]


def test_a_size_that_is_not_known() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        height = shapes.create_unbacked_symint()
        a = torch.empty(height, 32, dtype=torch.uint8, device="cuda")
        b, scale = torch.empty(48, 32, dtype=torch.uint8, device="cuda"), torch.empty(1, device="cuda")
        sides = [Operand(codes, scale, kind="tensor", dtype=E4M3) for codes in (a, b)]
        assert FLOAT8.backends[0].one_call(*sides, None, torch.bfloat16, True) is None


def test_opcheck() -> None:
    a, b = (torch.randint(0, 120, (rows, 32), dtype=torch.uint8) for rows in (16, 48))
    side = (torch.ones(1), None, "tensor", E4M3, False, 448, False)
    opcheck(torch.ops.mezzotint.gemm_in_graph.default, (a, *side, b, *side, None, torch.bfloat16, True))


def test_eager_code_takes_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes PyTorch's own call where a graph does, unless `torch.autocast` is on or memory is not aligned."""
    made = torch.empty(0)
    monkeypatch.setattr(gemm, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: made)
    backing = torch.frombuffer(bytearray(64 * 32 + 16), dtype=torch.uint8)
    start = -backing.data_ptr() % 16

    def product(shift: int, out: torch.dtype = torch.bfloat16) -> Any:
        codes = torch.frombuffer(backing.numpy(), dtype=torch.uint8, offset=start + shift, count=63 * 32).view(63, 32)
        sides = [
            Operand(data, torch.ones(1), kind="tensor", dtype=E4M3) for data in (codes, torch.zeros_like(codes[:48]))
        ]
        return gemm.at_once(sides[0], sides[1], out, None, True)

    assert product(0) is made
    assert product(0, torch.float32) is None
    assert product(1) is None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    assert product(0) is None
