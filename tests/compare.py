"""Run a test vector through the leaf ops, on any device, and count what differs from the expected bytes.

    for entry in checked_entries():
        for array, count in compare(entry).items():     # Count(items, mismatches), one per expected array
            assert count.mismatches == 0

What may differ (the README of the vectors): the sign and payload of a NaN code, the sign of an FP4 zero, FP4 codes
under a scale byte of 0, the E2M1 code of NaN. All else is equal byte for byte, scale padding (zeros) included.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels import elements
from mezzotint.kernels.float8 import float8_amax, float8_quantize
from mezzotint.kernels.float8_block import float8_block_quantize
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK, hadamard16
from mezzotint.kernels.mxfp8 import mxfp8_quantize
from mezzotint.kernels.nvfp4 import nvfp4_quantize
from tests.vectors import load, load_manifest

Entry = dict[str, Any]
Quantize = Callable[[torch.Tensor], list[torch.Tensor]]

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
QUANTIZE = {
    "fp8_tensor": float8_quantize,
    "fp8_block": float8_block_quantize,
    "mxfp8": mxfp8_quantize,
    "nvfp4": nvfp4_quantize,
}
# The names of the ops' outputs when both directions are asked for, as the vectors call them.
BOTH = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
OUTPUTS = {
    "fp8_tensor": ("rowwise_data", "columnwise_data", "scale_inv"),
    "fp8_block": ("rowwise_data", "rowwise_scale_inv_gemm", "columnwise_data", "columnwise_scale_inv_gemm"),
    "mxfp8": BOTH,
    "nvfp4": (*BOTH, "rowwise_amax", "columnwise_amax"),
}
# Arrays of the cast vectors → the cast of FP32 that makes them.
CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3fn": lambda x: elements.cast_fp8_overflowing(x, E4M3),
    "e5m2": lambda x: elements.cast_fp8_overflowing(x, E5M2),
    "e2m1": elements.cast_e2m1,
    "e8m0": elements.e8m0_nearest,
    "e4m3fn_sat": lambda x: elements.cast_fp8(x.clone(), E4M3),
    "e5m2_sat": lambda x: elements.cast_fp8(x.clone(), E5M2),
    "e2m1_sat": elements.cast_e2m1,
    "e8m0_up_sat": elements.e8m0_up,
    "e8m0_zero_sat": elements.e8m0_down,
}


class Count(NamedTuple):
    """How many items of an array were compared, and how many differ."""

    items: int
    mismatches: int


def checked_entries() -> list[Entry]:
    """Quantization vectors that must match: the required ones, and those recorded under the kernels' rule, ours too."""
    return [
        entry
        for entry in load_manifest()
        if entry["format"] in QUANTIZE
        and (entry["status"] == "required" or entry["options"].get("nonfinite") == "kernel rule")
    ]


def cast_entries() -> list[Entry]:
    return [entry for entry in load_manifest() if entry["format"] == "casts"]


def group_name(entry: Entry) -> str:
    """Equal for vectors that go through the same op with the same arguments and input dtype."""
    return f"{entry['name'].split('_' + entry['content'] + '_')[0]}-{entry['dtype']}"


def groups() -> dict[str, list[Entry]]:
    """The checked vectors by `group_name`."""
    found: dict[str, list[Entry]] = {}
    for entry in checked_entries():
        found.setdefault(group_name(entry), []).append(entry)
    for name, entries in found.items():
        assert len({arguments(entry) for entry in entries}) == 1, f"{name}: one op, one set of arguments"
    return found


def arguments(entry: Entry) -> tuple[Any, ...]:
    """What the op takes after x; both directions."""
    options = entry["options"]
    match entry["format"]:
        case "fp8_tensor":
            scale = (options["pow2_scales"], options["amax_epsilon"])
            return (None, ELEMENTS[options["elem"]], *scale, True, True)
        case "fp8_block":
            scale = (options["pow2_scales"], options["amax_epsilon"])
            return (ELEMENTS[options["elem"]], *scale, is_two_d(entry), True, True)
        case "mxfp8":
            return (ELEMENTS[options["elem"]], options["scale_rule"] == "floor", False, False, True, True)
        case "nvfp4":
            rht = options["rht"] == "columnwise"
            return (None, None, None, 448, 0, sign_mask(entry), is_two_d(entry), False, rht, False, True, True)
    raise AssertionError(entry["format"])


def is_two_d(entry: Entry) -> bool:
    return entry["options"]["tile"][0] > 1


