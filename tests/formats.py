"""Every quantization op of the kernels with the option sets worth telling apart, for tests and benchmarks.

    for variant in VARIANTS:
        buffers = variant.buffers(x)                                    # name → tensor, both directions
        back = variant.dequantize(buffers, "columnwise", x.shape)       # FP32

A new op, or an option that changes bytes, gets a line in `VARIANTS`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mezzotint.constants import E4M3, E5M2, rup
from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.float8 import (
    float8_buffers,
    float8_dequantize,
    float8_quantize,
    float8_quantize_,
    float8_quantize_scaled,
    float8_quantize_scaled_,
)
from mezzotint.kernels.float8_block import (
    float8_block_buffers,
    float8_block_dequantize,
    float8_block_quantize,
    float8_block_quantize_,
)
from mezzotint.kernels.float8_rowwise import (
    float8_rowwise_buffers,
    float8_rowwise_dequantize,
    float8_rowwise_quantize,
    float8_rowwise_quantize_,
)
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.identity import identity_quantize, identity_quantize_
from mezzotint.kernels.mxfp4 import mxfp4_buffers, mxfp4_dequantize, mxfp4_quantize, mxfp4_quantize_
from mezzotint.kernels.mxfp6 import (
    E2M3,
    E3M2,
    mxfp6_buffers,
    mxfp6_dequantize,
    mxfp6_quantize,
    mxfp6_quantize_,
)
from mezzotint.kernels.mxfp8 import mxfp8_buffers, mxfp8_dequantize, mxfp8_quantize, mxfp8_quantize_
from mezzotint.kernels.nvfp4 import MAE, MSE, nvfp4_buffers, nvfp4_dequantize, nvfp4_quantize, nvfp4_quantize_

HIGH = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element type, in numbers that tests compare with."""

    bits: int
    one: int  # the code of 1.0
    largest: float
    largest_code: int
    nan: int  # the code of NaN, or what it becomes
    # Half a step, relative to |x|, of a normal number, and in units of the scale, of a subnormal one.
    relative: float
    absolute: float

    def packed(self, code: int) -> torch.Tensor:
        """The bytes of a group of this code: as few of them as are whole bytes."""
        count = math.lcm(8, self.bits) // self.bits
        word = sum(code << i * self.bits for i in range(count))
        return torch.tensor([word >> 8 * i & 0xFF for i in range(count * self.bits // 8)], dtype=torch.uint8)

    def codes(self, packed: torch.Tensor, rows: int, size: int) -> torch.Tensor:
        """Bytes → (rows, size) codes: each row is a stream of bits, the lowest first."""
        if packed.numel() == 0:
            return torch.zeros(rows, size, dtype=torch.uint8)
        data = packed.reshape(rows, -1).numpy()
        stream = np.unpackbits(data, axis=1, bitorder="little")
        stream = stream[:, : stream.shape[1] // self.bits * self.bits].reshape(rows, -1, self.bits)
        codes = (stream << np.arange(self.bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
        return torch.from_numpy(codes)[:, :size]


ELEMENTS = {
    "e4m3": Element(bits=8, one=0x38, largest=448.0, largest_code=0x7E, nan=0x7F, relative=2.0**-4, absolute=2.0**-10),
    "e5m2": Element(
        bits=8, one=0x3C, largest=57344.0, largest_code=0x7B, nan=0x7F, relative=2.0**-3, absolute=2.0**-17
    ),
    "e3m2": Element(bits=6, one=0x0C, largest=28.0, largest_code=0x1F, nan=0x1F, relative=2.0**-3, absolute=2.0**-5),
    "e2m3": Element(bits=6, one=0x08, largest=7.5, largest_code=0x1F, nan=0x1F, relative=2.0**-4, absolute=2.0**-4),
    "e2m1": Element(bits=4, one=2, largest=6.0, largest_code=7, nan=7, relative=0.2, absolute=0.25),
}
BOTH = ("rowwise", "columnwise")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One op with one set of options."""

    format: str
    label: str
    quantize: Any
    quantize_: Any
    options: tuple[Any, ...]  # what the op takes after x, up to the usages; tensors on the CPU
    geometry: Callable[[tuple[int, ...], bool, bool], Buffers]  # (shape, rowwise, columnwise), for the names
    # (buffers, direction, logical shape) → FP32, through the format's dequantization op
    decode: Callable[[Tensors, str, Sequence[int]], torch.Tensor]
    elem: str = "e4m3"
    directions: tuple[str, ...] = BOTH
    dtypes: tuple[torch.dtype, ...] = HIGH
    traits: frozenset[str] = field(default_factory=frozenset)  # two_d, swizzled, rht, stochastic, ...

    def __str__(self) -> str:
        return f"{self.format}-{self.label}"

    __repr__ = __str__

    def usages(self) -> list[tuple[bool, ...]]:
        """The trailing arguments (rowwise, columnwise) worth asking for."""
        return [(True, False), (False, True), (True, True)] if len(self.directions) == 2 else [()]

    def ways(self, usage: tuple[bool, ...]) -> list[str]:
        """The directions that a usage asks for."""
        return [way for way, on in zip(self.directions, usage or (True,), strict=True) if on]

    def names(self, shape: Sequence[int], usage: tuple[bool, ...]) -> list[str]:
        return list(self.geometry(tuple(shape), *(usage or (True, False))))

    def arguments(self, device: torch.device | str, usage: tuple[bool, ...]) -> tuple[Any, ...]:
        """What the functional op takes after x."""
        moved = (o.to(device) if isinstance(o, torch.Tensor) else o for o in self.options)
        return (*moved, *usage)

    def buffers(self, x: torch.Tensor, usage: tuple[bool, ...] | None = None) -> Tensors:
        """Name → buffer; both directions unless told."""
        usage = self.usages()[-1] if usage is None else usage
        out = self.quantize(x, *self.arguments(x.device, usage))
        return dict(zip(self.names(x.shape, usage), out, strict=True))

    def refresh(
        self, x: torch.Tensor, out: list[torch.Tensor], noop: torch.Tensor | None, usage: tuple[bool, ...]
    ) -> None:
        """The in-place op."""
        self.quantize_(x, out, noop, *self.arguments(x.device, usage))

    def dequantize(self, buffers: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        """FP32 in the logical shape; NVFP4 column-wise: its 2-D view, with a Hadamard transform that of xᵀ."""
        return self.decode(buffers, direction, tuple(shape))


def _float8_decode(dtype: int) -> Callable[[Tensors, str, Sequence[int]], torch.Tensor]:
    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        columns = direction == "columnwise"
        return float8_dequantize(b["transpose" if columns else "data"], b["scale_inv"], dtype, columns, torch.float32)

    return decode


def _float8(elem: str, label: str, pow2: bool = False, eps: float = 0.0, amax: float | None = None) -> Variant:
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[elem]
    given = None if amax is None else torch.tensor([amax])
    return Variant(
        format="float8",
        label=f"{elem}-{label}",
        quantize=float8_quantize,
        quantize_=float8_quantize_,
        options=(given, dtype, pow2, eps),
        geometry=float8_buffers,
        decode=_float8_decode(dtype),
        elem=elem,
        traits=frozenset() if amax is None else frozenset({"given"}),
    )


def _float8_scaled(elem: str, scale: float) -> Variant:
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[elem]
    return Variant(
        format="float8_scaled",
        label=f"{elem}-{scale:g}",
        quantize=float8_quantize_scaled,
        quantize_=float8_quantize_scaled_,
        options=(torch.tensor([scale]), dtype),
        geometry=lambda shape, *usage: {**float8_buffers(shape, *usage), "amax": ((1,), torch.float32)},
        decode=_float8_decode(dtype),
        elem=elem,
        traits=frozenset({"given"}),
    )


def _float8_rowwise(elem: str, label: str, pow2: bool, eps: float = 0.0) -> Variant:
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[elem]

    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        data, scale = b[f"{direction}_data"], b[f"{direction}_scale_inv"]
        return float8_rowwise_dequantize(data, scale, dtype, direction == "columnwise", torch.float32)

    return Variant(
        format="float8_rowwise",
        label=f"{elem}-{label}",
        quantize=float8_rowwise_quantize,
        quantize_=float8_rowwise_quantize_,
        options=(None, None, dtype, pow2, eps),
        geometry=float8_rowwise_buffers,
        decode=decode,
        elem=elem,
    )


def _float8_block(elem: str, label: str, two_d: bool, pow2: bool, eps: float = 0.0) -> Variant:
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[elem]

    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        data, scale = b[f"{direction}_data"], b[f"{direction}_scale_inv"]
        return float8_block_dequantize(data, scale, dtype, two_d, direction == "columnwise", torch.float32)

    return Variant(
        format="float8_block",
        label=f"{'128x128' if two_d else '1x128'}-{elem}-{label}",
        quantize=float8_block_quantize,
        quantize_=float8_block_quantize_,
        options=(dtype, pow2, eps, two_d),
        geometry=lambda shape, *usage: float8_block_buffers(shape, two_d, *usage),
        decode=decode,
        elem=elem,
        traits=frozenset({"two_d"} if two_d else ()),
    )


def _mxfp8(elem: str, floor: bool = False, two_d: bool = False, swizzled: bool = False) -> Variant:
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[elem]

    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        data, scale = b[f"{direction}_data"], b[f"{direction}_scale_inv"]
        return mxfp8_dequantize(data, scale, dtype, swizzled, direction == "columnwise", torch.float32)

    traits = [name for name, on in (("floor", floor), ("two_d", two_d), ("swizzled", swizzled)) if on]
    return Variant(
        format="mxfp8",
        label="-".join((elem, *traits)),
        quantize=mxfp8_quantize,
        quantize_=mxfp8_quantize_,
        options=(dtype, floor, two_d, swizzled),
        geometry=mxfp8_buffers,
        decode=decode,
        elem=elem,
        traits=frozenset(traits),
    )


def _nvfp4(
    *,
    amax: float | None = None,
    rng: tuple[int, int] | None = None,
    e4m3_max: int = 448,
    four_over_six: int = 0,
    sign_mask: int = 0,
    two_d: bool = False,
    swizzled: bool = False,
    rht: bool = False,
    row_scaled: bool = False,
) -> Variant:
    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        columns = direction == "columnwise"
        rows = torch.Size(shape[:-1]).numel()
        cols = (rup(rows, 16) if rht else rows) if columns else shape[-1]
        data, scale, top = b[f"{direction}_data"], b[f"{direction}_scale_inv"], b[f"amax_{direction}"]
        transposed = columns and not rht
        return nvfp4_dequantize(data, scale, top, e4m3_max, swizzled, transposed, cols, torch.float32)

    flags = {
        "given": amax is not None,
        "stochastic": rng is not None,
        f"{e4m3_max}": e4m3_max != 448,
        "four_over_six": four_over_six,
        "mse": four_over_six == MSE,
        "two_d": two_d,
        "swizzled": swizzled,
        "rht": rht,
        "signs": sign_mask,
        "row_scaled": row_scaled,
    }
    traits = [name for name, on in flags.items() if on]
    given = None if amax is None else torch.tensor([amax])
    seed = None if rng is None else torch.tensor(rng)
    return Variant(
        format="nvfp4",
        label="-".join(traits) or "plain",
        quantize=nvfp4_quantize,
        quantize_=nvfp4_quantize_,
        options=(given, given, seed, e4m3_max, four_over_six, sign_mask, two_d, swizzled, rht, row_scaled),
        geometry=lambda shape, *usage: nvfp4_buffers(shape, rht, row_scaled, *usage),
        decode=decode,
        elem="e2m1",
        dtypes=(torch.bfloat16,) if rht else HIGH,
        traits=frozenset(traits),
    )


def _identity(dtype: torch.dtype) -> Variant:
    return Variant(
        format="identity",
        label=str(dtype).removeprefix("torch."),
        quantize=identity_quantize,
        quantize_=identity_quantize_,
        options=(dtype,),
        geometry=lambda shape, *usage: {"hp_data": (shape, dtype)},
        decode=lambda b, direction, shape: b["hp_data"].float(),
        elem=str(dtype).removeprefix("torch."),
        directions=("rowwise",),
    )


def _mxfp4(
    *,
    rng: tuple[int, int] | None = None,
    sign_mask: int = 0,
    floor: bool = True,
    two_d: bool = False,
    swizzled: bool = False,
    rht: bool = False,
) -> Variant:
    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        columns = direction == "columnwise"
        rows = torch.Size(shape[:-1]).numel()
        cols = (rup(rows, 16) if rht else rows) if columns else shape[-1]
        data, scale = b[f"{direction}_data"], b[f"{direction}_scale_inv"]
        return mxfp4_dequantize(data, scale, swizzled, columns and not rht, cols, torch.float32)

    flags = {
        "stochastic": rng is not None,
        "floor": floor,
        "two_d": two_d,
        "swizzled": swizzled,
        "rht": rht,
        "signs": sign_mask,
    }
    traits = [name for name, on in flags.items() if on]
    return Variant(
        format="mxfp4",
        label="-".join(traits) or "roundup",
        quantize=mxfp4_quantize,
        quantize_=mxfp4_quantize_,
        options=(None if rng is None else torch.tensor(rng), sign_mask, floor, two_d, swizzled, rht),
        geometry=lambda shape, *usage: mxfp4_buffers(shape, rht, *usage),
        decode=decode,
        elem="e2m1",
        dtypes=(torch.bfloat16,) if rht else HIGH,
        traits=frozenset((*traits, "nan_blocks")),
    )


def _mxfp6(elem: str, floor: bool = True, two_d: bool = False, swizzled: bool = False) -> Variant:
    dtype = {"e3m2": E3M2, "e2m3": E2M3}[elem]

    def decode(b: Tensors, direction: str, shape: Sequence[int]) -> torch.Tensor:
        columns = direction == "columnwise"
        cols = torch.Size(shape[:-1]).numel() if columns else shape[-1]
        data, scale = b[f"{direction}_data"], b[f"{direction}_scale_inv"]
        return mxfp6_dequantize(data, scale, dtype, swizzled, columns, cols, torch.float32)

    traits = [name for name, on in (("floor", floor), ("two_d", two_d), ("swizzled", swizzled)) if on]
    return Variant(
        format="mxfp6",
        label="-".join((elem, *traits)),
        quantize=mxfp6_quantize,
        quantize_=mxfp6_quantize_,
        options=(dtype, floor, two_d, swizzled),
        geometry=mxfp6_buffers,
        decode=decode,
        elem=elem,
        traits=frozenset((*traits, "nan_blocks")),
    )


VARIANTS: tuple[Variant, ...] = (
    _float8("e4m3", "exact"),
    _float8("e5m2", "exact"),
    _float8("e4m3", "pow2", pow2=True),
    _float8("e4m3", "eps", eps=2.0**-10),
    _float8("e5m2", "amax", amax=3.0),
    _float8_scaled("e4m3", 1.0),
    _float8_scaled("e5m2", 0.3),
    _float8_rowwise("e4m3", "pow2", pow2=True),
    _float8_rowwise("e5m2", "exact", pow2=False),
    _float8_rowwise("e4m3", "eps", pow2=False, eps=2.0**-10),
    _float8_block("e4m3", "pow2", two_d=False, pow2=True),
    _float8_block("e4m3", "pow2", two_d=True, pow2=True),
    _float8_block("e5m2", "exact", two_d=False, pow2=False),
    _float8_block("e4m3", "eps", two_d=True, pow2=False, eps=2.0**-12),
    _mxfp8("e4m3"),
    _mxfp8("e5m2"),
    _mxfp8("e4m3", floor=True),
    _mxfp8("e4m3", two_d=True),
    _mxfp8("e4m3", swizzled=True),
    _mxfp8("e5m2", floor=True, two_d=True, swizzled=True),
    _mxfp4(),
    _mxfp4(floor=False),
    _mxfp4(two_d=True),
    _mxfp4(swizzled=True),
    _mxfp4(rht=True, sign_mask=RANDOM_SIGN_MASK),
    _mxfp4(rng=(1234, 5), floor=False),
    _mxfp4(rng=(1 << 40, 7), rht=True, sign_mask=RANDOM_SIGN_MASK, swizzled=True),
    _mxfp6("e2m3"),
    _mxfp6("e3m2"),
    _mxfp6("e3m2", floor=False, swizzled=True),
    _mxfp6("e2m3", two_d=True),
    _nvfp4(),
    _nvfp4(two_d=True),
    _nvfp4(swizzled=True),
    _nvfp4(rht=True),
    _nvfp4(rht=True, sign_mask=RANDOM_SIGN_MASK, swizzled=True),
    _nvfp4(rng=(1234, 5)),
    _nvfp4(rng=(1 << 40, 7), rht=True, sign_mask=RANDOM_SIGN_MASK),
    _nvfp4(row_scaled=True),
    _nvfp4(amax=3.0),
    _nvfp4(four_over_six=MAE),
    _nvfp4(four_over_six=MSE, e4m3_max=256),
    _nvfp4(four_over_six=MAE, e4m3_max=256, two_d=True),
    _nvfp4(four_over_six=MSE, e4m3_max=256, row_scaled=True),
    _identity(torch.bfloat16),
    _identity(torch.float32),
)
FORMATS = tuple(dict.fromkeys(variant.format for variant in VARIANTS))


def variants_of(name: str) -> list[Variant]:
    """The option sets of one format."""
    return [variant for variant in VARIANTS if variant.format == name]


# Where rows [a, b) of x are found in a buffer: (dimension, rows per entry along it). None: the same for all rows.
PLACES: dict[str, dict[str, tuple[int, int] | None]] = {
    "float8": {"data": (0, 1), "transpose": (1, 1), "scale_inv": None},
    "float8_rowwise": {"rowwise_data": (0, 1), "rowwise_scale_inv": (0, 1)},
    "float8_block": {
        "rowwise_data": (0, 1),
        "rowwise_scale_inv": (1, 1),
        "columnwise_data": (1, 1),
        "columnwise_scale_inv": (0, 128),
    },
    "mxfp8": {
        "rowwise_data": (0, 1),
        "rowwise_scale_inv": (0, 1),
        "columnwise_data": (0, 1),
        "columnwise_scale_inv": (0, 32),
    },
    "mxfp4": {
        "rowwise_data": (0, 1),
        "rowwise_scale_inv": (0, 1),
        "columnwise_data": (1, 2),
        "columnwise_scale_inv": (1, 32),
    },
    "mxfp6": {
        "rowwise_data": (0, 1),
        "rowwise_scale_inv": (0, 1),
        "columnwise_data": (1, 4),
        "columnwise_scale_inv": (1, 32),
    },
    "nvfp4": {
        "rowwise_data": (0, 1),
        "rowwise_scale_inv": (0, 1),
        "columnwise_data": (1, 2),
        "columnwise_scale_inv": (1, 16),
        "amax_rowwise": None,
        "amax_columnwise": None,
    },
}
PLACES["float8_scaled"] = PLACES["float8"]
