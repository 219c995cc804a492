"""FP8 with one scale per tensor: this module has current scaling, whose quantizer is a value, and delayed scaling,
whose quantizer holds the scale and the amax."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers, as_columns, as_matrix
from mezzotint.kernels.float8 import (
    float8_amax,
    float8_buffers,
    float8_dequantize,
    float8_quantize,
    float8_quantize_,
    float8_quantize_scaled,
    float8_quantize_scaled_,
)
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_epsilon, check_fp8_dtype, check_reduction, check_scale
from mezzotint.tensor.directions import taken
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer, assemble
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class Float8TensorStorage(QuantizedTensorStorage):
    """This storage holds `_data` (logical shape), `_transpose` (last dimension first) and `_scale_inv`, FP32 [1].

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `data`, `data_transpose`, `fp8_scale_inv`, `fp8_dtype`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8TensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _FLATTEN_TENSOR_BUFFERS = (
        ("_data", "data"),
        ("_transpose", "data_transpose"),
        ("_scale_inv", "fp8_scale_inv"),
    )
    _VALUES = (("_fp8_dtype", "fp8_dtype", DType.kFloat8E4M3), ("_quantizer", "quantizer", None))
    _ROWWISE = ("_data", "_scale_inv")
    _COLUMNWISE = ("_transpose", "_scale_inv")
    _COPIES_ROWS = True

    _data: torch.Tensor | None
    _transpose: torch.Tensor | None
    _scale_inv: torch.Tensor
    _fp8_dtype: DType

    def _plain_quantizer(self) -> Quantizer:
        return Float8ScaledQuantizer(self._fp8_dtype)

    @property
    def _transpose_invalid(self) -> bool:
        return self._transpose is None

    @classmethod
    def _without_dimensions(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, **{name: _scalar(kwargs.get(name)) for name in ("data", "data_transpose")}}

    def _logical_shape(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        assert self._transpose is not None, "a storage without data has no shape"
        return (*self._transpose.shape[1:], *self._transpose.shape[:1])

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        data = self._transpose if self._data is None else self._data
        if data is None:
            self._require(False)
        elif data.dim() == 0:
            return float8_dequantize(data.reshape(1), self._scale_inv, int(self._fp8_dtype), False, dtype).reshape(())
        return float8_dequantize(data, self._scale_inv, int(self._fp8_dtype), self._data is None, dtype)

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Make the missing direction, which is a byte transpose of the other."""
        if rowwise:
            self._require(True)
            assert self._transpose is not None
            columns = as_columns(self._transpose)
            self._data = columns.t().contiguous().reshape(self._logical_shape())
        else:
            self._require(False)
            assert self._data is not None
            shape = (*self._data.shape[-1:], *self._data.shape[:-1])
            self._transpose = as_matrix(self._data).t().contiguous().reshape(shape)

    def gemm_operand(self, columnwise: bool) -> Operand:
        data = self._transpose if columnwise else self._data
        if data is None or self._scale_inv is None:
            self._require(columnwise)
        assert data is not None
        codes = as_columns(data) if columnwise else as_matrix(data)
        return Operand(codes, self._scale_inv, None, "tensor", int(self._fp8_dtype))

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        if self._transpose is not None and shape[-1:] != tuple(self.shape)[-1:]:
            return None
        return {
            "data": None if self._data is None else self._data.view(shape),
            "data_transpose": None if self._transpose is None else self._transpose.view((*shape[-1:], *shape[:-1])),
        }

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        return {
            "data": None if self._data is None else self._data[start:stop],
            "data_transpose": None if self._transpose is None else self._transpose[:, start:stop].contiguous(),
        }

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        first = self._logical_shape()[0]
        return {"_data": (0, first, 1), "_transpose": (1, first, 1)}

    def _along_matrix(self) -> dict[str, tuple[Along, Along]]:
        return {"_data": ((0, 1), (1, 1)), "_transpose": ((1, 1), (0, 1)), "_scale_inv": (None, None)}

    def _take_rows(self, index: torch.Tensor) -> dict[str, Any] | None:
        return None if self._data is None else {"data": taken(self._data, index), "data_transpose": None}


def _scalar(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.reshape(())


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """An FP8 tensor has one scale for all its elements.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `data`, `data_transpose`, `fp8_scale_inv`, `fp8_dtype`,
            `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    def remove_caches(self) -> None:
        """Drop the transposed copy."""
        self._transpose = None


class Float8CurrentScalingQuantizer(Quantizer):
    """This FP8 quantizer takes one scale from the amax (the largest absolute value) of the tensor at hand (current
    scaling).

    Args:
        fp8_dtype: The element type, `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        device: It is accepted and not used.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.
        use_existing_amax: It is accepted and not used.
        with_amax_reduction: It must be False: a quantizer does not reduce amaxes over ranks.
        amax_reduction_group: It must be None, likewise.
        force_pow_2_scales: Whether the scale is rounded to a power of two. The default is False.
        amax_epsilon: The least amax (largest absolute value) that is assumed. The default is 0.
        scale: It is accepted and not used.
        amax: It is accepted and not used.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)(torch.randn(128, 128))
        >>> isinstance(x, mz.Float8Tensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype: DType
    with_amax_reduction: bool
    amax_reduction_group: Any
    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        check_reduction(with_amax_reduction, amax_reduction_group)
        self.dtype = check_fp8_dtype(fp8_dtype)
        self.with_amax_reduction = bool(with_amax_reduction)
        self.amax_reduction_group = amax_reduction_group  # unless it is None, quantizing with it raises an error
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = check_epsilon(amax_epsilon)

    def _plan(self) -> tuple[Any, ...]:
        self._refuse_reduction(self.with_amax_reduction, self.amax_reduction_group)
        options = (
            int(self.dtype),
            self.force_pow_2_scales,
            self.amax_epsilon,
            self.rowwise_usage,
            self.columnwise_usage,
        )
        return float8_quantize, ("amax",), options

    def _amax_plan(self, dim: int) -> tuple[Any, ...]:
        return float8_amax, ("amax",), ()

    def _in_place_op(self) -> Any:
        return float8_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return float8_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return Float8TensorStorage, Float8Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Return a tensor around codes that exist already; its scale is 1 until it is quantized into."""
        scale_inv = torch.ones(1, dtype=torch.float32, device=data.device)
        return _around(self, data, scale_inv, fake_dtype, requires_grad, internal)

    def is_requantization_safe(self) -> bool:
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return None if columnwise else 1

    def derives_columnwise(self) -> bool:
        return True


class Float8ScaledQuantizer(Quantizer):
    """This FP8 quantizer takes a scale, FP32 [1], with each call. It is a value: a module's forward and backward know
    delayed scaling only by it, since the scale and the amax are kept elsewhere."""

    _by_value = True

    dtype: DType

    def __init__(self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = check_fp8_dtype(fp8_dtype)

    def takes_scale(self) -> bool:
        return True

    def _plan(self) -> tuple[Any, ...]:
        return float8_quantize_scaled, ("scale",), (int(self.dtype), self.rowwise_usage, self.columnwise_usage)

    def _in_place_op(self) -> Any:
        return float8_quantize_scaled_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return float8_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return Float8TensorStorage, Float8Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def is_requantization_safe(self) -> bool:
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return None if columnwise else 1

    def derives_columnwise(self) -> bool:
        return True


class Float8Quantizer(Quantizer):
    """This FP8 quantizer does delayed scaling: it quantizes by a scale that is given, and keeps the running maximum of
    the amaxes that it saw.

    Args:
        scale: The scale, FP32 [1]: values are multiplied by it.
        amax: The running maximum, FP32 [1], which each call updates.
        fp8_dtype: The element type, `DType.kFloat8E4M3` or `DType.kFloat8E5M2`.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.

    Raises:
        ValueError: If an option has a value that the format does not have, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> scale, amax = torch.ones(1), torch.zeros(1)
        >>> x = mz.Float8Quantizer(scale, amax, mz.DType.kFloat8E4M3)(torch.full((16, 16), 3.0))
        >>> isinstance(x, mz.Float8Tensor), torch.equal(amax, torch.tensor([3.0]))
        (True, True)
    """

    scale: torch.Tensor
    amax: torch.Tensor
    dtype: DType

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = check_scale("scale", scale)
        self.amax = check_scale("amax", amax)
        self.dtype = check_fp8_dtype(fp8_dtype)

    def __repr__(self) -> str:
        usages = f"rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage}"
        return f"{type(self).__name__}(dtype={self.dtype!r}, {usages})"

    def _quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return codes by the given scale; the amax of `x` enters the running maximum."""
        options = int(self.dtype), self.rowwise_usage, self.columnwise_usage
        *buffers, amax = float8_quantize_scaled(x, self.scale, *options)
        self._saw(amax)
        return buffers

    def _update(self, src: torch.Tensor, buffers: list[torch.Tensor], noop_flag: torch.Tensor | None) -> None:
        amax = torch.zeros_like(self.amax).view(1)
        options = self.scale, int(self.dtype), self.rowwise_usage, self.columnwise_usage
        float8_quantize_scaled_(src, [*buffers, amax], noop_flag, *options)
        self._saw(amax)

    def _saw(self, amax: torch.Tensor) -> None:
        self.amax.copy_(torch.maximum(self.amax, amax.view(self.amax.shape)))

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return float8_buffers(shape, self.rowwise_usage, self.columnwise_usage)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return Float8TensorStorage, Float8Tensor

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def frozen(self) -> Quantizer:
        made: Any = self.copy()
        made.scale, made.amax = self.scale.clone(), torch.zeros_like(self.amax)
        return made

    def share_amax(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.amax.copy_(largest(self.amax))

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set `amax` to that of `tensor` without quantizing it."""
        self.amax.copy_(float8_amax(tensor).view(self.amax.shape))

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Return a tensor around codes that were made with this scale."""
        scale_inv = torch.ones_like(self.scale).div_(self.scale).view(1)
        return _around(self, data, scale_inv, fake_dtype, requires_grad, internal)

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return None if columnwise else 1

    def derives_columnwise(self) -> bool:
        return True


def _around(
    quantizer: Quantizer,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    fake_dtype: torch.dtype,
    requires_grad: bool,
    internal: bool,
) -> Any:
    if data.dtype.itemsize != 1:
        raise ValueError(f"data has dtype {data.dtype}: give FP8 codes, torch.uint8 or a float8 dtype")
    data = data.view(torch.uint8)
    quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
    made = assemble([data, scale_inv], quantizer, internal, data.shape, fake_dtype)
    return made.requires_grad_(True) if requires_grad and not internal else made
