"""Many products at once, one for each expert: this module computes D_i (Ra_i, Rb) = A_i (Ra_i, C_i) · B_i (Rb, C_i)ᵀ.

The groups share kind, element type and Rb; Ra_i and C_i may differ and be 0. In the forward and the input gradient Ra_i
(tokens) differs by group, in the weight gradient C_i does. The results lie one below the other in one buffer (Σ Ra_i,
Rb): `grouped_gemm` returns views of it, `grouped_gemm_packed` the buffer. Every element is written: an empty
contraction gives zeros (plus bias), and no kernel sees an empty group (pytorch/pytorch#172439: Blackwell leaves garbage
there).

Sizes are known on the host (they are shapes), so no kernel reads past them and nothing waits for the device. On a GPU:

    torch._grouped_mm          BF16 in and out, no bias, sizes in multiples of 8, 9.0 ≤ cc < 11.0
    a kind's own               `formats.OperandKind.grouped`: BF16 out, no bias
    one GEMM after another     everything else

The first two require the groups to be joined in one buffer. Neighbours in memory (a split tensor, a stacked parameter)
are taken as they lie; others are copied, which pays only while the groups are small (`SMALL_GROUP`).
"""

from collections.abc import Sequence
from itertools import accumulate as accumulate_sizes
from typing import Any

import torch

from mezzotint.formats import HIGH, KINDS
from mezzotint.kernels._lib import leaf
from mezzotint.kernels.gemm import capability_of, check_output, write_product
from mezzotint.kernels.operand import Operand, codes, rows
from mezzotint.kernels.scaled_mm import OptionalTensor

SMALL_GROUP = 512  # mean Ra_i up to which joining by a copy is worth it


def _joined_gemm(a: list[Operand], b: list[Operand], fast_accum: bool) -> torch.Tensor | None:
    """Return the product (Σ Ra_i, Rb) by one grouped kernel, or None if none fits. No group may be empty."""
    cc = capability_of(a[0].data)
    if cc is None or not (9, 0) <= cc < (11, 0):
        return None
    is_small = sum(rows(op) for op in a) <= SMALL_GROUP * len(a)
    if a[0].kind == b[0].kind == HIGH:
        if any(op.data.dtype != torch.bfloat16 for op in (*a, *b)):
            return None
        product = _fprop(a, b, False)
        product = _wgrad(a, b) if product is None else product
        return _fprop(a, b, True) if product is None and is_small else product
    if a[0].kind != b[0].kind:
        return None
    grouped = KINDS[a[0].kind].grouped
    return None if grouped is None else grouped(a, b, cc, is_small, fast_accum)


def _fprop(a: list[Operand], b: list[Operand], may_copy: bool) -> torch.Tensor | None:
    """Return the BF16 product of groups that differ in Ra_i: A is joined to (Σ Ra_i, C), B is stacked to (G, Rb, C)."""
    if len({codes(op) for op in a}) > 1 or codes(a[0]) % 8 or rows(b[0]) % 8:
        return None
    x, y = join_rows([op.data for op in a], may_copy), join_rows([op.data for op in b], may_copy)
    if x is None or y is None:
        return None
    y = y.view(len(b), rows(b[0]), -1).transpose(1, 2)
    return torch._grouped_mm(x, y, offs=group_ends([rows(op) for op in a], x.device), out_dtype=torch.bfloat16)


def _wgrad(a: list[Operand], b: list[Operand]) -> torch.Tensor | None:
    """Return the BF16 product of groups that differ in C_i: A_i and B_i are views (R, C_i) of token matrices (C_i, R),
    which are joined by tokens."""
    if len({rows(op) for op in a}) > 1 or rows(a[0]) % 8 or rows(b[0]) % 8:
        return None
    x, y = join_rows([op.data.t() for op in a], False), join_rows([op.data.t() for op in b], False)
    if x is None or y is None:
        return None
    ends = group_ends([codes(op) for op in a], x.device)
    return torch._grouped_mm(x.t(), y, offs=ends, out_dtype=torch.bfloat16).flatten(0, 1)


