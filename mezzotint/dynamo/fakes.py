"""Forward and backward on prototypes: these functions say, without data, what each returns and what forward saves.

    (y,), amaxes, saved = fake_linear_forward(args)      LinearFwdArgs with TensorProtos in the place of tensors
    (dx, dw, db), amaxes = fake_linear_backward(saved, dy)

A core (`functional/autograd.py`) has the forward and backward functions of an operation. These very functions run, on
fake tensors that are made from the prototypes, so there is no second definition that could drift from the first.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzotint.functional.autograd import Core
from mezzotint.functional.linear import LINEAR
from mezzotint.tensor.proto import TensorProto, to_tensor_proto
from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = ["as_protos", "fake_backward", "fake_forward", "fake_linear_backward", "fake_linear_forward"]


def fake_forward(core: Core, args: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Return outputs, extras and the arguments of backward, as prototypes, for arguments of a core with prototypes."""
    with FakeTensorMode(), torch.no_grad():
        made_args = _as_tensors(args)
        y, made = core.forward(made_args)
        outputs, extras = core.outputs(made_args, y, made)
        return as_protos((outputs, extras, core.setup(made_args, made)))


def fake_backward(core: Core, saved: Any, *grads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return prototypes of the gradients, in the order of `core.diff`, and of the amaxes.

    `saved` is what `fake_forward` returned last; `grads` are prototypes of the outputs' gradients.
    """
    with FakeTensorMode(), torch.no_grad():
        return as_protos(core.backward(_as_tensors(saved), *_as_tensors(grads)))


fake_linear_forward = partial(fake_forward, LINEAR)
fake_linear_backward = partial(fake_backward, LINEAR)


def as_protos(value: Any) -> Any:
    """Return `value` (arguments, tuples or one tensor) with a prototype in the place of each tensor and storage."""
    return _mapped(value, (torch.Tensor, QuantizedTensorStorage), to_tensor_proto)


def _as_tensors(value: Any) -> Any:
    return _mapped(value, TensorProto, TensorProto.create_tensor)


def _mapped(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy in which each `kind` is changed, in tuples and in the fields of argument objects."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple([_mapped(item, kind, change) for item in value])
    # Frozen dataclasses hold plain values: quantizers, numerics, how ranks share a weight.
    if not is_dataclass(value) or isinstance(value, type) or type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return value
    made = copy.copy(value)
    for field in fields(value):
        setattr(made, field.name, _mapped(getattr(value, field.name), kind, change))
    return made
