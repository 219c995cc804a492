"""QuantizerLike: this protocol says what storages, and the functions that quantize, need of a quantizer. `quantizer.py`
imports both, so they cannot import it and know it by this protocol alone."""

from typing import Any, Protocol

import torch

from mezzotint.tensor.quantize_call import QuantizeCall


class QuantizerLike(Protocol):
    """This protocol is the part of `Quantizer` that the modules below it use."""

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    unpacked: int
    optimize_for_gemm: bool

    def call_for(self, dtype: torch.dtype) -> QuantizeCall | None:
        """Return the call that quantizes tensors of a dtype; None if the quantizer holds tensors or is made of two."""

    def takes_scale(self) -> bool:
        """Return whether the scale is passed with each call."""

    def is_custom(self) -> bool:
        """Return whether the quantizer brings its own `quantize` and `qgemm`."""

    def get_usages(self) -> dict[str, bool]:
        """Return which directions the quantizer makes."""

    def derives_columnwise(self) -> bool:
        """Return whether the column-wise copy can be made from the row-wise one, bit for bit."""

    def copy(self) -> Any:
        """Return a quantizer with the same attributes."""

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Any:
        """Return a copy that makes other directions; None leaves a direction as it is."""

    def quantize(self, tensor: torch.Tensor) -> Any:
        """Return the tensor, quantized."""

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `src` into the buffers of `dst`."""

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the plain values that the quantizer's storages are constructed with."""

    def _parts(self) -> tuple[Any, Any, Any] | None: ...

    def _in_place_op(self) -> Any: ...

    def _buffer_names(self) -> tuple[str, ...]: ...

    def _targets(self) -> tuple[tuple[str, ...], tuple[str, ...], str]: ...

    def _holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]: ...

    def _is_constant(self) -> bool: ...

    def _is_value(self) -> bool: ...

    def _layout(self) -> tuple[Any, ...]: ...
