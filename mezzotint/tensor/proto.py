"""TensorProto: this class stands for a tensor without data. From shape, dtype and quantizer follows every buffer that
the tensor would have.

The buffers come from the quantizer's geometry, which the fake kernels and the real allocation use as well, so a
prototype cannot drift from the tensor that it stands for. `create_tensor` is Python alone, so it can be traced whole.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.tensor.flatten import class_by_name, qualified_name
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage


@dataclass
class TensorProto:
    """A `TensorProto` stands for a plain tensor, or a quantized one if it has a quantizer, without memory: it says
    which buffers the tensor would have.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype.
        quantizer: The quantizer, of which a copy is kept, or None (the default) for a plain tensor.
        requires_grad: Whether the tensor would require a gradient. The default is False.
        device: The device, or None for PyTorch's default.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> proto = mz.TensorProto((32, 64), torch.bfloat16, mz.MXFP8Quantizer(columnwise=False))
        >>> proto.is_quantized, proto.num_bytes() < 32 * 64 * 2
        (True, True)
        >>> isinstance(proto.create_tensor(), mz.MXFP8Tensor)
        True
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        if self.quantizer is not None:
            self.quantizer = self.quantizer.copy()

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    def update_usage(self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Set which directions the tensor would hold; None leaves a direction as it is."""
        if self.quantizer is None:
            raise ValueError("this TensorProto has no quantizer, so it has no usages: give quantizer=")
        self.quantizer = self.quantizer.with_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)

    def inner_names(self) -> tuple[str, ...]:
        """Return the buffer attributes in the storage's order; a plain tensor has one, "data", which is itself."""
        return ("data",) if self.quantizer is None else tuple(self.quantizer.inner_tensor_specs(self.shape))

    def create_metadata(self) -> dict[str, Any]:
        """Return the context that `__tensor_unflatten__` takes."""
        if self.quantizer is None:
            return {"dtype": self.dtype}
        return self.quantizer.create_metadata(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)

    def create_inner_tensors(self) -> list[torch.Tensor]:
        """Return uninitialised buffers, in the order of `inner_names`."""
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        return list(self.quantizer.for_dtype(self.dtype).alloc_tensors(self.shape, device=self.device).values())

    def assemble(self, inner_tensors: Any) -> Any:
        """Return the tensor that is made of these buffers, given in the order of `inner_names`."""
        if self.quantizer is None:
            (tensor,) = inner_tensors
            return tensor
        names = self.inner_names()
        if len(names) != len(inner_tensors):
            raise ValueError(f"inner_tensors has {len(inner_tensors)} tensors, this proto has {len(names)}: {names}")
        return self.quantizer._built(dict(zip(names, inner_tensors, strict=True)), self.shape, self.dtype)

    def create_tensor(self) -> Any:
        """Return the uninitialised tensor: plain, quantized, or a storage if the quantizer is internal."""
        made = self.assemble(self.create_inner_tensors())
        internal = self.quantizer is not None and self.quantizer.internal
        return made.requires_grad_(True) if self.requires_grad and not internal else made

    def num_bytes(self) -> int:
        """Return the number of bytes of all buffers."""
        if self.quantizer is None:
            buffers = [(self.shape, self.dtype)]
        else:
            buffers = list(self.quantizer.for_dtype(self.dtype).inner_tensor_specs(self.shape).values())
        return sum(_numel(shape) * dtype.itemsize for shape, dtype in buffers)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def to_tensor_proto(tensor: Any) -> TensorProto:
    """Return the prototype of a plain tensor, a storage or a quantized tensor.

    Args:
        tensor: The tensor or storage.

    Returns:
        A `TensorProto`.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is a quantized tensor without a quantizer.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.to_tensor_proto(mz.MXFP8Quantizer()(torch.randn(32, 64))).shape
        (32, 64)
    """
    if not isinstance(tensor, torch.Tensor | QuantizedTensorStorage):
        raise TypeError(f"tensor is {type(tensor).__name__}: give a torch.Tensor or a QuantizedTensorStorage")
    if not isinstance(tensor, QuantizedTensorStorage):
        return TensorProto(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            quantizer=None,
            requires_grad=tensor.requires_grad,
            device=tensor.device,
        )
    if tensor._quantizer is None:
        raise ValueError(f"tensor is {type(tensor).__name__} without a quantizer: update_quantizer(q) first")
    usages = _usages(tensor)
    quantizer = tensor._quantizer.with_usage(rowwise=usages["rowwise"], columnwise=usages["columnwise"])
    is_tensor = isinstance(tensor, torch.Tensor)
    if quantizer.internal == is_tensor:
        quantizer = quantizer._with_internal(not is_tensor)
    return TensorProto(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        quantizer=quantizer,
        requires_grad=isinstance(tensor, torch.Tensor) and tensor.requires_grad,
        device=tensor.device,
    )


def _usages(tensor: Any) -> dict[str, bool]:
    """Return the result of `get_usages`, for a tensor by way of a storage with the same buffers: the compiler reads
    attributes of a tensor subclass, and does not call its methods."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.get_usages()
    cls: Any = class_by_name(qualified_name(type(tensor)))
    cls, held = cls._STORAGE, tensor.detach()
    fields = {kwarg: getattr(held, attribute) for attribute, kwarg in cls._FLATTEN_TENSOR_BUFFERS}
    fields.update({kwarg: getattr(held, attribute) for attribute, kwarg, _ in cls._VALUES if kwarg != "quantizer"})
    fields["quantizer"] = tensor._quantizer  # type: ignore[attr-defined]
    return cls._build(tensor.shape, tensor.dtype, fields).get_usages()
