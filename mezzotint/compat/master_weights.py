"""This module quantizes weights from master weights that are sharded over the ranks of a group,
for a distributed optimizer.

Each rank has all of a quantized weight and, in high precision, the flat range of it that its optimizer updates:

    quantize_master_weights(weights, fragments, offsets, group)     every rank: scales of the whole, codes of its range
    … the client gathers the codes of all ranges …
    post_all_gather_processing(weights)                             the column-wise copies, which follow from the codes

What comes out has the bits of a weight that is quantized whole. Only the amaxes of blocks go over the network, in one
collective for all weights. If the scales of a format follow from these, a rank that knows them quantizes a stand-in for
the weight: its own range, zeros elsewhere, and in each block that is not all its own the block's amax somewhere outside
of the range. If they do not (1x128 blocks, 4over6, hybrid and custom quantizers), the fragments themselves are
exchanged, and every rank quantizes the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.comm.collectives import all_reduce_max
from mezzotint.constants import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

Shape = tuple[int, int]
_ABSENT = torch.iinfo(torch.int32).min  # the bits of −0.0: as an int32 less than those of any other float


@dataclass(frozen=True)
class _Part:
    """A `_Part` is one weight, the range of it that this rank updates, and where its codes go."""

    weight: Any
    fragment: torch.Tensor | None  # [n], in the nominal dtype of the weight
    start: int
    shards: tuple[torch.Tensor | None, torch.Tensor | None]  # other buffers for row-wise and column-wise codes

    @property
    def matrix(self) -> Shape:
        return self.weight.shape[:-1].numel(), self.weight.shape[-1]

    @property
    def stop(self) -> int:
        return self.start + (0 if self.fragment is None else self.fragment.numel())


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write this rank's ranges of quantized weights, and the scales of all of them; all ranks of `group` call it.

    `master_weights` has None for a weight that only other ranks update; `start_offsets` says where in the flat weight a
    fragment begins. With `fsdp_shard_model_weights` the codes of a fragment go into these buffers (uint8, or a pair for
    both directions) instead of the weight. Unless `manual_post_all_gather_processing`, column-wise copies that follow
    from the row-wise codes are dropped, and made again when they are read.
    """
    shards = [None] * len(model_weights) if fsdp_shard_model_weights is None else list(fsdp_shard_model_weights)
    counts = {len(model_weights), len(master_weights), len(start_offsets), len(shards)}
    if len(counts) != 1:
        raise ValueError(
            f"model_weights has {len(model_weights)} entries, master_weights {len(master_weights)}, start_offsets "
            f"{len(start_offsets)}, fsdp_shard_model_weights {len(shards)}: give one of each for every weight"
        )
    given = zip(model_weights, master_weights, start_offsets, shards, strict=True)
    parts = [_checked(i, *each) for i, each in enumerate(given)]
    manual = manual_post_all_gather_processing
    _quantize_by_blocks(
        [(part, found) for part in parts if (found := _blocks(part, manual)) is not None], group, manual
    )
    _quantize_whole([part for part in parts if _blocks(part, manual) is None], group)
    for part in parts:
        clear = getattr(part.weight, "clear_high_precision_init_val", None)
        if clear is not None:
            clear()


