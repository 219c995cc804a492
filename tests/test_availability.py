"""What a program may ask of this machine."""

from typing import Any

import pytest

import mezzotint as mz
from mezzotint import hw

# Compute capability → the formats that it multiplies natively.
NATIVE: dict[tuple[int, int] | None, set[str]] = {
    None: set(),
    (8, 0): set(),
    (8, 9): {"fp8", "fp8_rowwise"},
    (9, 0): {"fp8", "fp8_rowwise", "fp8_block_scaling"},
    (10, 0): {"fp8", "fp8_rowwise", "mxfp8", "nvfp4"},
}
FORMATS = ("fp8", "fp8_rowwise", "fp8_block_scaling", "mxfp8", "nvfp4")


@pytest.mark.parametrize("cc", NATIVE, ids=str)
def test_native(cc: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format runs everywhere; natively only where all of its products do."""
    monkeypatch.setattr(hw, "capability", lambda device=None: cc)
    monkeypatch.setattr(hw, "cuda_version", lambda: (13, 0))
    hw.gemm_backend.cache_clear()
    try:
        for name in FORMATS:
            gate: Any = getattr(mz, f"is_{name}_available")
            assert gate() is True
            assert gate(native=True) is (name in NATIVE[cc])
            runs, reason = gate(return_reason=True, native=True)
            assert runs is (name in NATIVE[cc])
            assert ("native products need an NVIDIA GPU" in reason) is not runs
    finally:
        hw.gemm_backend.cache_clear()
