"""Abilities of this machine: this module says what runs natively, what is emulated, and why. Importing it touches no
device.

`gemm_backends()` is the one table of matrix products, made of the formats' records: `kernels/gemm.py` dispatches on it
and `report()` prints it, so that what is said is what runs.
"""

import platform
import warnings
from dataclasses import dataclass
from functools import cache

import torch

from mezzotint.formats import CC, FORMATS, HIGH, Backend, format_of
from mezzotint.tracing import is_planned

ANY = "*"
FOREVER: CC = (99, 0)
EVERY, ADA, HOPPER = ((0, 0), FOREVER), ((8, 9), FOREVER), ((9, 0), (10, 0))
BLACKWELL, GEFORCE_BLACKWELL = ((10, 0), FOREVER), ((12, 0), FOREVER)


def _multiplies_bf16_slowly() -> bool:
    if platform.machine() not in ("aarch64", "arm64"):
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


# PyTorch has no fast BF16 product for an ARM CPU without BF16 instructions: a product of FP32 copies, rounded once,
# takes a hundredth of its time (Neoverse N1, torch 2.13). This is a constant, so that traced code can use it.
SLOW_BF16 = _multiplies_bf16_slowly()


def multiplies_slowly(x: torch.Tensor) -> bool:
    """Return whether products of such a tensor should be made from FP32 copies. Memory is planned for a GPU, whatever
    the CPU can do."""
    return SLOW_BF16 and x.is_cpu and x.dtype == torch.bfloat16 and not is_planned(x)


class EmulationWarning(UserWarning):
    """This warning says that a GPU computes a format's products in another way: the same numbers, slower than BF16.

    Example:
        >>> import warnings
        >>> import mezzotint as mz
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", mz.EmulationWarning)  # then train
    """


def is_rocm() -> bool:
    """Return whether this PyTorch runs on AMD GPUs, which it calls CUDA devices as well."""
    return torch.version.hip is not None


@cache
def capability(device: int | None = None) -> CC | None:
    """Return (major, minor) of the CUDA device, or None without one.

    An AMD GPU has none, whatever number PyTorch reports for it (gfx942: 9.4): it runs the reference, in plain torch.
    """
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() and not is_rocm() else None


@cache
def has_triton_kernels() -> bool:
    """Return whether Triton kernels run here: its FP8 conversions need compute capability 8.9. Otherwise the reference
    runs on the GPU."""
    cc = capability()
    return cc is not None and cc >= (8, 9)


@cache
def cuda_version() -> tuple[int, int]:
    """Return (major, minor) of the CUDA that this PyTorch was built with, or (0, 0) without."""
    if torch.version.cuda is None:
        return 0, 0
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


UNTRIED = "not run on real hardware"
_DEQUANTIZED = "dequantized to the other operand's dtype, torch.mm"

# The functions of these rows are in `kernels/gemm.py`; the rows of formats hold their own.
_PLAIN = (
    Backend(kind_a=HIGH, kind_b=HIGH, cc=EVERY, name="plain", why="torch.mm in the operands' dtype"),
    Backend(kind_a=HIGH, kind_b=ANY, cc=EVERY, name="plain", how="emulated", why=_DEQUANTIZED),
    Backend(kind_a=ANY, kind_b=HIGH, cc=EVERY, name="plain", how="emulated", why=_DEQUANTIZED),
)
EMULATED = Backend(
    kind_a=ANY,
    kind_b=ANY,
    cc=((8, 0), FOREVER),
    name="emulated",
    how="emulated",
    why="exact values in BF16, BF16 tensor cores",
)
REFERENCE = Backend(
    kind_a=ANY,
    kind_b=ANY,
    cc=EVERY,
    name="reference",
    how="reference",
    why="plain torch in FP32, the specification",
)


def gemm_backends() -> tuple[Backend, ...]:
    """Return every row of the table. The first one that fits is used."""
    return (*_PLAIN, *(row for made in FORMATS.values() for row in made.backends), EMULATED, REFERENCE)


@cache
def gemm_backend(kind_a: str, kind_b: str, cc: CC | None, cuda: tuple[int, int] | None = None) -> Backend:
    """Return the row that serves these kinds at this compute capability; None is the CPU."""
    cuda = cuda_version() if cuda is None else cuda
    if cc is None:
        return REFERENCE
    for row in gemm_backends():
        fits = row.kind_a in (kind_a, ANY) and row.kind_b in (kind_b, ANY)
        if fits and row.cc[0] <= cc < row.cc[1] and row.cuda <= cuda:
            return row
    return REFERENCE


