"""The matrix product: this module computes D (Ra, Rb) = A (Ra, C) · B (Rb, C)ᵀ of operands that say what they are.

quantized · quantized: the FP32 product of exact values (`operand.exact_of`), times the scales that stand outside
    of the sum (`operand.factors`), plus bias in FP32, cast once. Scales per tensor and per row stand outside; each
    format's file says which of its scales do.
high · high (neither is quantized): torch.mm in the operands' dtype (FP32 accumulation). Where the output has another
    dtype or a bias is added, or where the CPU has no fast BF16 product, the CPU multiplies in FP32 and casts once;
    a GPU writes FP32, or adds the bias inside the GEMM. FP32 operands follow torch's TF32 setting.
high · quantized: the quantized one is dequantized to the other's dtype first.

Which code runs is a row of `hw.gemm_backends()`: PyTorch's scaled GEMMs (`scaled_mm.py`) where the GPU has them, else
the exact values in BF16 on BF16 tensor cores, else, and on the CPU, the reference. They differ only in the order of
FP32 additions: Hopper's block-scaled GEMM promotes every 128 elements and scales each partial sum, and `fast_accum`
lets its FP8 tensor cores keep about 14 bits in between. Where FP8 blocks are emulated, those whose scales are no powers
of two are rounded to BF16.

`accumulate` is added to in place, as `accumulate += D.to(accumulate.dtype)`. No size is refused: operands are padded
with zero codes to the sizes that a GEMM requires. An empty contraction gives zeros (plus bias).
"""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint import hw
from mezzotint.constants import HIGH_PRECISION
from mezzotint.formats import HIGH, Backend
from mezzotint.kernels._lib import composite, is_plain, leaf
from mezzotint.kernels.finish import finish
from mezzotint.kernels.operand import (
    Operand,
    contraction,
    dequantize_operand,
    exact_of,
    factors,
    is_unpacked,
    rows,
)
from mezzotint.kernels.scaled_mm import ALIGN, OptionalTensor

__all__ = ["GENERAL", "Operand", "gemm", "gemm_reference", "write_product"]

Product = Callable[[torch.Tensor, Operand, Operand, OptionalTensor, bool], None]  # writes D into the first


def gemm_reference(out: torch.Tensor, a: Operand, b: Operand, bias: OptionalTensor, fast_accum: bool = False) -> None:
    """Write the product as the specification defines it, in plain torch."""
    if a.kind == HIGH or b.kind == HIGH:
        x, y = _same_dtype(a, b)
        if bias is None and out.dtype == x.dtype and not hw.multiplies_slowly(x):
            torch.mm(x, y.t(), out=out)
        else:
            finish(out, torch.mm(x.float(), y.float().t()), [], bias)
        return
    size = contraction(a, b)
    x = exact_of(a)(a, size, torch.float32)
    y = exact_of(b)(b, size, torch.float32)
    finish(out, torch.mm(x, y.t()), factors(a, b), bias)


def _plain(out: torch.Tensor, a: Operand, b: Operand, bias: OptionalTensor, fast_accum: bool) -> None:
    """Write the product on a GPU where at least one side is not quantized."""
    x, y = _same_dtype(a, b)
    if out.dtype == x.dtype and bias is None:
        torch.mm(x, y.t(), out=out)
    elif bias is not None and out.dtype == x.dtype == bias.dtype:
        torch.addmm(bias, x, y.t(), out=out)
    else:
        finish(out, _mm_fp32(x, y, out), [], bias)


def _emulated(out: torch.Tensor, a: Operand, b: Operand, bias: OptionalTensor, fast_accum: bool) -> None:
    """Write the product of two quantized operands on a GPU that has no GEMM for them."""
    size = contraction(a, b)
    x = exact_of(a)(a, size, torch.bfloat16)
    y = exact_of(b)(b, size, torch.bfloat16)
    scales = factors(a, b)
    if not scales and bias is None and out.dtype == torch.bfloat16:
        torch.mm(x, y.t(), out=out)
    else:
        finish(out, _mm_fp32(x, y, out), scales, bias)


