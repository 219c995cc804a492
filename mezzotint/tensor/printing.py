"""The text of quantized tensors: they print the values that they stand for, as torch prints them, and their format.

Values are read only if that is possible: not of fake tensors (the compiler logs what it traces), not on the meta
device, not while a CUDA graph is captured, and not after FSDP2 has freed them.
"""

from collections.abc import Iterable
from typing import Any

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import is_bare


def described(storage: Any) -> str:
    """Return shape, dtype and device, then the format's options and the directions that are held, as text."""
    held = [name for name, is_held in storage.get_usages().items() if is_held]
    if not held and not isinstance(storage, torch.Tensor):
        return f"dtype={storage._dtype}, no data"
    fields = {"shape": tuple(storage.shape), "dtype": storage.dtype, "device": f"'{storage.device}'"}
    return ", ".join([*_listed(fields), *_options(storage), f"usage={'+'.join(held) or 'none'}"])


def _listed(fields: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in fields.items()]


def _options(storage: Any) -> list[str]:
    """Return what the bytes are: element type, options that are not the default, formats of a quantizer made of two."""
    found = {}
    for attribute, name, default in storage._VALUES:
        value = getattr(storage, attribute)
        if isinstance(value, DType):
            found[name] = element_name(value)
        elif name != "quantizer" and value != default:
            found[name] = value
    return _listed({**found, **_parts(storage)})


def _parts(storage: Any) -> dict[str, str]:
    parts = None if storage._quantizer is None else storage._quantizer._parts()
    named = zip(("rowwise", "columnwise"), parts or (), strict=False)
    return {direction: type(part).__name__ for direction, part in named if part is not None}


def element_name(dtype: DType) -> str:
    """Return the name of an element type, such as E4M3, E5M2 or E2M1."""
    return dtype.name[-4:]


def printed(tensor: Any) -> str:
    """Return the whole text of a tensor."""
    start = f"{type(tensor).__name__}("
    ends = [tensor._described()]
    if tensor.grad_fn is not None:
        ends.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        ends.append("requires_grad=True")
    text = f"{start}{_values(tensor, len(start))}, {', '.join(ends)})"
    return f"Parameter containing:\n{text}" if isinstance(tensor, torch.nn.Parameter) else text


def _values(tensor: Any, indent: int) -> str:
    if not all(_is_readable(buffer) for _, buffer in tensor._buffers()):
        return "..."
    try:
        with torch.no_grad():
            dense = tensor.dequantize()
    except (RuntimeError, ValueError):  # printing must not fail: a direction may have no values alone
        return "..."
    return torch._tensor_str._tensor_str(dense, indent)  # private; the same in torch 2.11 and 2.13


def _is_readable(buffer: torch.Tensor) -> bool:
    if not is_bare(buffer) or (buffer.numel() > 0 and buffer.untyped_storage().nbytes() == 0):
        return False
    return not (buffer.is_cuda and torch.cuda.is_current_stream_capturing())


def formats_of(parameters: Iterable[torch.Tensor]) -> str:
    """Return the formats of the parameters that are quantized, for a module's `extra_repr`; "" if none is."""
    found: dict[str, None] = {}
    for parameter in parameters:
        local: Any = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
        if hasattr(local, "_plain_values"):
            found[_format(local)] = None
    return f", quantized_weights={' + '.join(found)}" if found else ""


def _format(tensor: Any) -> str:
    """Return the class and what tells it from others: element type, formats of two directions, or quantizer."""
    known = [element_name(value) for value in tensor._plain_values().values() if isinstance(value, DType)]
    known = known or list(_parts(tensor).values()) or [type(tensor._quantizer).__name__]
    return f"{type(tensor).__name__}({', '.join(known)})"
