"""This module handles the row-wise copy of a quantized matrix as published formats hold it:
its buffers without padding.

Formats say for each buffer how rows and columns of the matrix lie in it
(`QuantizedTensorStorage._along_matrix`). So one set of functions takes rows of any format, joins them, and makes
a tensor of them again. Bytes are moved, not computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION, cdiv
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


@dataclass(frozen=True)
class Codes:
    """A `Codes` holds the codes and scales of a matrix, by the attributes of the storage that they came from."""

    shape: tuple[int, int]
    buffers: Mapping[str, torch.Tensor]
    along: Mapping[str, tuple[Along, Along]]

    def take_rows(self, rows: torch.Tensor) -> "Codes":
        """Return these rows (int64 [n]); rows that share a scale must be taken together, or a ValueError is raised."""
        taken = {}
        for name, buffer in self.buffers.items():
            along = self.along[name][0]
            taken[name] = (
                buffer if along is None else buffer.index_select(along[0], _blocks(rows, along[1], self.shape))
            )
        return Codes((rows.numel(), self.shape[1]), taken, self.along)


def _blocks(rows: torch.Tensor, height: int, shape: tuple[int, int]) -> torch.Tensor:
    """Return the numbers of the blocks of `height` rows that these rows make up, in their order."""
    if height == 1:
        return rows
    first = rows[::height]
    whole = first[:, None] + torch.arange(height)
    wanted = whole.reshape(-1)[: rows.numel()]
    ends = rows.numel() % height == 0 or bool(rows[-1] + 1 == shape[0])
    if not ends or bool((first % height).any()) or not torch.equal(wanted, rows):
        raise ValueError(f"the rows cut blocks of {height} rows that share a scale")
    return first // height


def codes_of(tensor: Any) -> Codes:
    """Return the codes of the row-wise copy of a quantized matrix."""
    along = tensor._along_matrix()
    if along is None:
        raise ValueError(
            f"{type(tensor).__name__} has its scales in the order of a GEMM: quantize with optimize_for_gemm=False"
        )
    if not tensor.get_usages()["rowwise"]:
        raise ValueError(f"{type(tensor).__name__} has no row-wise copy, which is what is published: keep it")
    rows, cols = (int(size) for size in tensor.shape)
    buffers = {}
    for name in tensor._ROWWISE:
        buffer = getattr(tensor, name)
        for along_dim, size in zip(along[name], (rows, cols), strict=True):
            if along_dim is not None:
                buffer = buffer.narrow(along_dim[0], 0, cdiv(size, along_dim[1]))
        buffers[name] = buffer
    return Codes((rows, cols), buffers, {name: along[name] for name in buffers})


def join_codes(parts: Sequence[Codes], rows: Sequence[torch.Tensor]) -> Codes:
    """Return the codes of which `take_rows(rows[i])` is `parts[i]`; a buffer that belongs to all
    rows must be equal in all parts."""
    order = torch.cat(list(rows))
    shape = (order.numel(), parts[0].shape[1])
    joined = {}
    for name, first in parts[0].buffers.items():
        along = parts[0].along[name][0]
        if along is not None:
            stacked = torch.cat([part.buffers[name] for part in parts], along[0])
            joined[name] = stacked.index_select(along[0], torch.argsort(_blocks(order, along[1], shape)))
        elif all(torch.equal(first, part.buffers[name]) for part in parts):
            joined[name] = first
        else:
            raise ValueError("the parts of one weight have scales of their own, and the weight has one for all of it")
    return Codes(shape, joined, parts[0].along)


def empty_codes(quantizer: Quantizer, shape: tuple[int, int], device: str = "meta") -> Codes:
    """Return codes of this shape without their values."""
    return codes_of(_row_wise(quantizer, shape, torch.float32, device))


def tensor_of(codes: Codes, quantizer: Quantizer, dtype: torch.dtype) -> QuantizedTensor:
    """Return the tensor with these codes; the quantizer makes the column-wise copy that backward
    reads, if it has that usage.

    The copy is a transpose of the codes if the format allows that (square tiles, one scale); else the
    dequantized values are quantized.
    """
    made: Any = _row_wise(quantizer, codes.shape, dtype, "cpu")
    for name, buffer in codes.buffers.items():
        whole = getattr(made, name)
        whole.zero_()
        whole[tuple(slice(size) for size in buffer.shape)].copy_(buffer)
    if not quantizer.columnwise_usage:
        return made
    made._quantizer = quantizer.copy()
    if quantizer.derives_columnwise() and _is_tiled(made, quantizer):
        made.update_usage(columnwise_usage=True)
        return made
    other = quantizer.with_usage(rowwise=False, columnwise=True).quantize(made.dequantize(), dtype=dtype)
    for name in made._COLUMNWISE:
        setattr(made, name, getattr(other, name))
    return made


def _row_wise(quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype, device: str) -> Any:
    rowwise: Any = quantizer.with_usage(rowwise=True, columnwise=False)
    return rowwise._built(rowwise.for_dtype(dtype).alloc_tensors(shape, device=device), shape, dtype)


def _is_tiled(made: Any, quantizer: Any) -> bool:
    """Return whether the rows of a square tile have one scale, as this quantizer would give them."""
    if not getattr(quantizer, "with_2d_quantization", False):
        return True
    scales = codes_of(made).buffers["_rowwise_scale_inv"]
    block = cdiv(made.shape[1], scales.shape[1])
    return all(bool((tile == tile[:1]).all()) for tile in scales.split(block))


def is_quantized(value: Any) -> bool:
    """Return whether a tensor holds codes."""
    return isinstance(value, QuantizedTensorStorage)


def check_plain_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ValueError if tensors that hold no codes cannot have this dtype; None keeps theirs."""
    if dtype is not None and dtype not in HIGH_PRECISION:
        raise ValueError(f"dtype is {dtype}: give torch.float32, torch.float16 or torch.bfloat16, or None")
