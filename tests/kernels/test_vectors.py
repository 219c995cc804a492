"""The test vectors, byte for byte, through the leaf ops: eager and compiled, both directions, and the element casts."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests import compare
from tests.compare import Entry
from tests.vectors import load_manifest

GROUPS = compare.groups()
FIRST_OF_FORMAT = {entry["format"]: entry for entry in reversed(compare.checked_entries())}
FIRST_GROUPS = [compare.group_name(entry) for entry in FIRST_OF_FORMAT.values()]


@pytest.mark.parametrize("entry", compare.checked_entries(), ids=lambda entry: entry["name"])
def test_eager(entry: Entry) -> None:
    assert not compare.failures(compare.compare(entry))


@pytest.mark.parametrize("entry", compare.cast_entries(), ids=lambda entry: entry["name"])
@pytest.mark.parametrize("array", compare.CASTS)
def test_cast(entry: Entry, array: str) -> None:
    x, expected = compare.load(entry)
    count = compare.compare_cast(array, x.float(), expected[array])
    assert count.mismatches == 0, f"{count.mismatches} of {count.items}"


def check_compiled(name: str, backend: str) -> None:
    """All vectors of a group through one compiled function."""
    counter = CompileCounterWithBackend(backend)
    quantize = torch.compile(compare.quantizer(GROUPS[name][0]), backend=counter, fullgraph=True, dynamic=True)
    failed = {entry["name"]: compare.failures(compare.compare(entry, quantize=quantize)) for entry in GROUPS[name]}
    assert not any(failed.values()), {name: arrays for name, arrays in failed.items() if arrays}
    shapes = {tuple(entry["shape"]) for entry in GROUPS[name]}
    # One more than the shapes at most: the float argument `eps` makes Dynamo start over once.
    assert 1 <= counter.frame_count <= len(shapes) + 1


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST_GROUPS else pytest.mark.slow) for name in GROUPS]
)
def test_compiled(name: str) -> None:
    check_compiled(name, "aot_eager")


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("name", FIRST_GROUPS)
def test_compiled_inductor(name: str) -> None:
    check_compiled(name, "inductor")


def test_every_vector_is_checked() -> None:
    statuses = Counter(entry["format"] for entry in load_manifest() if entry["status"] == "required")
    kernel_rule = Counter(e["format"] for e in load_manifest() if e["options"].get("nonfinite") == "kernel rule")
    checked = Counter(entry["format"] for entry in compare.checked_entries() + compare.cast_entries())
    assert set(statuses) == {"casts", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}
    assert checked == statuses + kernel_rule
    assert sum(map(len, GROUPS.values())) == len(compare.checked_entries())
    assert all(set(entry["arrays"]) == set(compare.CASTS) for entry in compare.cast_entries())


@pytest.mark.parametrize("entry", FIRST_OF_FORMAT.values(), ids=FIRST_OF_FORMAT)
def test_a_wrong_byte_is_seen(entry: Entry) -> None:
    """The comparison itself: one flipped bit in any output fails, wherever the output is."""
    names = compare.OUTPUTS[entry["format"]]
    for index, name in enumerate(names):

        def flipped(x: torch.Tensor, index: int = index) -> list[torch.Tensor]:
            out = compare.quantizer(entry)(x)
            out[index].view(torch.uint8).view(-1)[0] ^= 1
            return out

        assert name in compare.failures(compare.compare(entry, quantize=flipped))

    def padded(x: torch.Tensor) -> list[torch.Tensor]:
        out = compare.quantizer(entry)(x)
        for name, buffer in zip(names, out, strict=True):
            if "_scale_inv" in name:
                buffer.view(-1)[-1] = 1
        return out

    if entry["format"] in ("mxfp8", "nvfp4"):
        assert set(compare.failures(compare.compare(entry, quantize=padded))) == {
            "rowwise_scale_inv padding",
            "columnwise_scale_inv padding",
        }


def test_what_may_differ() -> None:
    """The sign of an FP4 zero, codes under a zero scale, NaN codes; nothing else."""
    scale = np.array([[0x38, 0]], np.uint8)
    want = np.zeros((1, 16), np.uint8)
    got = want.copy()
    got[0, 0], got[0, 1], got[0, 2], got[0, 9] = 0x88, 0x01, 0x10, 0x77
    assert compare.fp4_differs(got, want, scale).nonzero()[1].tolist() == [1, 2]
    codes = np.arange(256, dtype=np.uint8)
    assert codes[compare.is_nan_code(codes, "e4m3")].tolist() == [0x7F, 0xFF]
    assert codes[compare.is_nan_code(codes, "e5m2")].tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