def join_rows(tensors: Sequence[torch.Tensor], may_copy: bool) -> torch.Tensor | None:
    """Return the matrices as one (Σ R_i, C): a view if each starts where the one before it ends, else a copy, or None
    if it may not copy."""
    first, end = tensors[0], tensors[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage
        if not (is_next and tensor.is_contiguous()):
            return torch.cat(list(tensors)) if may_copy else None
        end += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(tensor.shape[0] for tensor in tensors), first.shape[1]), (first.shape[1], 1))


def group_ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where each group ends, int32 [G]. Kernel arguments carry the sizes: a copy from the host would wait."""
    ends = torch.zeros(len(sizes), dtype=torch.int32, device=device)
    torch._foreach_add_(list(ends.unbind()), list(accumulate_sizes(sizes)))
    return ends


_SIDE = (
    "Tensor[] {0}, Tensor[] {0}_scale, Tensor[] {0}_amax, str {0}_kind, int {0}_dtype, bool {0}_swizzled,"
    " int {0}_e4m3_max, bool {0}_transposed"
)
_FIELDS = 8
_ARGUMENTS = f"{_SIDE.format('a')}, {_SIDE.format('b')}, Tensor[] bias"


def _operands(data: Any, scales: Any, amaxes: Any, *flags: Any) -> list[Operand]:
    none = [None] * len(data)
    return [Operand(*parts, *flags) for parts in zip(data, scales or none, amaxes or none, strict=True)]


def _split(arguments: tuple) -> tuple[list[Operand], list[Operand], Sequence[OptionalTensor]]:
    a, b = _operands(*arguments[:_FIELDS]), _operands(*arguments[_FIELDS : 2 * _FIELDS])
    return a, b, arguments[2 * _FIELDS] or [None] * len(a)


def _packed_fake(*arguments: Any) -> torch.Tensor:
    a, b, _ = _split(arguments)
    return a[0].data.new_empty((sum(rows(op) for op in a), rows(b[0])), dtype=arguments[-2])


def _packed(*arguments: Any) -> torch.Tensor:
    """Multiply the groups that have something to multiply by one grouped kernel, or else one GEMM after another."""
    a, b, biases = _split(arguments)
    out_dtype, fast_accum = arguments[-2:]
    kept = [i for i, op in enumerate(a) if rows(op) and codes(op)]
    if len(kept) > 1 and rows(b[0]) and biases[0] is None and out_dtype == torch.bfloat16:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            product = _joined_gemm([a[i] for i in kept], [b[i] for i in kept], fast_accum)
        if product is not None:
            return product if len(kept) == len(a) else _spread(product, [rows(op) for op in a], set(kept))
    out = _packed_fake(*arguments)
    for part, x, y, bias in zip(out.split([rows(op) for op in a]), a, b, biases, strict=True):
        write_product(part, x, y, bias, fast_accum)
    return out


def _spread(product: torch.Tensor, sizes: list[int], kept: set[int]) -> torch.Tensor:
    """Return the product of the kept groups, with zeros in the rows of the others."""
    if sum(sizes) == product.shape[0]:
        return product
    out = product.new_zeros((sum(sizes), product.shape[1]))
    parts = [part for i, part in enumerate(out.split(sizes)) if i in kept]
    torch._foreach_copy_(parts, list(product.split([part.shape[0] for part in parts])))
    return out


def _packed_in_place(outs: list[torch.Tensor], *arguments: Any) -> None:
    """Add the products one GEMM after another, so that no more than one D_i at a time lives beside the accumulators."""
    for out, x, y, bias in zip(outs, *_split(arguments), strict=True):
        product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        write_product(product, x, y, bias, arguments[-1])
        out.add_(product)


_grouped_op = leaf(
    f"grouped_gemm({_ARGUMENTS}, ScalarType out_dtype, bool fast_accum) -> Tensor",
    fake=_packed_fake,
    cpu=_packed,
)
_grouped_op_ = leaf(
    f"grouped_gemm_(Tensor(a!)[] out, {_ARGUMENTS}, bool fast_accum) -> ()",
    fake=lambda out, *arguments: None,
    cpu=_packed_in_place,
)


def _flat(side: Sequence[Operand], name: str) -> tuple:
    """Return the groups' tensors as lists, and the flags that they share; raise ValueError if they do not."""
    first = side[0]
    flags = (first.kind, first.dtype, first.swizzled, first.e4m3_max, first.transposed)
    for i, op in enumerate(side):
        own = (op.kind, op.dtype, op.swizzled, op.e4m3_max, op.transposed)
        if own != flags:
            raise ValueError(f"{name}[{i}] is {own} (kind, dtype, …), {name}[0] is {flags}: groups must be alike")
    scales = [op.scale for op in side if op.scale is not None]
    amaxes = [op.amax for op in side if op.amax is not None]
    return [op.data for op in side], scales, amaxes, *flags


