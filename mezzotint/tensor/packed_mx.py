"""Shared code of the MX formats with elements of 4 and 6 bits, whose codes are packed along the blocks and whose scales
are E8M0 bytes."""

from typing import Any, ClassVar

import torch

from mezzotint.constants import MX_BLOCK, cdiv
from mezzotint.kernels._lib import matrix_shape, padded
from mezzotint.kernels.packed_mx import Element, pack, packed_scale_shape, packed_shape, unpack
from mezzotint.tensor.directions import TwoDirectionStorage, cuts_blocks, matrix_rows
from mezzotint.tensor.storage import Along

SCALE_RULES = ("floor", "roundup")


class PackedMXStorage(TwoDirectionStorage):
    """This storage holds packed codes of x and of xᵀ, each with scale bytes, laid out as `kernels/packed_mx.py`
    says."""

    _ELEMENT: ClassVar[Element]  # how codes of this size are packed

    _with_gemm_swizzled_scales: bool

    # A group of codes does not record a size that cuts it, so a storage keeps the shape that it was made for.
    _made_for: Any = None

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        made = super()._build(shape, dtype, kwargs)
        made._made_for = None if shape is None else tuple(shape)
        return made

    def _logical_shape(self) -> tuple[int, ...]:
        if self._made_for is not None:
            return self._made_for
        last = 1 if self._ELEMENT.group_bytes == 1 else 2  # dimensions that the codes of a row take
        if self._rowwise_data is not None:
            size = self._rowwise_data.shape
            return (*size[:-last], size[-last] * self._ELEMENT.group)
        assert self._columnwise_data is not None, "a storage without data has no shape"
        size = self._columnwise_data.shape
        return (size[1] * self._ELEMENT.group, size[0])

    def _is_tiled(self) -> bool:
        """Return whether a scale covers a 32x32 tile, so that one direction can be made from the other."""
        quantizer: Any = self._quantizer
        return quantizer is not None and quantizer.with_2d_quantization

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make the missing direction by a transpose of codes and scales; raise ValueError without 32x32 tiles.

        Without tiles the blocks of the two directions differ.
        """
        if self._quantizer is None or not self._quantizer.derives_columnwise():
            super()._derive(rowwise, columnwise)
        data, scale_inv = self._side(rowwise)
        shape = self._logical_shape()
        lines, size = matrix_shape(shape)[:: -1 if rowwise else 1]  # of the direction that is held
        flat = data.reshape(packed_shape((lines,), size, self._ELEMENT))
        codes = pack(unpack(flat, self._ELEMENT, size).t().contiguous(), self._ELEMENT)
        tiles = scale_inv[::MX_BLOCK, : cdiv(size, MX_BLOCK)][: cdiv(lines, MX_BLOCK)]
        scales = tiles.t().repeat_interleave(MX_BLOCK, 0)[:size]
        scales = padded(scales, *packed_scale_shape(size, lines)).contiguous()
        if rowwise:
            self._rowwise_data = codes.view(packed_shape(shape[:-1], shape[-1], self._ELEMENT))
            self._rowwise_scale_inv = scales
        else:
            self._columnwise_data, self._columnwise_scale_inv = codes, scales

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        if not shape or shape[-1] != self.shape[-1]:
            return None
        data = self._rowwise_data
        packed = packed_shape(shape[:-1], shape[-1], self._ELEMENT)
        return {"rowwise_data": None if data is None else data.view(packed)}

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        first, last = matrix_rows(shape, start, stop)
        is_blocked = self._columnwise_data is not None or self._is_tiled()
        if self._with_gemm_swizzled_scales or (is_blocked and cuts_blocks(first, last, rows, MX_BLOCK)):
            return None
        fields: dict[str, Any] = {}
        if self._rowwise_data is not None and self._rowwise_scale_inv is not None:
            fields["rowwise_data"] = self._rowwise_data[start:stop]
            scales = self._rowwise_scale_inv[first:last]
            fields["rowwise_scale_inv"] = padded(scales, *packed_scale_shape(last - first, cols)).contiguous()
        if self._columnwise_data is not None and self._columnwise_scale_inv is not None:
            group = self._ELEMENT.group
            ends = self._columnwise_data.shape[1] if last == rows else last // group
            fields["columnwise_data"] = self._columnwise_data[:, first // group : ends].contiguous()
            scales = self._columnwise_scale_inv[:, first // MX_BLOCK : cdiv(last, MX_BLOCK)]
            fields["columnwise_scale_inv"] = padded(scales, *packed_scale_shape(cols, last - first)).contiguous()
        return fields

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        shape = self._logical_shape()
        rows = matrix_shape(shape)[0]
        return {
            "_rowwise_data": (0, shape[0], 1),
            "_rowwise_scale_inv": (0, rows, 128),
            "_columnwise_data": (1, rows // self._ELEMENT.group, 1),
            "_columnwise_scale_inv": (1, cdiv(rows, MX_BLOCK), 4),
        }

    def _along_matrix(self) -> dict[str, tuple[Along, Along]] | None:
        if self._with_gemm_swizzled_scales:
            return None
        group = self._ELEMENT.group
        return {
            "_rowwise_data": ((0, 1), (1, group)),
            "_rowwise_scale_inv": ((0, 1), (1, MX_BLOCK)),
            "_columnwise_data": ((1, group), (0, 1)),
            "_columnwise_scale_inv": ((1, MX_BLOCK), (0, 1)),
        }
