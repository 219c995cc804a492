"""How deep the stack is where a kernel is launched: what one forward of a Linear goes through, in eager code.

The CUDA code of our operators runs on tensors of the CPU, and instead of each launch its frames are noted.
"""

import sys
from types import FrameType

import pytest
import torch

import mezzotint as mz
from mezzotint import hw, recipe
from mezzotint.kernels import _lib, gemm
from mezzotint.kernels.triton._launch import Fast

FRAMES = 9


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
    monkeypatch.setattr(hw, "has_triton_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of a tensor on the CPU
    monkeypatch.setattr(gemm, "capability_of", lambda x: (9, 0))
    monkeypatch.setattr(gemm, "_mm_fp32", lambda x, y, out: out.float())  # which the CPU has not
    monkeypatch.setattr(
        Fast, "launch", lambda self, grid, *args, **constants: stacks.append(frames_to("Linear.forward"))
    )
    launches = {
        op: (cuda.on(torch.empty(0)) if isinstance(cuda, _lib.Late) else cuda,) * 2
        for op, (_, cuda) in _lib._IMPLEMENTATIONS.items()
    }
    monkeypatch.setattr(_lib, "_IMPLEMENTATIONS", launches)
    hw.gemm_backend.cache_clear()
    linear = mz.Linear(512, 512, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    with mz.autocast(recipe=recipe.RECIPES[name]()):
        linear(x)
    deepest = max(stacks, key=len)
    hw.gemm_backend.cache_clear()
    assert len(stacks) >= 2
    assert len(deepest) <= FRAMES, "\n".join(deepest)