def _checked(
    a: Sequence[Operand],
    b: Sequence[Operand],
    out_dtype: torch.dtype,
    bias: Sequence[torch.Tensor] | None,
    accumulate: Sequence[torch.Tensor] | None,
) -> tuple:
    """Return the ops' arguments up to the bias, checked. Operands must be as storages make them: `check_pair` is for
    others."""
    if not a or len(a) != len(b):
        raise ValueError(f"a has {len(a)} groups, b has {len(b)}: expected the same number, at least one")
    for name, given in (("bias", bias), ("accumulate", accumulate)):
        if given is not None and len(given) != len(a):
            raise ValueError(f"{name} has {len(given)} entries: expected one for each of {len(a)} groups, or None")
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if rows(y) != rows(b[0]) or x.data.device != a[0].data.device:
            raise ValueError(f"b[{i}] has {rows(y)} rows, b[0] {rows(b[0])}: expected the same, on one device")
        own_bias, total = (None if given is None else given[i] for given in (bias, accumulate))
        check_output((rows(x), rows(y)), x.data.device, out_dtype, own_bias, total, f"[{i}]")
        if accumulate is not None and accumulate[i].dtype != accumulate[0].dtype:
            raise ValueError(f"accumulate[{i}] is {accumulate[i].dtype}: expected one dtype for all groups")
    return *_flat(a, "a"), *_flat(b, "b"), list(bias or ())


def grouped_gemm_packed(
    a: Sequence[Operand],
    b: Sequence[Operand],
    *,
    out_dtype: torch.dtype,
    bias: Sequence[torch.Tensor] | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return every D_i = A_i · B_iᵀ + bias_i, one below the other, as (Σ Ra_i, Rb)."""
    return _grouped_op(*_checked(a, b, out_dtype, bias, None), out_dtype, fast_accum)


def grouped_gemm(
    a: Sequence[Operand],
    b: Sequence[Operand],
    *,
    out_dtype: torch.dtype,
    bias: Sequence[torch.Tensor] | None = None,
    accumulate: Sequence[torch.Tensor] | None = None,
    fast_accum: bool = False,
) -> list[torch.Tensor]:
    """Return D_i (Ra_i, Rb) = A_i · B_iᵀ + bias_i [Rb] for each group, as views of one buffer.

    If `accumulate` is given, tensors (Ra_i, Rb) of one dtype, D_i has that dtype and is added into them; they are
    returned.
    """
    arguments = _checked(a, b, out_dtype, bias, accumulate)
    if accumulate is None:
        packed = _grouped_op(*arguments, out_dtype, fast_accum)
        return list(packed.split([rows(op) for op in a]))
    _grouped_op_(list(accumulate), *arguments, fast_accum)
    return list(accumulate)
