"""Launches past Triton's search: what is kept, for what it is kept, and when Triton is asked all the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from mezzotint.kernels.triton._launch import Fast

STREAM = 77


@Fast
@triton.jit
def _copy_kernel(x, out, given, count, factor, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    pass


class OnCuda(torch.Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """("search", arguments) for each launch through Triton, ("run", what the compiled kernel gets) past it."""
    found: list[tuple[str, Any]] = []

    def search(self: JITFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        found.append(("search", args))
        return SimpleNamespace(
            run=lambda *args: found.append(("run", args)), function="function", packed_metadata="metadata"
        )

    monkeypatch.setattr(JITFunction, "run", search)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(_copy_kernel, "found", {})
    return found


def launch(x: Any, count: int = 64, factor: float = 0.5, grid: tuple[int, ...] = (3, 2), **constants: Any) -> None:
    given = (x, None, 4.0)
    _copy_kernel[grid](x, x, given, count, factor, **({"BLOCK": 8, "SCALED": True, "num_warps": 4} | constants))


def test_second_launch_is_the_kernels_own(launches: list[tuple[str, Any]]) -> None:
    x = torch.zeros(64)
    launch(x)
    launch(x, count=128, factor=0.25)
    (first, _), (second, args) = launches
    assert (first, second) == ("search", "run")
    assert args[:9] == (3, 2, 1, STREAM, "function", "metadata", None, None, None)
    address = x.data_ptr()
    assert args[9:] == (address, address, (address, None, 4.0), 128, 0.25, 8, True)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"x": None},
        {"x": torch.zeros(64).as_subclass(OnCuda)},
        {"count": 1},
        {"count": 63},
        {"count": 1 << 31},
        {"BLOCK": 16},
        {"SCALED": False},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_another_kernel_is_searched_for(launches: list[tuple[str, Any]], other: dict[str, Any]) -> None:
    launch(torch.zeros(64))
    launch(**({"x": torch.zeros(64)} | other))
    assert [kind for kind, _ in launches] == ["search", "search"]


def test_each_tensor_has_its_own_alignment(launches: list[tuple[str, Any]]) -> None:
    aligned, shifted = torch.zeros(64), torch.zeros(65)[1:]
    for x, out in ((aligned, shifted), (shifted, aligned), (shifted, shifted), (aligned, shifted)):
        _copy_kernel[(1,)](x, out, None, 64, 0.5, BLOCK=8, SCALED=True)
    assert [kind for kind, _ in launches] == ["search", "search", "search", "run"]


def test_a_profilers_hook_hears_of_launches(launches: list[tuple[str, Any]]) -> None:
    x = torch.zeros(64)
    launch(x)

    def hook(metadata: Any) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    launch(x)
    assert [kind for kind, _ in launches] == ["search", "search", "run"]


def test_the_compiler_launches_what_it_traces(launches: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced tensor is found behind arguments that are None."""
    traced: list[Any] = []
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: {(1,): lambda *args, **_: traced.append(args)})
    x = torch.zeros(64).as_subclass(OnCuda)
    _copy_kernel[(1,)](None, x, None, 64, 0.5, BLOCK=8, SCALED=True, enable_fp_fusion=False)
    assert len(traced) == 1
    assert traced[0][1] is x
    assert not launches
