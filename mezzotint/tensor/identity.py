"""Identity: this quantizer keeps high precision, so that a recipe can leave a role unquantized."""

from collections.abc import Iterable
from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.kernels._lib import Buffers, as_matrix
from mezzotint.kernels.identity import identity_buffers, identity_quantize, identity_quantize_
from mezzotint.kernels.operand import Operand
from mezzotint.tensor.checks import check_choice
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import Along, QuantizedTensorStorage


class IdentityTensorStorage(QuantizedTensorStorage):
    """This storage holds one high-precision buffer that serves both directions.

    Args:
        *args: The buffers and values, in the order in which they are named below.
        fake_dtype: The nominal dtype, which is that of the values when they are dequantized. None means torch.float32.
        **fields: The same by name: `hp_data`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.IdentityQuantizer()
        >>> quantizer.internal = True  # bare storages instead of tensors
        >>> x = quantizer(torch.randn(128, 128))
        >>> isinstance(x, mz.IdentityTensorStorage), isinstance(x, torch.Tensor)
        (True, False)
    """

    _FLATTEN_TENSOR_BUFFERS = (("_hp_data", "hp_data"),)
    _VALUES = (("_quantizer", "quantizer", None),)
    _ROWWISE = ("_hp_data",)
    _COLUMNWISE = ("_hp_data",)

    _hp_data: torch.Tensor

    def _plain_quantizer(self) -> Quantizer:
        return IdentityQuantizer()

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self._hp_data.shape)

    def get_usages(self) -> dict[str, bool]:
        """Return the directions that were asked for; the one buffer can serve both."""
        held = super().get_usages()
        asked = held if self._quantizer is None else self._quantizer.get_usages()
        return {usage: held[usage] and asked[usage] for usage in held}

    def _derive(self, rowwise: bool, columnwise: bool) -> None:
        """Do nothing: the one buffer serves both directions already."""

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self._hp_data.to(dtype, copy=True)

    def gemm_operand(self, columnwise: bool) -> Operand:
        matrix = as_matrix(self._hp_data)
        return Operand(matrix.t() if columnwise else matrix, None, kind="high")

    def _view(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        return {"hp_data": self._hp_data.view(shape)}

    def _rows(self, start: int, stop: int) -> dict[str, Any] | None:
        return {"hp_data": self._hp_data[start:stop]}

    def _along_rows(self) -> dict[str, tuple[int, int, int]]:
        return {"_hp_data": (0, self._hp_data.shape[0], 1)}

    def _along_matrix(self) -> dict[str, tuple[Along, Along]]:
        return {"_hp_data": ((0, 1), (1, 1))}


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """An identity tensor has the interface of a quantized tensor, and holds high precision.

    A quantizer makes it. It can be used wherever a tensor can: operations that do not know its format compute with the
    values that it stands for.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: `hp_data`, `quantizer`.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.IdentityQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.IdentityTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """


class IdentityQuantizer(Quantizer):
    """This quantizer leaves values as they are: it returns a copy of a tensor, which stands where a quantized one is
    expected.

    Args:
        dtype: The dtype to which the copy is cast, or None (the default) for that of the tensor.
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies. The default is
            True.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies. The default
            is True.

    Raises:
        ValueError: If `dtype` is neither None nor float32, float16 or bfloat16.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.IdentityQuantizer()(torch.randn(128, 128))
        >>> isinstance(x, mz.IdentityTensor), x.shape, x.dtype
        (True, torch.Size([128, 128]), torch.float32)
        >>> x.dequantize().shape
        torch.Size([128, 128])
    """

    _by_value = True

    dtype_name: str | None

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype that tensors are cast to, or None. Its name is kept, since a dtype is no plain value."""
        return None if self.dtype_name is None else getattr(torch, self.dtype_name)

    @dtype.setter
    def dtype(self, dtype: torch.dtype | None) -> None:
        dtype = check_choice("dtype", dtype, (None, *HIGH_PRECISION))
        self.dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")

    def _plan(self) -> tuple[Any, ...]:
        return identity_quantize, (), (self.dtype,)

    def _in_place_op(self) -> Any:
        return identity_quantize_

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return identity_buffers(shape, self.dtype)

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        return IdentityTensorStorage, IdentityTensor

    def for_dtype(self, dtype: torch.dtype) -> Quantizer:
        if self.dtype is not None:
            return self
        made: Any = self.copy()
        made.dtype = dtype
        return made

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        return tuple(shape)

    def is_requantization_safe(self) -> bool:
        return True

    def gather_multiple(self, columnwise: bool) -> int | None:
        return 1

    def derives_columnwise(self) -> bool:
        return True
