"""What a step of a Linear goes through in eager code: how deep the stack is where a kernel is launched, and how many
functions of this package are called.

For the first the CUDA code of our operators runs on tensors of the CPU, and instead of each launch its frames are
noted, in a step that is recorded already. For the second kernels compute nothing.
"""

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import mezzotint as mz
from bench._stubs import stubbed_kernels
from mezzotint import hw, recipe
from mezzotint.kernels import _lib, gemm, quantize_ops
from mezzotint.kernels._relaunch import Relaunched, note_launch
from mezzotint.kernels.triton._launch import Fast
from mezzotint.layer.rerun import RECORDED_RUNS

FRAMES = 4
CALLS = {None: 50, "current": 57, "mxfp8": 57, "delayed": 90}  # of a step, forward and backward


def frames_to(function: str) -> list[str]:
    """Return the functions of this package on the stack, from the innermost to the one of that name."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "/mezzotint/" in code.co_filename:
            found.append(f"{code.co_filename.rsplit('/mezzotint/')[-1]}:{code.co_qualname}")
            if code.co_qualname == function:
                return found
        frame = frame.f_back
    return []


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
@pytest.mark.filterwarnings("ignore::mezzotint.EmulationWarning")
def test_from_forward_to_the_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []

    def run(*args: Any) -> None:
        stacks.append(frames_to("Linear.forward"))

    def launch(self: Fast, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        run()
        note_launch(SimpleNamespace(run=run, function=None, packed_metadata=None), grid, args, None)

    monkeypatch.setattr(hw, "has_triton_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of a tensor on the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(gemm, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(gemm, "_mm_fp32", lambda x, y, out: out.float())  # which the CPU has not
    monkeypatch.setattr(Fast, "launch", launch)
    tables = (_lib, "_IMPLEMENTATIONS"), (quantize_ops, "_ENTERING"), (quantize_ops, "_ENTERING_SOURCES")
    for owner, table in tables:
        on_cuda = {
            op: Relaunched(cuda.run) if isinstance(cuda, Relaunched) else cuda
            for op, (_, cuda) in getattr(owner, table).items()
        }
        monkeypatch.setattr(owner, table, {op: (cuda, cuda) for op, cuda in on_cuda.items()})
    hw.gemm_backend.cache_clear()
    RECORDED_RUNS.clear()
    linear = mz.Linear(512, 512, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        stacks.clear()
        with mz.autocast(recipe=recipe.RECIPES[name]()):
            linear(x)
    deepest = max(stacks, key=len)
    hw.gemm_backend.cache_clear()
    RECORDED_RUNS.clear()
    assert len(stacks) >= 2
    assert {stack[0] for stack in stacks if stack} == {"layer/rerun.py:_Again.forward"}
    assert len(deepest) <= FRAMES, "\n".join(deepest)


@pytest.mark.parametrize("name", CALLS, ids=str)
def test_a_step_calls_few_functions(name: str | None) -> None:
    """The number is the same in every run: Python takes about a tenth of a microsecond for each, and what it does in
    them several times that."""
    package, found = str(Path(mz.__file__).parent), [0]
    linear = mz.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    chosen = None if name is None else recipe.RECIPES[name]()

    def step() -> None:
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            y = linear(x.detach().requires_grad_())
        y.backward(y.detach())

    def count(frame: FrameType, event: str, arg: Any) -> None:
        found[0] += event == "call" and frame.f_code.co_filename.startswith(package)

    with stubbed_kernels(), torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):  # of these the second is recorded, and the backward of the third
            step()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert found[0] <= CALLS[name], found[0]