cast_master_weights_to_fp8 = quantize_master_weights  # the former name


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column-wise copies of weights whose row-wise codes have been gathered. Plain tensors are left alone."""
    for weight in model_weights if isinstance(model_weights, list | tuple) else [model_weights]:
        if not isinstance(weight, QuantizedTensorStorage):
            continue
        quantizer = weight._quantizer
        if isinstance(quantizer, _DERIVED) and _blocks(_Part(weight, None, 0, (None, None)), True) is not None:
            _drop_columnwise(weight)
            if quantizer.columnwise_usage:
                weight.update_usage(columnwise_usage=True)


def clear_columnwise_cache(tensor: QuantizedTensorStorage) -> None:
    """Drop the column-wise copy of a quantized tensor; it is made again when it is read, if its format can do that."""
    _drop_columnwise(tensor)


def _checked(index: int, weight: Any, master: torch.Tensor | None, start: int | None, shard: Any) -> _Part:
    """Return the weight and its range as a `_Part`, or raise an error if they cannot be that."""
    if not isinstance(weight, QuantizedTensorStorage) or weight._quantizer is None:
        raise TypeError(
            f"model_weights[{index}] is a {type(weight).__name__}: give quantized parameters (quantized_model_init)"
        )
    if master is None:
        return _Part(weight, None, 0, (None, None))
    if start is None or start < 0 or start + master.numel() > weight.shape.numel():
        raise ValueError(
            f"start_offsets[{index}] is {start} with {master.numel()} master values: the range must lie in the "
            f"{weight.shape.numel()} of the weight"
        )
    both = shard if isinstance(shard, tuple) else (shard, None)
    return _Part(weight, master.detach().reshape(-1).to(weight._dtype), start, (_codes(both[0]), _codes(both[1])))


def _codes(shard: Any) -> torch.Tensor | None:
    """Return the bytes of a shard, which is a tensor of them or a quantized tensor."""
    return getattr(shard, shard._ROWWISE[0]) if isinstance(shard, QuantizedTensorStorage) else shard


# Quantization by the amaxes of blocks

# In these formats the column-wise copy is a transpose of the row-wise one.
_DERIVED = (Float8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer, NVFP4Quantizer)


def _blocks(part: _Part, manual: bool) -> tuple[Shape, Shape | None] | None:
    """Return the shapes of the blocks that have one scale, row-wise and column-wise; the latter is None if that copy
    follows from the row-wise one.

    It returns None if the amaxes of blocks do not decide the scales, or if a copy that follows is not made again by
    whoever reads it and the caller does not ask for it (`manual`).
    """
    quantizer = part.weight._quantizer
    if not part.weight.get_usages()["rowwise"]:
        return None
    match quantizer:
        case Float8Quantizer() | Float8CurrentScalingQuantizer() | IdentityQuantizer():
            return part.matrix, None
        case Float8BlockQuantizer(block_scaling_dim=2):
            return (FP8_BLOCK, FP8_BLOCK), None
        case MXFP8Quantizer(with_2d_quantization=True):
            return (MX_BLOCK, MX_BLOCK), (MX_BLOCK, MX_BLOCK)
        case MXFP8Quantizer():
            return (1, MX_BLOCK), (MX_BLOCK, 1)
        case NVFP4Quantizer(with_2d_quantization=True):
            others = (quantizer.with_rht, quantizer.stochastic_rounding, quantizer.row_scaled_nvfp4)
            is_other = any(others) or quantizer.nvfp4_use_4over6 or not manual
            return None if is_other else ((NVFP4_BLOCK, NVFP4_BLOCK), None)
    return None


def _quantize_by_blocks(parts: list[tuple[_Part, tuple[Shape, Shape | None]]], group: Any, manual: bool) -> None:
    jobs = [
        (part, is_columnwise, block)
        for part, blocks in parts
        for is_columnwise, block in enumerate(blocks)
        if block is not None and (not is_columnwise or part.weight.get_usages()["columnwise"])
    ]
    if not jobs:
        return
    amaxes = [_block_values(_filled(part), part.matrix, block).amax(1) for part, _, block in jobs]
    reduced = all_reduce_max(torch.cat(amaxes), group).split([amax.numel() for amax in amaxes])
    for (part, is_columnwise, block), amax in zip(jobs, reduced, strict=True):
        stand_in = _stand_in(part, block, amax)
        _write(part, _quantized(stand_in, part.weight._quantizer, bool(is_columnwise)), bool(is_columnwise))
    for part, (_, columnwise) in parts:
        if not manual and columnwise is None and isinstance(part.weight._quantizer, _DERIVED):
            _drop_columnwise(part.weight)


def _filled(part: _Part) -> torch.Tensor:
    """Return the absolute values of the range in a matrix of zeros; NaN counts as 0, so that it never is an amax."""
    values = torch.zeros(part.matrix, dtype=torch.float32, device=part.weight.device)
    if part.fragment is not None:
        values.view(-1)[part.start : part.stop] = part.fragment.float().abs().nan_to_num(0.0, torch.inf)
    return values


def _block_values(x: torch.Tensor, matrix: Shape, block: Shape) -> torch.Tensor:
    """Return the values of each block, (rows, columns) → (blocks, values of a block), with
    zeros or False beyond the matrix."""
    padded = torch.nn.functional.pad(x, (0, -matrix[1] % block[1], 0, -matrix[0] % block[0]))
    rows, columns = padded.shape[0] // block[0], padded.shape[1] // block[1]
    tiles = padded.view(rows, block[0], columns, block[1]).transpose(1, 2)
    return tiles.reshape(rows * columns, block[0] * block[1])


def _stand_in(part: _Part, block: Shape, amax: torch.Tensor) -> torch.Tensor:
    """Return a matrix with this rank's range, and in each block, at the first place outside of
    the range, the block's amax."""
    rows, columns = part.matrix
    values = torch.zeros(rows * columns, dtype=part.weight._dtype, device=part.weight.device)
    is_other = torch.ones(rows * columns, dtype=torch.bool, device=part.weight.device)
    if part.fragment is not None:
        values[part.start : part.stop] = part.fragment
        is_other[part.start : part.stop] = False
    places = torch.arange(rows * columns, device=part.weight.device).view(rows, columns)
    first = _block_values(is_other.view(rows, columns), part.matrix, block).to(torch.uint8).max(1)
    has_other = first.values.bool()
    flat = _block_values(places, part.matrix, block).gather(1, first.indices[:, None]).squeeze(1)
    values[flat[has_other]] = amax[has_other].to(values.dtype)
    return values.view(rows, columns)