def _mm_fp32(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return x · yᵀ in FP32, written to `out` if that is FP32, else to a new tensor."""
    product = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    if x.dtype == torch.float32:
        return torch.mm(x, y.t(), out=product)
    return torch.mm(x, y.t(), out_dtype=torch.float32, out=product)


def _same_dtype(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices in the dtype of the unquantized one, or in what two unequal dtypes promote to."""
    if a.kind == b.kind == HIGH and a.data.dtype == b.data.dtype:
        return a.data, b.data
    high = [op.data.dtype for op in (a, b) if op.kind == HIGH]
    dtype = torch.promote_types(high[0], high[-1])
    size = contraction(a, b)
    return dequantize_operand(a, size, dtype)[:, :size], dequantize_operand(b, size, dtype)[:, :size]


# Products that belong to no format, by the names of their rows in `hw.gemm_backends()`.
GENERAL: dict[str, Product] = {"reference": gemm_reference, "plain": _plain, "emulated": _emulated}


def write_product(out: torch.Tensor, a: Operand, b: Operand, bias: OptionalTensor, fast_accum: bool) -> None:
    """Write D into `out` (Ra, Rb), contiguous, by the backend of its device. The operands are as they are stored."""
    # Inside of an op autograd and torch.autocast are still on; the latter would multiply FP32 matrices in BF16.
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        product_of(out, a, b)(out, a, b, bias, fast_accum)


def at_once(a: Operand, b: Operand, dtype: torch.dtype, bias: OptionalTensor, fast_accum: bool) -> torch.Tensor | None:
    """Return D in plain eager code on a GPU by one call of PyTorch's, as in a graph; None if it takes more."""
    if torch.is_autocast_enabled("cuda"):
        return None
    if (a.data.data_ptr() | b.data.data_ptr()) % ALIGN:  # memory that PyTorch did not allocate
        return None
    return _by_one_call(a, b, bias, dtype, fast_accum)


def _by_one_call(
    a: Operand, b: Operand, bias: OptionalTensor, dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor | None:
    """Return D by one call of PyTorch's on a GPU, or None if it takes more."""
    one_call = _unpacked_product if is_unpacked(a) and is_unpacked(b) else choose(a, b).one_call
    return None if one_call is None else one_call(a, b, bias, dtype, fast_accum)


def product_of(out: torch.Tensor, a: Operand, b: Operand) -> Product:
    """Return the function that writes D into `out` in plain eager code: the product of its device's backend."""
    if out.numel() == 0 or a.data.numel() == 0 or b.data.numel() == 0:  # rows, or what is contracted
        return _nothing
    if torch.is_autocast_enabled("cuda" if out.is_cuda else out.device.type):
        return write_product
    backend = choose(a, b)
    if backend is hw.EMULATED or (backend is hw.REFERENCE and a.data.is_cuda):
        _tell(a, b)
    return backend.product or GENERAL[backend.name]


def _nothing(out: torch.Tensor, a: Operand, b: Operand, bias: OptionalTensor, fast_accum: bool) -> None:
    """Write a product that has no rows, or that contracts over no elements."""
    if out.numel():
        finish(out.zero_(), out, [], bias)


def _tell(a: Operand, b: Operand) -> None:
    """Warn that the GPU has no product of these kinds; do not warn if it only lacks that of the two element types."""
    cc = capability_of(a.data)
    if HIGH not in (a.kind, b.kind) and hw.gemm_backend(a.kind, b.kind, cc).how != "native":
        hw.tell_emulated(a.kind, b.kind, cc)


def capability_of(x: torch.Tensor) -> hw.CC | None:
    """Return the compute capability of the tensor's device, or None for the CPU and for an AMD GPU."""
    return hw.capability(x.device.index) if x.is_cuda else None


def choose(a: Operand, b: Operand) -> Backend:
    """Return the backend of these operands on their device."""
    backend = hw.gemm_backend(a.kind, b.kind, capability_of(a.data))
    if backend.pairs and (a.dtype, b.dtype) not in backend.pairs:
        return hw.EMULATED
    return backend


# The ops take an operand's fields one by one, in the order of the dataclass.
_SIDE = (
    "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_amax, str {0}_kind, int {0}_dtype, bool {0}_swizzled,"
    " int {0}_e4m3_max, bool {0}_transposed"
)
FIELDS = 8
_ARGUMENTS = f"{_SIDE.format('a')}, {_SIDE.format('b')}, Tensor? bias"


def _split(arguments: tuple) -> tuple[Operand, Operand, OptionalTensor]:
    return Operand(*arguments[:FIELDS]), Operand(*arguments[FIELDS : 2 * FIELDS]), arguments[2 * FIELDS]


def _gemm(*arguments: Any) -> torch.Tensor:
    a, b, bias = _split(arguments)
    out_dtype, fast_accum = arguments[2 * FIELDS + 1 :]
    out = a.data.new_empty((rows(a), rows(b)), dtype=out_dtype)
    write_product(out, a, b, bias, fast_accum)
    return out


def _gemm_in_place(out: torch.Tensor, *arguments: Any) -> None:
    out.add_(_gemm(*arguments[:-1], out.dtype, arguments[-1]))


def _gemm_fake(*arguments: Any) -> torch.Tensor:
    a, b, _ = _split(arguments)
    return a.data.new_empty((rows(a), rows(b)), dtype=arguments[2 * FIELDS + 1])


_gemm_op = leaf(f"gemm({_ARGUMENTS}, ScalarType out_dtype, bool fast_accum) -> Tensor", fake=_gemm_fake, cpu=_gemm)
_gemm_op_ = leaf(
    f"gemm_(Tensor(a!) out, {_ARGUMENTS}, bool fast_accum) -> ()",
    fake=lambda out, *arguments: None,
    cpu=_gemm_in_place,
)


def _gemm_in_graph(*arguments: Any) -> torch.Tensor:
    a, b, bias = _split(arguments)
    made = _by_one_call(a, b, bias, *arguments[2 * FIELDS + 1 :]) if a.data.is_cuda else None
    return _gemm_op(*arguments) if made is None else made


def _unpacked_product(
    a: Operand, b: Operand, bias: OptionalTensor, dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor | None:
    """Return the product that `_emulated` writes by one call of `torch.mm`; None if it takes more than one."""
    if bias is not None or dtype != torch.bfloat16 or factors(a, b):
        return None
    _tell(a, b)
    size = contraction(a, b)
    return torch.mm(exact_of(a)(a, size, dtype), exact_of(b)(b, size, dtype).t())


# In a graph this calls PyTorch's own product if that is all it takes, which a compiled graph reaches without going
# through Python; else it calls the op. It is a composite, so that the compiler sees what it is made of.
_gemm_in_graph_op = composite(
    f"gemm_in_graph({_ARGUMENTS}, ScalarType out_dtype, bool fast_accum) -> Tensor", _gemm_in_graph
)


def flat(op: Operand) -> tuple:
    """Return the operand's fields in the order of the ops' arguments."""
    return (op.data, op.scale, op.amax, op.kind, op.dtype, op.swizzled, op.e4m3_max, op.transposed)


def check_output(
    shape: tuple[int, int],
    device: torch.device,
    out_dtype: torch.dtype,
    bias: OptionalTensor,
    accumulate: torch.Tensor | None,
    suffix: str = "",
) -> None:
    """Raise ValueError if bias, output dtype or accumulator do not fit D."""
    if accumulate is None and out_dtype not in HIGH_PRECISION:
        raise ValueError(f"out_dtype is {out_dtype}: expected one of {HIGH_PRECISION}")
    if bias is not None and (tuple(bias.shape) != shape[1:] or bias.device != device):
        raise ValueError(f"bias{suffix} is {tuple(bias.shape)} on {bias.device}: expected {shape[1:]} on {device}")
    if accumulate is not None and (tuple(accumulate.shape) != shape or accumulate.device != device):
        given = f"{tuple(accumulate.shape)} on {accumulate.device}"
        raise ValueError(f"accumulate{suffix} is {given}: expected {shape} on {device}")
    if accumulate is not None and accumulate.dtype not in HIGH_PRECISION:
        raise ValueError(f"accumulate{suffix} is {accumulate.dtype}: expected one of {HIGH_PRECISION}")


def gemm(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accumulate: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return D (Ra, Rb) = A (Ra, C) · B (Rb, C)ᵀ + bias [Rb] in `out_dtype`.

    If `accumulate` (Ra, Rb) is given, D has its dtype instead of `out_dtype` and is added into it, and it is returned.
    `fast_accum` allows FP8 tensor cores to accumulate with fewer bits; it is a permission, ignored elsewhere. Operands
    must be as storages make them: nothing is checked here (see `check_pair`, `check_output`). Plain eager code goes
    through no op.
    """
    if not is_plain(a.data):
        if accumulate is None:
            return _gemm_in_graph_op(*flat(a), *flat(b), bias, out_dtype, fast_accum)
        _gemm_op_(accumulate, *flat(a), *flat(b), bias, fast_accum)
        return accumulate
    dtype = out_dtype if accumulate is None else accumulate.dtype
    out = at_once(a, b, dtype, bias, fast_accum) if a.data.is_cuda else None
    if out is None:
        out = new_output(a, b, dtype)
        product_of(out, a, b)(out, a, b, bias, fast_accum)
    return out if accumulate is None else accumulate.add_(out)


def new_output(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor for D (Ra, Rb)."""
    return a.data.new_empty(rows(a), rows(b), dtype=dtype)
