"""NVFP4: in this format 16 E2M1 elements share one E4M3 scale, under an amax of the whole tensor."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from mezzotint.constants import NVFP4_BLOCK, DType, cdiv
from mezzotint.kernels._lib import Buffers, as_matrix, matrix_shape, padded
from mezzotint.kernels.elements import pack_fp4, unpack_fp4
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK
from mezzotint.kernels.nvfp4 import (
    MAE,
    MSE,
    nvfp4_amax,
    nvfp4_buffers,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_quantize_,
    nvfp4_scale_shape,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice, check_reduction
from mezzotint.tensor.directions import TwoDirectionStorage, cuts_blocks, matrix_rows
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class NVFP4TensorStorage(TwoDirectionStorage):
    """This storage holds packed codes (…, K/2) and packed transposed codes (K, M/2), and for each direction E4M3 scale
    bytes and an FP32 amax.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
            `amax_rowwise`, `amax_columnwise`, `fp4_dtype`, `quantizer`, `with_gemm_swizzled_scales`,
            `row_scaled_nvfp4`, `nvfp4_use_4over6`, `nvfp4_e4m3_max`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.NVFP4Quantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.NVFP4TensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = (
        *TwoDirectionStorage._FLATTEN_TENSOR_BUFFERS,
        ("_amax_rowwise", "amax_rowwise"),
        ("_amax_columnwise", "amax_columnwise"),
    )
    _VALUES = (
        ("_fp4_dtype", "fp4_dtype", DType.kFloat4E2M1),
        ("_quantizer", "quantizer", None),
        ("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
        ("_row_scaled_nvfp4", "row_scaled_nvfp4", False),
        ("_nvfp4_use_4over6", "nvfp4_use_4over6", False),
        ("_nvfp4_e4m3_max", "nvfp4_e4m3_max", 448),
    )
    _ROWWISE = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
    _COLUMNWISE = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")

    _amax_rowwise: torch.Tensor | None
    _amax_columnwise: torch.Tensor | None
    _fp4_dtype: DType
    _with_gemm_swizzled_scales: bool
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int

    # Two codes in a byte do not record an odd size, so a storage keeps the shape that it was made for.
    _made_for: Any = None

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        made = super()._build(shape, dtype, kwargs)
        made._made_for = None if shape is None else tuple(shape)
        return made

    def _logical_shape(self) -> tuple[int, ...]:
        if self._made_for is not None:
            return self._made_for
        if self._rowwise_data is not None:
            return (*self._rowwise_data.shape[:-1], self._rowwise_data.shape[-1] * 2)
        assert self._columnwise_data is not None, "a storage without data has no shape"
        return (self._columnwise_data.shape[1] * 2, self._columnwise_data.shape[0])

    def _plain_quantizer(self) -> Quantizer:
        """Return a quantizer that makes storages of this layout.

        It has the Hadamard transform if the column-wise codes are padded: only the transform pads them, where the rows
        are no whole blocks, and nothing else in a storage says that it was applied.
        """
        rows, data = matrix_shape(self._logical_shape())[0], self._columnwise_data
        padded_rows = data is not None and data.dim() == 2 and data.shape[1] != cdiv(rows, 2)
        padded_rows = padded_rows and not self._row_scaled_nvfp4  # a row-scaled tensor has no transform
        return NVFP4Quantizer(
            self._fp4_dtype,
            with_rht=padded_rows,
            with_post_rht_amax=padded_rows,
            row_scaled_nvfp4=self._row_scaled_nvfp4,
            nvfp4_e4m3_max=self._nvfp4_e4m3_max,
        )

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the row-wise copy, or, without one, the column-wise copy with its Hadamard transform."""
        data, scale_inv, columnwise = self._any_side()
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        amax = self._amax_columnwise if columnwise else self._amax_rowwise
        options = (
            self._nvfp4_e4m3_max,
            self._with_gemm_swizzled_scales,
            columnwise,
            rows if columnwise else cols,
        )
        return nvfp4_dequantize(data, scale_inv, amax, *options, dtype).reshape(shape)

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make the column-wise copy by a transpose of codes and scales; raise ValueError without 16x16 tiles.

        Without tiles the blocks of the two directions differ.
        """
        quantizer: Any = self._quantizer
        if rowwise or quantizer is None or not quantizer.with_2d_quantization or self._with_gemm_swizzled_scales:
            super()._derive(rowwise, columnwise)
        data, scale_inv = self._side(False)
        rows, cols = matrix_shape(self._logical_shape())
        codes = unpack_fp4(data.reshape(rows, -1), cols)
        tiles = scale_inv[: cdiv(rows, NVFP4_BLOCK) * NVFP4_BLOCK : NVFP4_BLOCK, : cdiv(cols, NVFP4_BLOCK)]
        self._columnwise_data = pack_fp4(codes.t().contiguous())
        scales = tiles.t().repeat_interleave(NVFP4_BLOCK, 0)
        self._columnwise_scale_inv = _padded(scales, nvfp4_scale_shape(cols, rows))
        self._amax_columnwise = None if self._amax_rowwise is None else self._amax_rowwise.clone()

    def gemm_operand(self, columnwise: bool) -> Operand:
        data, scale_inv = self._side(columnwise)
        return Operand(
            as_matrix(data),
            scale_inv,
            self._amax_columnwise if columnwise else self._amax_rowwise,
            kind="nv",
            dtype=int(self._fp4_dtype),
            swizzled=self._with_gemm_swizzled_scales,
            e4m3_max=self._nvfp4_e4m3_max,
        )

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        if not shape or shape[-1] != self.shape[-1]:
            return None
        data = self._rowwise_data
        return {"rowwise_data": None if data is None else data.view(*shape[:-1], data.shape[-1])}

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        shape = self._logical_shape()
        rows, cols = matrix_shape(shape)
        first, last = matrix_rows(shape, start, stop)
        quantizer: Any = self._quantizer
        tiled = quantizer is None or quantizer.with_2d_quantization or self._columnwise_data is not None
        if self._with_gemm_swizzled_scales or (tiled and cuts_blocks(first, last, rows, NVFP4_BLOCK)):
            return None
        fields: dict[str, Any] = {}
        if self._rowwise_data is not None and self._rowwise_scale_inv is not None:
            fields["rowwise_data"] = self._rowwise_data[start:stop]
            past = cdiv(last, NVFP4_BLOCK) * NVFP4_BLOCK if tiled else last
            fields["rowwise_scale_inv"] = _padded(
                self._rowwise_scale_inv[first:past], nvfp4_scale_shape(last - first, cols)
            )
            if self._row_scaled_nvfp4 and self._amax_rowwise is not None:
                fields["amax_rowwise"] = self._amax_rowwise[first:last]
        if self._columnwise_data is not None and self._columnwise_scale_inv is not None:
            ends = self._columnwise_data.shape[1] if last == rows else last // 2
            fields["columnwise_data"] = self._columnwise_data[:, first // 2 : ends].contiguous()
            scales = self._columnwise_scale_inv[:, first // NVFP4_BLOCK : cdiv(last, NVFP4_BLOCK)]
            fields["columnwise_scale_inv"] = _padded(scales, nvfp4_scale_shape(cols, last - first))
        return fields

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        shape = self._logical_shape()
        rows = matrix_shape(shape)[0]
        along = {
            "_rowwise_data": (0, shape[0], 1),
            "_rowwise_scale_inv": (0, rows, 128),
            "_columnwise_data": (1, rows // 2, 1),
            "_columnwise_scale_inv": (1, cdiv(rows, NVFP4_BLOCK), 4),
        }
        if self._row_scaled_nvfp4:
            along["_amax_rowwise"] = (0, rows, 1)
        return along

    def _along_matrix(self) -> dict[str, tuple[Along, Along]] | None:
        """Return how rows and columns lie in the buffers. A byte has two codes; an amax is of all elements, or of one
        row or column if the tensor is row-scaled."""
        if self._with_gemm_swizzled_scales:
            return None
        each = (0, 1) if self._row_scaled_nvfp4 else None
        return {
            "_rowwise_data": ((0, 1), (1, 2)),
            "_rowwise_scale_inv": ((0, 1), (1, NVFP4_BLOCK)),
            "_columnwise_data": ((1, 2), (0, 1)),
            "_columnwise_scale_inv": ((1, NVFP4_BLOCK), (0, 1)),
            "_amax_rowwise": (each, None),
            "_amax_columnwise": (None, each),
        }


def _padded(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Fit scales to this shape: pad with zeros if they are too small, cut if a tile's rows run past it."""
    return padded(scales[: shape[0], : shape[1]], *shape).contiguous()


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """An NVFP4 tensor has one E4M3 scale for 16 elements of 4 bits, and an amax.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`,
            `columnwise_scale_inv`, `amax_rowwise`, `amax_columnwise`, `fp4_dtype`, `quantizer`,
            `with_gemm_swizzled_scales`, `row_scaled_nvfp4`, `nvfp4_use_4over6`, `nvfp4_e4m3_max`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.NVFP4Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.NVFP4Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)


class NVFP4Quantizer(Quantizer):
    """An `NVFP4Quantizer` casts to FP4 with one E4M3 scale for each block of 16 elements, or each tile of 16x16, and
    one FP32 scale for the tensor.

    `kernels/nvfp4.py` says what each option does to the numbers.

    Args:
        fp4_dtype: The element type, of which there is only `DType.kFloat4E2M1`.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        with_amax_reduction: It must be False: a quantizer does not reduce amaxes over ranks.
        amax_reduction_group: It must be None, likewise.
        with_rht: Whether the column-wise copy goes through a random Hadamard transform. The default is False.
        with_post_rht_amax: Whether the amax of the column-wise copy is taken after the transform. It must be True with
            `with_rht`. The default is False.
        with_2d_quantization: Whether square tiles of the tensor share a scale, as is usual for weights. The default is
            False.
        stochastic_rounding: Whether values are rounded stochastically, with PyTorch's generator. The default is False.
        row_scaled_nvfp4: Whether each row has an amax of its own. The default is False.
        nvfp4_use_4over6: Whether each block maps its amax to 4 or 6, whichever has the smaller error. The default is
            False.
        nvfp4_e4m3_max: The largest scale of a block, 448 (the default) or 256.
        nvfp4_4over6_err_mode: The error by which a block chooses: "MAE" (mean absolute error, the default) or "MSE"
            (mean squared error).
        with_random_sign_mask: Whether this transform has its random signs. The default is True.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.NVFP4Quantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.NVFP4Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype: DType
    with_rht: bool
    with_post_rht_amax: bool
    with_amax_reduction: bool
    amax_reduction_group: Any
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str
    with_random_sign_mask: bool

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType(check_choice("fp4_dtype", fp4_dtype, (DType.kFloat4E2M1,)))
        self.with_rht = bool(with_rht)
        self.with_post_rht_amax = bool(with_post_rht_amax)
        self.with_amax_reduction = bool(with_amax_reduction)
        self.amax_reduction_group = amax_reduction_group  # unless it is None, quantizing with it raises an error
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.row_scaled_nvfp4 = bool(row_scaled_nvfp4)
        self.nvfp4_use_4over6 = bool(nvfp4_use_4over6)
        self.nvfp4_e4m3_max = int(check_choice("nvfp4_e4m3_max", nvfp4_e4m3_max, (448, 256)))
        self.nvfp4_4over6_err_mode = check_choice("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ("MAE", "MSE"))
        self.with_random_sign_mask = bool(with_random_sign_mask)
        self._check_options()
        check_reduction(with_amax_reduction, amax_reduction_group)

    def _check_options(self) -> None:
        """Raise ValueError for combinations of options that have no meaning."""
        if self.with_rht and not self.with_post_rht_amax:
            raise ValueError(
                "with_rht=True needs with_post_rht_amax=True: the column-wise amax is taken after the transform"
            )
        pairs = (
            ("with_rht", "with_2d_quantization"),
            ("row_scaled_nvfp4", "with_rht"),
            ("row_scaled_nvfp4", "with_2d_quantization"),
            ("row_scaled_nvfp4", "stochastic_rounding"),
            ("row_scaled_nvfp4", "with_amax_reduction"),
            ("nvfp4_use_4over6", "with_rht"),
            ("nvfp4_use_4over6", "stochastic_rounding"),
        )
        for first, second in pairs:
            if getattr(self, first) and getattr(self, second):
                raise ValueError(f"{first}=True and {second}=True do not go together: turn one of them off")

    @property
    def rht_matrix_random_sign_mask_t(self) -> int:
        """Return the signs of the transform as a bit mask, which depends on `with_random_sign_mask` alone."""
        return RANDOM_SIGN_MASK if self.with_random_sign_mask else 0

    def _plan(self) -> tuple[Any, ...]:
        self._refuse_reduction(self.with_amax_reduction, self.amax_reduction_group)
        four_over_six = (MAE if self.nvfp4_4over6_err_mode == "MAE" else MSE) if self.nvfp4_use_4over6 else 0
        options = (
            self.nvfp4_e4m3_max,
            four_over_six,
            self.rht_matrix_random_sign_mask_t,
            self.with_2d_quantization,
            self.optimize_for_gemm,
            self.with_rht,
            self.row_scaled_nvfp4,
            self.rowwise_usage,
            self.columnwise_usage,
        )
        rng = "rng!" if self.stochastic_rounding else "rng"
        return nvfp4_quantize, ("amax_rowwise", "amax_columnwise", rng), options

    def _amax_plan(self, dim: int) -> "tuple[Any, ...] | None":
        """Return the plan for the amaxes that a split along `dim` changes. If each row, or column, has an amax of its
        own, a split between them changes none."""
        rowwise = self.rowwise_usage and not (self.row_scaled_nvfp4 and dim == 0)
        columnwise = self.columnwise_usage and not (self.row_scaled_nvfp4 and dim == 1)
        if not (rowwise or columnwise):
            return None
        names = (*(("amax_rowwise",) if rowwise else ()), *(("amax_columnwise",) if columnwise else ()))
        signs = self.rht_matrix_random_sign_mask_t
        return nvfp4_amax, names, (self.with_rht, signs, self.row_scaled_nvfp4, rowwise, columnwise)

    def _in_place_op(self) -> Any:
        return nvfp4_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return nvfp4_buffers(shape, self.with_rht, self.row_scaled_nvfp4, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return NVFP4TensorStorage, NVFP4Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "with_gemm_swizzled_scales": self.optimize_for_gemm,
            "row_scaled_nvfp4": self.row_scaled_nvfp4,
            "nvfp4_use_4over6": self.nvfp4_use_4over6,
            "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
        }

    def _layout(self) -> tuple[Any, ...]:
        signs = self.rht_matrix_random_sign_mask_t if self.with_rht else 0
        return self.with_rht, signs, self.with_2d_quantization

    @classmethod  # a static method, called on a quantizer, breaks a graph's guards (pytorch/pytorch#182741)
    def convert_shape_for_fp4(cls, shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the packed bytes of a tensor of this shape."""
        size = tuple(shape)
        return (*size[:-1], cdiv(size[-1], 2))

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        rows, cols = matrix_shape(tuple(inp.shape))
        return not self.row_scaled_nvfp4 and rows % NVFP4_BLOCK == 0 and cols % NVFP4_BLOCK == 0

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def gather_multiple(self, columnwise: bool) -> int | None:
        if self.optimize_for_gemm:  # the GEMM's order of scales crosses shards
            return None
        return NVFP4_BLOCK if columnwise or self.with_2d_quantization else 1

    def derives_columnwise(self) -> bool:
        return self.with_2d_quantization and not self.optimize_for_gemm