_PRODUCTS = ("fprop", "dgrad", "wgrad")


def _format_kinds() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return format → the kinds that each of its products multiplies, as D = A·Bᵀ takes them."""
    return {"high_precision": ((HIGH, HIGH),) * 3, **{name: made.products for name, made in FORMATS.items()}}


@dataclass(frozen=True, slots=True)
class Row:
    """A `Row` is one line of the report."""

    format: str
    operation: str  # "quantize", "fprop", "dgrad", "wgrad"
    device: str  # "cpu", "sm_90", or "rocm"
    how: str  # "native" | "emulated" | "reference"
    why: str


def report(cc: CC | str | None = "current", cuda: tuple[int, int] | None = None) -> list[Row]:
    """Return how every operation of every format runs here, or at a given compute capability (None is the CPU)."""
    at = capability() if isinstance(cc, str) else cc
    if at is not None and cuda is None and capability() is None:
        cuda = FOREVER  # without a GPU here, assume a PyTorch that has everything
    device = "rocm" if isinstance(cc, str) and is_rocm() and torch.cuda.is_available() else _name(at)
    rows = []
    for name, pairs in _format_kinds().items():
        if name != "high_precision":
            rows.append(Row(name, "quantize", device, *_quantize(at)))
        for operation, (kind_a, kind_b) in zip(_PRODUCTS, pairs, strict=True):
            found = gemm_backend(kind_a, kind_b, at, cuda)
            rows.append(Row(name, operation, device, found.how, found.why))
    return rows


def _quantize(cc: CC | None) -> tuple[str, str]:
    if cc is None:
        return "reference", "plain torch, the specification"
    if cc >= (8, 9):
        return "native", "Triton kernels"
    return "reference", "plain torch on the GPU: Triton's FP8 conversions need compute capability 8.9"


def _name(cc: CC | None) -> str:
    return "cpu" if cc is None else f"sm_{cc[0]}{cc[1]}"


def available(
    name: str, cc: CC | str | None = "current", *, native: bool = False, cuda: tuple[int, int] | None = None
) -> tuple[bool, str]:
    """Return whether the format runs here, and how its forward product does.

    With `native`, return whether all three of its products are those of the hardware, and if not, what they would need.
    """
    kinds = _format_kinds()
    if name not in kinds:
        return False, f"unknown format {name!r}: one of {', '.join(kinds)}"
    rows = [row for row in report(cc, cuda) if row.format == name and row.operation != "quantize"]
    lacking = [row for row in rows if row.how != "native"] if native else []
    found = (lacking or rows)[0]
    reason = f"{found.how} on {found.device}: {found.why}"
    if not lacking:
        return True, reason
    return False, f"{reason}; {_native_needs(*kinds[name][_PRODUCTS.index(found.operation)])}"


def _native_needs(kind_a: str, kind_b: str) -> str:
    """Return, as text, which hardware multiplies operands of these kinds."""
    spans = []
    for row in gemm_backends():
        if row.how == "native" and (row.kind_a, row.kind_b) == (kind_a, kind_b):
            (low, high), (major, minor) = row.cc, row.cuda
            span = f"{low[0]}.{low[1]}" + ("" if high == FOREVER else f" (below {high[0]}.{high[1]})")
            spans.append(span + (f" with CUDA {major}.{minor}" if row.cuda > (0, 0) else ""))
    if not spans:
        return "PyTorch has no native products of these two, on any GPU"
    return f"native products need an NVIDIA GPU of compute capability {', or '.join(spans)}"


def _title(kind: str) -> str:
    made = format_of(kind)
    return kind if made is None else made.title


@cache
def tell_emulated(kind_a: str, kind_b: str, cc: CC | None) -> None:
    """Warn, once in a process, that a GPU has no product of these kinds.

    Products call this when they run, and modules do not, since traced code must never warn.
    """
    title = " by ".join(dict.fromkeys(map(_title, (kind_a, kind_b))))
    where = f"{'rocm' if cc is None else _name(cc)}: {gemm_backend(kind_a, kind_b, cc).why}"
    warnings.warn(
        f"{title} products are emulated on this GPU ({where}): the numbers are those of the format, but a step takes "
        f"more time than in BF16; {_native_needs(kind_a, kind_b)}. "
        "is_fp8_available(native=True) and its siblings ask for those. To silence this: "
        'warnings.filterwarnings("ignore", category=mezzotint.EmulationWarning)',
        EmulationWarning,
        stacklevel=2,
    )