def sign_mask(entry: Entry) -> int:
    return RANDOM_SIGN_MASK if entry["options"]["rht_signs"] else 0


def quantizer(entry: Entry) -> Quantize:
    """The leaf op with the vector's options."""
    op, args = QUANTIZE[entry["format"]], arguments(entry)
    return lambda x: op(x, *args)


def compare(entry: Entry, device: str = "cpu", quantize: Quantize | None = None) -> dict[str, Count]:
    """Array → counts, for every expected array of a quantization vector, and for the padding of each scale."""
    x, expected = load(entry)
    x = x.to(device)
    buffers = (quantize or quantizer(entry))(x)
    got = dict(zip(OUTPUTS[entry["format"]], (b.cpu() for b in buffers), strict=True))
    if entry["format"] == "fp8_tensor":
        got["amax"] = float8_amax(x).cpu()
    if entry["format"] == "fp8_block":
        for side in ("rowwise", "columnwise"):
            gemm = got[f"{side}_scale_inv_gemm"]
            got[f"{side}_scale_inv"] = gemm if is_two_d(entry) else gemm.t()
    if "rht_x" in expected:
        got["rht_x"] = hadamard16(x.t().contiguous(), sign_mask(entry)).cpu().view(torch.uint16)
    counts = {}
    for name, want in expected.items():
        buffer = got[name].numpy()
        if name.endswith("scale_inv") and buffer.ndim == 2:
            counts[f"{name} padding"] = padding(buffer, want.shape)
            buffer = buffer[: want.shape[0], : want.shape[1]]
        assert buffer.shape == want.shape, f"{entry['name']}: {name} is {buffer.shape}, not {want.shape}"
        wrong = differs(name, buffer, want, entry, expected)
        counts[name] = Count(wrong.size, int(wrong.sum()))
    return counts


def differs(name: str, got: np.ndarray, want: np.ndarray, entry: Entry, expected: dict[str, np.ndarray]) -> np.ndarray:
    """Where one array is wrong; for packed FP4 by byte."""
    if want.dtype == np.float32:
        return (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert got.dtype == want.dtype, f"{entry['name']}: {name} is {got.dtype}, not {want.dtype}"
    if not name.endswith("_data"):
        return got != want  # scale bytes (no NaN in them) and the bits of the transformed input
    if entry["format"] == "nvfp4":
        return fp4_differs(got, want, expected[name.replace("data", "scale_inv")])
    elem = entry["options"]["elem"]
    return (got != want) & ~(is_nan_code(got, elem) & is_nan_code(want, elem))


def fp4_differs(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Packed codes (R, C/2) under scale bytes (≥ R, C/16)."""
    wrong = np.zeros(got.shape, bool)
    for shift in (0, 4):
        a, b = got >> shift & 15, want >> shift & 15
        wrong |= (a != b) & ((a & 7 != 0) | (b & 7 != 0))
    return wrong & (np.repeat(scale, 8, axis=1)[: got.shape[0], : got.shape[1]] != 0)


def is_nan_code(codes: np.ndarray, elem: str) -> np.ndarray:
    return codes & 0x7F == 0x7F if elem.startswith("e4m3") else codes & 0x7F > 0x7C


def padding(buffer: np.ndarray, used: tuple[int, ...]) -> Count:
    """What lies outside the used corner must be zero."""
    outside = np.ones(buffer.shape, bool)
    outside[: used[0], : used[1]] = False
    return Count(int(outside.sum()), int((buffer[outside] != 0).sum()))


def compare_casts(entry: Entry, device: str = "cpu") -> dict[str, Count]:
    """Array → counts, for every array of a cast vector."""
    x, expected = load(entry)
    x = x.float().to(device)
    return {name: compare_cast(name, x, want) for name, want in expected.items()}


def compare_cast(name: str, x: torch.Tensor, want: np.ndarray) -> Count:
    got = CASTS[name](x).cpu().numpy()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    wrong = got != want
    if name.startswith(("e4m3", "e5m2")):
        wrong &= ~(is_nan_code(got, name) & is_nan_code(want, name))
    if name == "e2m1":
        wrong &= ~x.isnan().cpu().numpy()
    return Count(wrong.size, int(wrong.sum()))


def failures(counts: dict[str, Count]) -> dict[str, str]:
    """Array → "mismatches of items", where there are any; `assert not failures(counts)` shows them."""
    return {name: f"{wrong} of {items}" for name, (items, wrong) in counts.items() if wrong}
