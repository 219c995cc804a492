"""Quantizer: the object that says how a tensor becomes buffers. `quantize.py` has the functions that do it.

A leaf quantizer holds plain values only: `_plan()` gives the op, the names of its tensor arguments and its options,
`_describe_buffers()` what comes back, `_classes()` what holds it. Quantizers that hold tensors (delayed scaling)
have no plan and bring `_quantize` and `_update`; one made of two (hybrid) has `_parts()`.

The formats of this package are values, and so is what derives from them: two are equal where their class and all
their attributes are, and a graph bakes one in. A user's own quantizer is equal to nothing but itself, until its class
is registered (`register_value_opaque_quantizer`).
"""

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, Flag
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers
from mezzotint.tensor.checks import NO_GROUP, check_reduction
from mezzotint.tensor.flatten import flatten_context, qualified_name
from mezzotint.tensor.opaque import SUBCLASSES_COUNT, OpaqueMeta, graph_name
from mezzotint.tensor.quantize import (
    assemble,
    check_directions,
    check_nominal,
    check_quantizable,
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
    """Makes quantized tensors. `internal`: give bare storages; `optimize_for_gemm`: lay scales out for the GEMM."""

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    custom: ClassVar[bool] = False  # brings its own `quantize` and `qgemm`

    _by_value: ClassVar[bool] = (
        False  # this class says so, or was registered, or a base: equal where all attributes are
    )
    _registered_as: ClassVar[str | None] = None  # the class, this one or a base, that the compiler knows as a value
    # Attributes that are no part of what it is; a subclass adds those that its `_rebuild_derived_state` sets.
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
        """(op, tensor arguments by name, options), or None for a quantizer that is no leaf."""
        return None

    def call_for(self, dtype: torch.dtype) -> QuantizeCall | None:
        """Return what is done to tensors of a dtype, worked out once; None for a quantizer that is no leaf."""
        if not self._is_constant():  # the compiler walks through it, and would guard on what is kept
            return self._make_call(dtype)
        memo = self._worked_out()
        if dtype not in memo:
            memo[dtype] = self._make_call(dtype)
        return memo[dtype]

    def _make_call(self, dtype: torch.dtype) -> QuantizeCall | None:
        plan = self.for_dtype(dtype)._plan()
        if plan is None:
            return None
        op, tensors, options = plan
        return QuantizeCall(op, tensors, options, self.takes_scale())

    def _amax_plan(self, dim: int) -> "tuple[Any, ...] | None":
        """(op, names of what it gives, options): the maxima that a split along dimension 0 or 1 of the matrix makes
        others than those of the whole, to be given to the quantization. None: there are none."""
        return None

    def takes_scale(self) -> bool:
        """Whether the scale comes with each call, and the amax back with what it made."""
        return False

    def is_custom(self) -> bool:
        """Whether it brings its own `quantize` and `qgemm`."""
        return self.custom

    def _parts(self) -> "tuple[Quantizer | None, Quantizer | None, Quantizer | None] | None":
        """Of a quantizer made of two: row-wise part, column-wise part, and what the second's source goes through."""
        return None

    def _in_place_op(self) -> Any:
        """The op that writes into given buffers."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it quantizes in place")

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        """Buffer name → (shape, dtype), in the storage's order; the storage's attribute is `_name`."""
        raise NotImplementedError(f"{type(self).__name__} does not describe its buffers")

    def _classes(self) -> tuple[type[QuantizedTensorStorage], type[QuantizedTensorStorage]]:
        """The storage class and the tensor class of this format."""
        raise NotImplementedError(f"{type(self).__name__} does not say which classes hold its buffers")

    def _holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        """Where the op's buffers go: class name, its constructor kwargs for them in order, its plain values."""
        if not self._is_constant():  # as of `call_for`
            return self._find_holder(internal)
        memo = self._worked_out()
        if internal not in memo:
            memo[internal] = self._find_holder(internal)
        return memo[internal]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        held = self.__dict__
        names = held.get("_names", ())
        if name not in names and name in held:  # a property is not held
            held["_names"] = (*names, name)
        held["_memo"] = None  # what was worked out from other values

    def _worked_out(self) -> dict[Any, Any]:
        """A place for what follows from the attributes, empty again after any of them is assigned."""
        memo = self.__dict__.get("_memo")
        if memo is None:
            memo = self.__dict__["_memo"] = {}
        return memo

    def _find_holder(self, internal: bool) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        storage, tensor = self._classes()
        kwarg = dict(storage._FLATTEN_TENSOR_BUFFERS)
        names = self._buffer_names()
        self._check_declared(names)
        kwargs = tuple(kwarg[f"_{name}"] for name in names)
        return qualified_name(storage if internal else tensor), kwargs, self.storage_metadata()

    def _check_declared(self, names: Iterable[str]) -> list[str]:
        """The attributes that the storage declares; a buffer that is not among them is an error."""
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
        """The buffers of this quantizer's directions, in order."""
        return tuple(self._describe_buffers((1, 1)))

    def _targets(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """What it writes into: the row-wise and column-wise attributes and the name of the storage class."""
        storage, _ = self._classes()
        return storage._ROWWISE, storage._COLUMNWISE, qualified_name(storage)

    def storage_metadata(self, fake_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The plain values that a storage is constructed with, besides buffers and quantizer."""
        return {}

    def _layout(self) -> tuple[Any, ...]:
        """What bytes depend on and a storage does not say: they may be copied between tensors where it is equal."""
        return ()

    # Values

    def _is_value(self) -> bool:
        """Whether it is equal to another one with the same attributes; else it is equal to itself only."""
        return self._by_value

    def _is_constant(self) -> bool:
        """Whether the compiler takes it as a constant: a method, so that the answer is a constant there too."""
        if self._registered_as is None or not self._is_value():
            return False
        return SUBCLASSES_COUNT or self._registered_as == qualified_name(type(self))

    def _fields(self) -> dict[str, Any]:
        """All that it holds, but for what is derived: attribute → value."""
        return {name: value for name, value in self.__dict__.items() if name not in self._DERIVED}

    def _value_fields(self) -> dict[str, Any]:
        """Everything that decides what this quantizer does: attribute → plain value."""
        return self._fields()

    def _value_key(self) -> tuple[Any, ...]:
        """What `==`, `hash` and the graph's repr all go by. A process group, or any object, is refused here."""
        memo = self._worked_out()
        key = memo.get("key")
        if key is None:
            key = (type(self), *sorted(self._checked_fields().items()))
            memo["key"] = key
        return key

    def _checked_fields(self) -> dict[str, Any]:
        """The value fields, all of them plain, or quantizers that are values."""
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
        """Quantizing with a group that nothing reduces over must not pass in silence."""
        check_reduction(is_asked, group)
        if group is not None:
            self._value_key()
            raise TypeError(f"amax_reduction_group is {group!r}: {NO_GROUP}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not self._is_value():
            return True if self is other else NotImplemented
        key = self._value_key()  # also of itself: a process group must not pass
        return self is other or key == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key()) if self._is_value() else object.__hash__(self)

    def _snapshot(self) -> "Quantizer":
        """An equal quantizer that nobody assigns to: what a graph bakes in and its guards compare with."""
        memo = self._worked_out()
        if "snapshot" not in memo:
            memo["snapshot"] = self.copy()
        return memo["snapshot"]

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """A string that evaluates to an equal quantizer, and the names it needs."""
        cls = type(self)
        fields: list[str] = []
        names: dict[str, type] = {graph_name(cls): cls}
        for name, value in sorted(self._checked_fields().items()):
            if isinstance(value, Enum):
                kind = graph_name(type(value))
                names[kind] = type(value)
                # Flags are made of members, by number: "A|B" is the name of none.
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
        """The quantizer of these attributes, without going through the constructor."""
        quantizer = cls.__new__(cls)
        for name, value in fields.items():
            setattr(quantizer, name, value)
        quantizer._rebuild_derived_state()
        return quantizer

    def _rebuild_derived_state(self) -> None:
        """Set the attributes of `_DERIVED` again, from all others; called after a copy has been made."""

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
        """One with the same attributes, an equal one if it is a value. Tensors, and other objects, are shared."""
        made = type(self).__new__(type(self))
        for name in self._names:  # torch 2.11 does not trace a walk through `__dict__`
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "_names", self._names)
        object.__setattr__(made, "_memo", None)
        made._rebuild_derived_state()
        return made

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> "Quantizer":
        """A copy but for the directions that it makes."""
        made = self.copy()
        made.set_usage(rowwise=rowwise, columnwise=columnwise)
        return made

    def _with_internal(self, internal: bool) -> "Quantizer":
        """A copy but for what it gives: storages, or tensors."""
        made = self.copy()
        made.internal = internal
        return made

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change, in place, which directions are made."""
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    # Quantize

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> "QuantizedTensor":
        """`tensor` (any rank, FP32/FP16/BF16) → quantized tensor, or storage when `internal`; into `out` when given.

        Differentiable with the identity as its gradient, unless `internal`. `dtype` is the nominal dtype of the result.
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
        """Each tensor on its own."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `src` into the buffers of `dst`, in place; nothing changes where `noop_flag` is 1."""
        return update_quantized(src, dst, self, noop_flag=noop_flag)

    def frozen(self) -> "Quantizer":
        """One that goes on making what this one makes now, and writes no state."""
        return self

    def share_amax(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Where amaxes are kept: that of the whole tensor, of which this process has seen a part."""

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Gather statistics without quantizing; formats that scale by the tensor at hand need none."""

    # Prototypes

    def for_dtype(self, dtype: torch.dtype) -> "Quantizer":
        """This quantizer for sources of a dtype; only formats whose buffers follow it differ."""
        return self

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Storage attribute → (shape, dtype) of each buffer of a tensor of this logical shape."""
        described = self._describe_buffers(tuple(shape))
        declared = self._check_declared(described)
        return {attribute: described[attribute[1:]] for attribute in declared if attribute[1:] in described}

    def alloc_tensors(
        self, shape: Iterable[int], *, device: torch.device | str | None = None, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        """Uninitialised buffers by storage attribute."""
        return {
            attribute: torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory)
            for attribute, (size, dtype) in self.inner_tensor_specs(shape).items()
        }

    def create_metadata(
        self, _shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """The context that `__tensor_unflatten__` of this format takes."""
        storage, tensor = self._classes()
        cls = storage if self.internal else tensor
        values = {kwarg: default for _, kwarg, default in storage._VALUES}  # of `tensor`, 2.11 does not trace it
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
        """An uninitialised quantized tensor (storage when `internal`) of this logical shape."""
        shape = tuple(shape)
        check_directions(self)
        check_nominal(dtype)
        inner = self.for_dtype(dtype).alloc_tensors(shape or (1,), device=device, pin_memory=pin_memory)
        made = self._built(inner, shape, dtype)
        return made.requires_grad_(True) if requires_grad and not self.internal else made

    def _built(self, inner: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """The tensor, or storage, of these buffers by attribute."""
        buffers = [inner[f"_{name}"] for name in self._buffer_names()]
        return assemble(buffers, self, self.internal, shape, dtype)

    # Capabilities

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether `inp` quantizes without a ragged edge, so that its shards can be gathered as bytes."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same tensor again, as for a saved input, gives the same bytes."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether only the row-wise copy can be gathered and the column-wise one is made after."""
        return False

    def gather_multiple(self, columnwise: bool) -> int | None:
        """Rows of a shard must be a multiple of this for that copy to be gathered as bytes; None: it cannot be.

        Where it can, the shards one behind the other are, bit for bit, the copy of the whole.
        """
        return None

    def derives_columnwise(self) -> bool:
        """Whether the column-wise copy follows from the row-wise one, bit for bit."""
        return False

    def get_columnwise_shape(self, rowwise_data_shape: Iterable[int]) -> tuple[int, ...]:
        """The shape of the column-wise codes of a tensor of this logical shape."""
        described = self.with_usage(columnwise=True)._describe_buffers(tuple(rowwise_data_shape))
        return next(size for name, (size, _) in described.items() if name in ("columnwise_data", "transpose"))

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the scales of one direction."""
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
    """The classes that say of themselves that they are values: the formats of this package."""
    return tuple(cls for cls in _QUANTIZERS.values() if vars(cls).get("_by_value"))


def rebuild_quantizer(name: str, fields: dict[str, Any], dtypes: tuple[str, ...] = ("dtype",)) -> Quantizer:
    """Unpickle a quantizer: class by qualified name, attributes, and which of those are a `DType`, written as an int
    (earlier files do not say: there it is `dtype`). Safe under weights_only."""
    if name not in _QUANTIZERS:
        raise ValueError(
            f"no quantizer is called {name!r}: import the module that defines it; known: {sorted(_QUANTIZERS)}"
        )
    restored = {k: DType(v) if k in dtypes and isinstance(v, int) else v for k, v in fields.items()}
    return _QUANTIZERS[name]._from_value(**restored)
