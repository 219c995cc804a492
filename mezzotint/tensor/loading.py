"""Checks of quantized tensors that are read from a file, done before a kernel reads them, because kernels trust sizes.

Buffers must fit the tensor's shape twice: by its own plain values, which say how it is read, and by its quantizer,
which says how it is written again. Tensors that are made in this program fit by construction and are not checked.
"""

from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def check_header(name: str, shape: Any, dtype: Any, buffers: Any) -> None:
    """Raise ValueError unless shape, dtype and buffers can be those of a tensor (of class `name`) that will be made."""
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} has shape {shape!r}: {_DAMAGED}")
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"{name} has the nominal dtype {dtype!r}: {_DAMAGED}")
    if not isinstance(buffers, dict) or not all(type(b) in (torch.Tensor, type(None)) for b in buffers.values()):
        raise ValueError(f"{name} has buffers that are no plain tensors: {_DAMAGED}")


def check_loaded(made: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a storage or tensor that was made from a file fits this logical shape."""
    name, held = type(made).__name__, dict(made._buffers())
    if len({buffer.device for buffer in held.values()}) > 1:
        raise ValueError(f"{name} has buffers on several devices: {_DAMAGED}")
    quantizer = made._quantizer
    if quantizer is not None:
        _check_quantizer(name, quantizer)
    if not held:
        return
    for specs in made._layouts(shape):
        _check_fit(name, shape, held, specs, made._ROWWISE, made._COLUMNWISE)
    if tuple(made.shape) != shape:
        raise ValueError(f"{name} says shape {shape}, its buffers {tuple(made.shape)}: {_DAMAGED}")


def layouts_by(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Specs]:
    """Return the buffers, in both directions, that the quantizer makes of a tensor of this shape, for each dtype that
    its source may have had. The list is empty if the quantizer does not tell."""
    if quantizer is None or quantizer.is_custom():
        return []
    both = quantizer.with_usage(rowwise=True, columnwise=True)
    try:
        return [both.for_dtype(each).inner_tensor_specs(shape) for each in (dtype, *HIGH_PRECISION)]
    except NotImplementedError:  # a user's own quantizer, which does not tell
        return []


def _check_fit(
    name: str, shape: tuple[int, ...], held: dict[str, torch.Tensor], specs: list[Specs], *directions: tuple[str, ...]
) -> None:
    found = {attribute: (tuple(buffer.shape), buffer.dtype) for attribute, buffer in held.items()}
    if specs and not any(found.items() <= each.items() for each in specs):
        attribute, (size, dtype) = next((a, f) for a, f in found.items() if specs[0].get(a) != f)
        wanted = "no such buffer" if attribute not in specs[0] else "{1} {0}".format(*specs[0][attribute])
        raise ValueError(f"{name} of shape {shape} has {dtype} {size} for {attribute}, not {wanted}: {_DAMAGED}")
    for attributes in directions if specs else ():
        missing = [each for each in attributes if each in specs[0] and each not in held]
        if attributes[0] in held and missing:
            raise ValueError(f"{name} of shape {shape} has no {', '.join(missing)}: {_DAMAGED}")


def _check_quantizer(name: str, quantizer: Any) -> None:
    """Raise ValueError unless it is a quantizer, none of whose methods a file has replaced."""
    if not hasattr(type(quantizer), "inner_tensor_specs"):
        raise ValueError(f"{name} has a quantizer that is {type(quantizer).__name__}: {_DAMAGED}")
    for attribute, value in vars(quantizer).items():
        if callable(getattr(type(quantizer), attribute, None)):
            raise ValueError(f"{name} has a quantizer with a {attribute} of its own: {_DAMAGED}")
        if hasattr(type(value), "inner_tensor_specs"):
            _check_quantizer(name, value)


_DAMAGED = "the file is damaged, or was changed; load another"
