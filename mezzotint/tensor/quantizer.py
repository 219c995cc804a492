"""Quantizer: the object that says how a tensor becomes buffers. The functions that do it are in `quantize.py`.

A leaf quantizer holds plain values only: `_plan()` returns the op, the names of its tensor arguments and its options,
`_describe_buffers()` says which buffers the op returns, and `_classes()` which classes hold them. A quantizer that
holds tensors (delayed scaling) has no plan and implements `_quantize` and `_update` instead; one that is made of two
(hybrid) implements `_parts()`.

The formats of this package are values, and so are their subclasses: two quantizers are equal if their class and all
their attributes are, and a compiled graph bakes one in as a constant. A user's own quantizer is equal to itself only,
until its class is registered (`register_value_opaque_quantizer`).
"""

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, Flag
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.quantize_ops import COLUMNWISE, ROWWISE, Unpacking, unpacking_of
from mezzotint.tensor.checks import NO_GROUP, check_reduction
from mezzotint.tensor.flatten import flatten_context, qualified_name
from mezzotint.tensor.opaque import SUBCLASSES_COUNT, OpaqueMeta, graph_name
from mezzotint.tensor.quantize import (
    assemble,
    check_directions,
    check_nominal,
    check_quantizable,
    check_quantized_dtype,
    quantize,
    quantize_storage,
    update_quantized,
)
from mezzotint.tensor.quantize_call import QuantizeCall
from mezzotint.tensor.storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from mezzotint.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "Quantizer",
    "assemble",
    "check_quantizable",
    "quantize",
    "quantize_storage",
    "rebuild_quantizer",
    "update_quantized",
]

_PLAIN = (bool, int, float, str, Enum, type(None))