def _quantized(x: torch.Tensor, quantizer: Quantizer, is_columnwise: bool) -> Any:
    return quantizer.with_usage(rowwise=not is_columnwise, columnwise=is_columnwise).quantize(x)


def _write(part: _Part, made: Any, is_columnwise: bool) -> None:
    """Copy the scales of the whole, and the codes of the range, into the weight or its shard."""
    names = part.weight._COLUMNWISE if is_columnwise else part.weight._ROWWISE
    for name in names[1:]:
        source, into = getattr(made, name), getattr(part.weight, name)
        if into is not None:
            into.copy_(source.view(into.shape))
    if part.fragment is None or not part.fragment.numel():
        return
    codes = getattr(made, names[0]).view(-1)
    first, last = (_byte(offset, part, codes.numel()) for offset in (part.start, part.stop))
    shard = part.shards[is_columnwise]
    into = getattr(part.weight, names[0]).view(-1)[first:last] if shard is None else shard.reshape(-1)
    if into.numel() != last - first:
        raise ValueError(f"a shard of fsdp_shard_model_weights has {into.numel()} codes: expected {last - first}")
    into.copy_(codes[first:last].view(into.dtype) if into.element_size() == codes.element_size() else codes[first:last])


def _byte(offset: int, part: _Part, codes: int) -> int:
    """Return where the code of an element lies in the flat codes."""
    size = part.weight.shape.numel()
    if size % codes or offset % (size // codes):
        raise ValueError(
            f"a fragment begins or ends at element {offset}: {size} elements are in {codes} bytes, and a byte is one "
            "rank's; give ranges that begin and end at whole bytes"
        )
    return offset // (size // codes)


def _drop_columnwise(weight: Any) -> None:
    if weight.get_usages()["rowwise"] and weight.get_usages()["columnwise"]:
        for name in set(weight._COLUMNWISE) - set(weight._ROWWISE):
            setattr(weight, name, None)


# Quantization by the values themselves


def _quantize_whole(parts: list[_Part], group: Any) -> None:
    """Exchange the bits of all fragments, and quantize the whole weights."""
    if not parts:
        return
    if any(shard is not None for part in parts for shard in part.shards):
        raise NotImplementedError(
            "fsdp_shard_model_weights is given for a weight whose scales do not follow from amaxes of blocks: leave it "
            "None for such weights, or use a format that has them (per tensor, 2D blocks, MXFP8)"
        )
    sizes = [part.weight.shape.numel() for part in parts]
    bits = torch.full((sum(sizes),), _ABSENT, dtype=torch.int32, device=parts[0].weight.device)
    for part, whole in zip(parts, bits.split(sizes), strict=True):
        if part.fragment is not None:
            whole[part.start : part.stop] = part.fragment.float().view(torch.int32)
    for part, whole in zip(parts, all_reduce_max(bits, group).split(sizes), strict=True):
        values = whole.contiguous().view(torch.float32).to(part.weight._dtype)
        part.weight.quantize_(values.view(part.weight.shape))
