"""QuantizerLike: what storages, and the functions that quantize, ask of a quantizer. `quantizer.py` stands on both, so
they know it by this alone."""

from typing import Any, Protocol

import torch

from mezzotint.tensor.quantize_call import QuantizeCall


class QuantizerLike(Protocol):
    """The part of a `Quantizer` that is asked for below it."""

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    def call_for(self, dtype: torch.dtype) -> QuantizeCall | None:
        """Return what is done to tensors of a dtype, or None for a quantizer that is no leaf."""

    def takes_scale(self) -> bool:
        """Return whether the scale comes with each call."""

    def is_custom(self) -> bool:
        """Return whether it brings its own `quantize` and `qgemm`."""

    def get_usages(self) -> dict[str, bool]:
        """Return which directions it makes."""

    def derives_columnwise(self) -> bool:
        """Return whether the column-wise copy follows from the row-wise one, bit for bit."""

    def copy(self) -> Any:
        """Return an equal one."""

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Any:
        """Return a copy with other directions."""

    def quantize(self, tensor: torch.Tensor) -> Any:
        """Return the tensor, quantized."""

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize into the buffers of `dst`."""

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the plain values of its storages."""

    def _parts(self) -> tuple[Any, Any, Any] | None: ...

    def _in_place_op(self) -> Any: ...

    def _buffer_names(self) -> tuple[str, ...]: ...

    def _targets(self) -> tuple[tuple[str, ...], tuple[str, ...], str]: ...

    def _holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]: ...

    def _is_constant(self) -> bool: ...

    def _is_value(self) -> bool: ...

    def _layout(self) -> tuple[Any, ...]: ...