class Quantizer(metaclass=OpaqueMeta):
    """A quantizer makes quantized tensors out of high-precision ones, in one format. Call it with a tensor.

    This is the base class. If the attribute `internal` is set, it makes bare storages instead of tensors; if
    `optimize_for_gemm` is set, it lays scales out as the GEMM (the matrix product) reads them.

    Args:
        rowwise: Whether the copy that is quantized along the rows is made, which forward multiplies.
        columnwise: Whether the copy that is quantized along the columns is made, which backward multiplies.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantizer = mz.MXFP8Quantizer(columnwise=False)
        >>> isinstance(quantizer, mz.Quantizer)
        True
        >>> quantizer(torch.randn(32, 64)).shape
        torch.Size([32, 64])
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    unpacked: int = 0  # directions of which the values are made instead of the codes: see `kernels/quantize_ops.py`

    custom: ClassVar[bool] = False  # it brings its own `quantize` and `qgemm`

    _by_value: ClassVar[bool] = (
        False  # a class sets this, or is registered, or inherits it: then equal attributes make equal quantizers
    )
    _registered_as: ClassVar[str | None] = None  # the class, this or a base, that the compiler knows as a value
    # These attributes are no part of its value; a subclass adds those that its `_rebuild_derived_state` sets.
    _DERIVED: ClassVar[frozenset[str]] = frozenset({"_memo", "_names"})

    _memo: dict[Any, Any] | None
    _names: tuple[str, ...]

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = bool(rowwise)
        self.columnwise_usage = bool(columnwise)
        self.internal = False
        self.optimize_for_gemm = False

    # Format: what a leaf quantizer brings

    def _plan(self) -> "tuple[Any, ...] | None":
        """Return (op, names of its tensor arguments, options), or None for a quantizer that is no leaf."""
        return None

    def call_for(self, dtype: torch.dtype) -> QuantizeCall | None:
        """Return the call that quantizes tensors of this dtype, worked out once; None for one that is no leaf."""
        if not self._is_constant():  # the compiler traces through it, and would guard on the cache
            return self._make_call(dtype)
        memo = self._worked_out()
        if dtype not in memo:
            memo[dtype] = self._make_call(dtype)
        return memo[dtype]

    def _make_call(self, dtype: torch.dtype) -> QuantizeCall | None:
        plan = self.for_dtype(dtype)._plan()
        if plan is None:
            return None
        check_quantized_dtype(dtype, self)
        check_directions(self)
        op, tensors, options = plan
        found = unpacking_of(op) if self.unpacked else None
        if found is not None:
            op, options = found[0], (*options, self.unpacked)
        draws, takes_scale, holder = "rng!" in tensors, self.takes_scale(), None
        if self._is_constant():
            name, kwargs, values = self._holder(True)
            holder = name, kwargs, tuple(values.items())
        alone = None if draws or takes_scale else (*[None] * len(tensors), *options)
        return QuantizeCall(op, tensors, options, takes_scale, alone, holder)

    def unpacking(self) -> Unpacking | None:
        """Return what the format's unpacked directions hold, or None if it has none."""
        plan = self._plan()
        found = None if plan is None else unpacking_of(plan[0])
        return None if found is None else found[1]

    def as_unpacked(self, *, rowwise: bool, columnwise: bool) -> "Quantizer":
        """Return a copy that makes these directions as the values that an emulated product reads. What it makes is an
        operand of products, and nothing else."""
        made = self.copy()
        made.unpacked = ROWWISE * rowwise + COLUMNWISE * columnwise
        return made

    def _amax_plan(self, dim: int) -> "tuple[Any, ...] | None":
        """Return (op, names of the amaxes that it returns, options), or None if there are none to compute.

        These are the amaxes that differ between a shard and the whole when the matrix is split along `dim`, 0 or 1. The
        quantization of a shard must be given those of the whole.
        """
        return None

    def takes_scale(self) -> bool:
        """Return whether the scale is passed with each call, which then also returns the amax of what it quantized."""
        return False

    def is_custom(self) -> bool:
        """Return whether the quantizer brings its own `quantize` and `qgemm`."""
        return self.custom

    def _parts(self) -> "tuple[Quantizer | None, Quantizer | None, Quantizer | None] | None":
        """Return (row-wise part, column-wise part, quantizer that the column-wise part's source goes through first) if
        this quantizer is made of two, else None."""
        return None

    def _in_place_op(self) -> Any:
        """Return the op that quantizes into given buffers."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it quantizes in place")

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        """Return buffer name → (shape, dtype), in the storage's order; the storage's attribute is `_name`."""
        raise NotImplementedError(f"{type(self).__name__} does not describe its buffers")

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        """Return the storage class and the tensor class of this format."""
        raise NotImplementedError(f"{type(self).__name__} does not say which classes hold its buffers")

    def _holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        """Return where the op's buffers go: the class's name, its constructor kwargs for them, its plain values."""
        if not self._is_constant():  # for the reason given in `call_for`
            return self._find_holder(internal)
        memo = self._worked_out()
        if internal not in memo:
            memo[internal] = self._find_holder(internal)
        return memo[internal]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        held = self.__dict__
        names = held.get("_names", ())
        if name not in names and name in held:  # a property is not in `__dict__`
            held["_names"] = (*names, name)
        held["_memo"] = None  # it was worked out from the old values

    def _worked_out(self) -> dict[Any, Any]:
        """Return the cache for what follows from the attributes; it is emptied when any of them is assigned."""
        memo = self.__dict__.get("_memo")
        if memo is None:
            memo = self.__dict__["_memo"] = {}
        return memo

    def _find_holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        storage, tensor = self._classes()
        kwarg = dict(storage._FLATTEN_TENSOR_BUFFERS)
        names = self._buffer_names()
        self._check_declared(names)
        kwargs, values = tuple(kwarg[f"_{name}"] for name in names), self.storage_metadata()
        storage._check_fields(values)
        return qualified_name(storage if internal else tensor), kwargs, values

    def _check_declared(self, names: Iterable[str]) -> list[str]:
        """Return the attributes that the storage declares; raise ValueError if it does not declare one of `names`."""
        storage, _ = self._classes()
        declared = [attribute for attribute, _ in storage._FLATTEN_TENSOR_BUFFERS]
        for name in names:
            if f"_{name}" not in declared:
                raise ValueError(
                    f"{type(self).__name__} describes the buffer {name!r}, which {storage.__name__} does not declare; "
                    f"it declares {declared}: add it to _FLATTEN_TENSOR_BUFFERS"
                )
        return declared

    def _buffer_names(self) -> tuple[str, ...]:
        """Return the names of the buffers of this quantizer's directions, in order."""
        return tuple(self._describe_buffers((1, 1)))

    def _targets(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Return what is written into: row-wise attributes, column-wise ones, the name of the storage class."""
        storage, _ = self._classes()
        return storage._ROWWISE, storage._COLUMNWISE, qualified_name(storage)

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the plain values that a storage is constructed with, besides buffers and quantizer."""
        return {}

    def _layout(self) -> tuple[Any, ...]:
        """Return what the meaning of the bytes depends on and a storage does not record. Bytes may be copied between
        two tensors only if this is equal."""
        return ()

    # Values

    def _is_value(self) -> bool:
        """Return whether quantizers with the same attributes are equal; if not, each is equal to itself only."""
        return self._by_value

    def _is_constant(self) -> bool:
        """Return whether the compiler takes this as a constant. As a method's result, the answer is one as well."""
        if self._registered_as is None or not self._is_value():
            return False
        return SUBCLASSES_COUNT or self._registered_as == qualified_name(type(self))

    def _fields(self) -> dict[str, Any]:
        """Return attribute → value for all that the quantizer holds, but for what is derived."""
        return {name: value for name, value in self.__dict__.items() if name not in self._DERIVED}

    def _value_fields(self) -> dict[str, Any]:
        """Return attribute → plain value for everything that decides what this quantizer does."""
        return self._fields()

    def _value_key(self) -> tuple[Any, ...]:
        """Return what `==`, `hash` and the graph's repr go by; raise TypeError for a process group or other object."""
        memo = self._worked_out()
        key = memo.get("key")
        if key is None:
            key = (type(self), *sorted(self._checked_fields().items()))
            memo["key"] = key
        return key

    def _checked_fields(self) -> dict[str, Any]:
        """Return the value fields; raise TypeError unless all of them are plain, or quantizers that are values."""
        fields = self._value_fields()
        for name, value in fields.items():
            if isinstance(value, Quantizer):
                if not value._is_value():
                    raise TypeError(
                        f"{type(self).__name__}.{name} is {type(value).__name__}, which is equal to itself only, so "
                        f"that {type(self).__name__} is no value: use a quantizer without tensors, or register its "
                        "class with register_value_opaque_quantizer"
                    )
                value._value_key()
            elif not isinstance(value, _PLAIN):
                raise TypeError(
                    f"{type(self).__name__}.{name} is {type(value).__name__}: a quantizer is a value of plain ints, "
                    "bools, floats, strings and enums. A process group baked into a graph, or left out of the key, "
                    f"would silently skip a reduction: {NO_GROUP}. What follows from other attributes is named in "
                    "_DERIVED, and _rebuild_derived_state sets it"
                )
        return fields

    def _refuse_reduction(self, is_asked: bool, group: Any) -> None:
        """Raise an error if a reduction is asked for or a group is given: nothing here reduces, nor may that go
        unseen."""
        check_reduction(is_asked, group)
        if group is not None:
            self._value_key()
            raise TypeError(f"amax_reduction_group is {group!r}: {NO_GROUP}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not self._is_value():
            return True if self is other else NotImplemented
        key = self._value_key()  # also for `other is self`: a process group must not pass
        return self is other or key == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key()) if self._is_value() else object.__hash__(self)

    def _snapshot(self) -> "Quantizer":
        """Return an equal quantizer that nobody assigns to: a graph bakes it in, and its guards compare with it."""
        memo = self._worked_out()
        if "snapshot" not in memo:
            memo["snapshot"] = self.copy()
        return memo["snapshot"]

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return a string that evaluates to an equal quantizer, and the names that it needs."""
        cls = type(self)
        fields: list[str] = []
        names: dict[str, type] = {graph_name(cls): cls}
        for name, value in sorted(self._checked_fields().items()):
            if isinstance(value, Enum):
                kind = graph_name(type(value))
                names[kind] = type(value)
                # A flag may combine members: "A|B" is the name of none, so it is written by number.
                member = f"({value.value!r})" if isinstance(value, Flag) else f"[{value.name!r}]"
                fields.append(f"{name}={kind}{member}")
            elif isinstance(value, Quantizer):
                text, needed = value.__fx_repr__()
                names.update(needed)
                fields.append(f"{name}={text}")
            elif isinstance(value, float):
                names["float"] = float
                fields.append(f"{name}=float.fromhex({value.hex()!r})")
            else:
                fields.append(f"{name}={value!r}")
        return f"{graph_name(cls)}._from_value({', '.join(fields)})", names

    @classmethod
    def _from_value(cls, **fields: Any) -> "Quantizer":
        """Return the quantizer with these attributes, made without its constructor."""
        quantizer = cls.__new__(cls)
        for name, value in fields.items():
            setattr(quantizer, name, value)
        quantizer._rebuild_derived_state()
        return quantizer

    def _rebuild_derived_state(self) -> None:
        """Set the attributes of `_DERIVED` from all others; this is called after a copy has been made."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._fields().items())})"

    def __reduce__(self) -> Any:
        name = qualified_name(type(self))
        if _QUANTIZERS.get(name) is not type(self):
            raise pickle.PicklingError(
                f"another class is called {name!r} by now: an unpickled quantizer would be of it"
            )
        fields = self._fields()
        dtypes = tuple(k for k, v in fields.items() if isinstance(v, DType))
        return rebuild_quantizer, (name, {k: int(v) if k in dtypes else v for k, v in fields.items()}, dtypes)

    def __copy__(self) -> "Quantizer":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizer":
        return type(self)._from_value(**copy.deepcopy(self._fields(), memo))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _QUANTIZERS[qualified_name(cls)] = cls

    def copy(self) -> "Quantizer":
        """Return a quantizer with the same attributes, equal if it is a value. Tensors and other objects are shared."""
        made = type(self).__new__(type(self))
        for name in self._names:  # torch 2.11 does not trace a walk through `__dict__`
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "_names", self._names)
        object.__setattr__(made, "_memo", None)
        made._rebuild_derived_state()
        return made

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> "Quantizer":
        """Return a copy that makes other directions; None leaves a direction as it is."""
        made = self.copy()
        made.set_usage(rowwise=rowwise, columnwise=columnwise)
        return made

    def _with_internal(self, internal: bool) -> "Quantizer":
        """Return a copy that makes storages (`internal`) or tensors."""
        made = self.copy()
        made.internal = internal
        return made

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change in place which directions are made; None leaves a direction as it is."""
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    # Quantize

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> "QuantizedTensor":
        """Return `tensor`, FP32/FP16/BF16 of any shape, as a quantized tensor, or as a storage if `internal` is set.

        If `out` is given, it is written in place and returned. Otherwise the operation is differentiable, with the
        identity as its gradient, unless `internal` is set; `dtype` is then the nominal dtype of the result, by default
        that of `tensor`.
        """
        if out is not None:
            return update_quantized(tensor, out, self)
        return quantize(tensor, self, dtype=dtype)

    def __call__(self, tensor: torch.Tensor) -> "QuantizedTensor":
        return self.quantize(tensor)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Quantize without autograd."""
        return quantize(tensor.detach(), self)

    def multi_quantize(self, list_of_tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Quantize each tensor on its own."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `src` into the buffers of `dst`, in place; nothing changes if `noop_flag` is 1."""
        return update_quantized(src, dst, self, noop_flag=noop_flag)

    def frozen(self) -> "Quantizer":
        """Return a quantizer that goes on making what this one makes now, and writes no state."""
        return self

    def share_amax(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the amax that this quantizer keeps, if it keeps any, by `largest` of it.

        The quantizer has seen a shard of a tensor; `largest` returns the largest amax over all shards.
        """

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Gather statistics of `tensor` without quantizing it. Formats that scale by the tensor at hand need none."""

    # Prototypes

    def for_dtype(self, dtype: torch.dtype) -> "Quantizer":
        """Return this quantizer for sources of a dtype. Only a format whose buffers have that dtype returns another."""
        return self

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return storage attribute → (shape, dtype) for each buffer of a tensor of this logical shape."""
        described = self._describe_buffers(tuple(shape))
        declared = self._check_declared(described)
        return {attribute: described[attribute[1:]] for attribute in declared if attribute[1:] in described}

    def alloc_tensors(
        self, shape: Iterable[int], *, device: torch.device | str | None = None, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return uninitialised buffers by storage attribute."""
        return {
            attribute: torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory)
            for attribute, (size, dtype) in self.inner_tensor_specs(shape).items()
        }

    def create_metadata(
        self, _shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """Return the context that `__tensor_unflatten__` takes for a tensor of this format."""
        storage, tensor = self._classes()
        cls = storage if self.internal else tensor
        values = {kwarg: default for _, kwarg, default in storage._VALUES}  # torch 2.11 does not trace `tensor._VALUES`
        values.update(self.storage_metadata(dtype))
        values["quantizer"] = self.copy()
        return flatten_context(cls, dtype, values, requires_grad and not self.internal)

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> "QuantizedTensor":
        """Return an uninitialised quantized tensor, or a storage if `internal` is set, of this logical shape."""
        shape = tuple(shape)
        check_directions(self)
        check_nominal(dtype)
        inner = self.for_dtype(dtype).alloc_tensors(shape or (1,), device=device, pin_memory=pin_memory)
        made = self._built(inner, shape, dtype)
        return made.requires_grad_(True) if requires_grad and not self.internal else made

    def _built(self, inner: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return the tensor, or storage, with these buffers by attribute."""
        buffers = [inner[f"_{name}"] for name in self._buffer_names()]
        return assemble(buffers, self, self.internal, shape, dtype)

    # Capabilities

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Return whether `inp` divides into whole blocks, so that its shards can be gathered as bytes."""
        return True

    def is_requantization_safe(self) -> bool:
        """Return whether quantizing the same tensor again, such as a saved input, gives the same bytes."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether only the row-wise copy can be gathered, so that the column-wise one is made afterwards."""
        return False

    def gather_multiple(self, columnwise: bool) -> int | None:
        """Return what the rows of a shard must be a multiple of for this copy to be gathered as bytes, or None.

        None means that it cannot be. If it can, the shards one behind the other are, bit for bit, the copy of the
        whole.
        """
        return None

    def derives_columnwise(self) -> bool:
        """Return whether the column-wise copy can be made from the row-wise one, bit for bit."""
        return False

    def get_columnwise_shape(self, rowwise_data_shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the column-wise codes of a tensor of this logical shape."""
        described = self.with_usage(columnwise=True)._describe_buffers(tuple(rowwise_data_shape))
        return next(size for name, (size, _) in described.items() if name in ("columnwise_data", "transpose"))

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, ...]:
        """Return the shape of the scales of one direction; raise ValueError if the format has none."""
        described = self.with_usage(rowwise=not columnwise, columnwise=columnwise)._describe_buffers(tuple(shape))
        sizes = [size for name, (size, _) in described.items() if name.endswith("scale_inv")]
        if not sizes:
            raise ValueError(f"{type(self).__name__} has no scales: there is no shape to ask for")
        return sizes[0]

    def onnx_quantize(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError("ONNX export of quantized tensors is not there: export the dequantized model")

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        raise NotImplementedError("ONNX export of quantized tensors is not there: export the dequantized model")


_QUANTIZERS: dict[str, type[Quantizer]] = {}


def value_classes() -> tuple[type[Quantizer], ...]:
    """Return the classes that declare themselves values: the formats of this package."""
    return tuple(cls for cls in _QUANTIZERS.values() if vars(cls).get("_by_value"))


def rebuild_quantizer(name: str, fields: dict[str, Any], dtypes: tuple[str, ...] = ("dtype",)) -> Quantizer:
    """Unpickle a quantizer. This is safe under `weights_only`: `name` is the qualified name of the class, `fields` are
    the attributes, and `dtypes` names those that are a `DType`, written as an int (earlier files do not say; there it
    is `dtype`)."""
    if name not in _QUANTIZERS:
        raise ValueError(
            f"no quantizer is called {name!r}: import the module that defines it; known: {sorted(_QUANTIZERS)}"
        )
    restored = {k: DType(v) if k in dtypes and isinstance(v, int) else v for k, v in fields.items()}
    return _QUANTIZERS[name]._from_value(**restored)
