"""Shared code of the formats that hold each direction on its own: data and scales of the row-wise copy, which is
quantized along the rows, and of the column-wise copy, which is quantized along the columns."""

from typing import Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.tensor.storage import QuantizedTensorStorage


class TwoDirectionStorage(QuantizedTensorStorage):
    """This storage holds codes and scales of each direction: `_rowwise_data` and `_rowwise_scale_inv`,
    `_columnwise_data` and `_columnwise_scale_inv`."""

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("_rowwise_data", "rowwise_data"),
        ("_rowwise_scale_inv", "rowwise_scale_inv"),
        ("_columnwise_data", "columnwise_data"),
        ("_columnwise_scale_inv", "columnwise_scale_inv"),
    )
    _ROWWISE: ClassVar[tuple[str, ...]] = ("_rowwise_data", "_rowwise_scale_inv")
    _COLUMNWISE: ClassVar[tuple[str, ...]] = ("_columnwise_data", "_columnwise_scale_inv")
    _COPIES_ROWS: ClassVar[bool] = True
    _TRANSPOSED: ClassVar[bool] = True  # whether the column-wise data has the last dimension first

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: DType

    def _logical_shape(self) -> tuple[int, ...]:
        if self._rowwise_data is not None:
            return tuple(self._rowwise_data.shape)
        assert self._columnwise_data is not None, "a storage without data has no shape"
        shape = self._columnwise_data.shape
        return (*shape[1:], shape[0]) if self._TRANSPOSED else tuple(shape)

    def _side(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the scales of one direction; raise ValueError if it is not held."""
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale_inv = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        if data is None or scale_inv is None or len(self._ROWWISE) > 2:  # some formats hold an amax, too
            self._require(columnwise)
        assert data is not None
        assert scale_inv is not None
        return data, scale_inv

    def _any_side(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return codes, scales and whether they are column-wise, which they are if no row-wise copy is held."""
        columnwise = not self._holds(self._ROWWISE)
        return (*self._side(columnwise), columnwise)

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        if not shape or shape[-1] != self.shape[-1]:
            return None
        columns = (shape[-1], *shape[:-1]) if self._TRANSPOSED else shape
        return {
            "rowwise_data": None if self._rowwise_data is None else self._rowwise_data.view(shape),
            "columnwise_data": None if self._columnwise_data is None else self._columnwise_data.view(columns),
        }


def matrix_rows(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """Return rows start..stop of the first dimension of a tensor of this shape as rows of the 2-D view (M, K)."""
    per = 1
    for size in shape[1:-1]:
        per *= size
    return start * per, stop * per


def taken(data: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return these rows of the codes `data` (M, …), M at least 1; -1 is a row of zeros, whose code is 0 in every
    format."""
    return data.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0)


def cuts_blocks(start: int, stop: int, rows: int, block: int) -> bool:
    """Return whether rows start..stop, out of `rows`, begin or end inside a block of `block` rows."""
    return start % block != 0 or (stop % block != 0 and stop != rows)
