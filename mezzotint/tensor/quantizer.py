"""Quantizer: the value that says how a tensor becomes buffers. `quantize.py` has the functions that do it.

A leaf quantizer holds plain values only: `_plan()` gives the op, the names of its tensor arguments and its options,
`_describe_buffers()` what comes back, `_classes()` what holds it. Quantizers that hold tensors (delayed scaling)
have no plan and bring `_quantize` and `_update`; one made of two (hybrid) has `_parts()`.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import Buffers
from mezzotint.kernels.quantize_ops import fused
from mezzotint.tensor.flatten import qualified_name
from mezzotint.tensor.opaque import SUBCLASSES_COUNT, OpaqueMeta
from mezzotint.tensor.quantize import (
    assemble,
    check_input,
    check_nominal,
    check_shape,
    quantize,
    quantize_storage,
    update_quantized,
)
from mezzotint.tensor.storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from mezzotint.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "Quantizer",
    "assemble",
    "check_input",
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

    _registered_as: ClassVar[str | None] = None  # the class, this one or a base, that the compiler knows as a value

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = bool(rowwise)
        self.columnwise_usage = bool(columnwise)
        self.internal = False
        self.optimize_for_gemm = False

    # Format: what a leaf quantizer brings

    def _plan(self) -> "tuple[Any, ...] | None":
        """(op, tensor arguments by name, options), or None for a quantizer that is no leaf."""
        return None

    def _plan_of(self, source: str) -> "tuple[Any, ...] | None":
        """As `_plan`, of what a producer makes; None for a quantizer that takes none in."""
        plan = self._plan()
        return None if plan is None else (fused(plan[0], source), *plan[1:])

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
        if torch.compiler.is_compiling():  # a memo would be state to guard on
            return self._find_holder(internal)
        memo = self.__dict__["_memo"]
        if memo is None:
            memo = self.__dict__["_memo"] = {}
        if internal not in memo:
            memo[internal] = self._find_holder(internal)
        return memo[internal]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self.__dict__["_memo"] = None  # what was worked out from other values

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
        """Whether it is a value of plain fields; one that holds tensors is only itself."""
        return True

    def _is_constant(self) -> bool:
        """Whether the compiler takes it as a constant: a method, so that the answer is a constant there too."""
        if self._registered_as is None or not self._is_value():
            return False
        return SUBCLASSES_COUNT or self._registered_as == qualified_name(type(self))

    def _value_fields(self) -> dict[str, Any]:
        """Everything that decides what this quantizer does: attribute → plain value."""
        return {
            "rowwise_usage": self.rowwise_usage,
            "columnwise_usage": self.columnwise_usage,
            "internal": self.internal,
            "optimize_for_gemm": self.optimize_for_gemm,
        }

    def _value_key(self) -> tuple[Any, ...]:
        """What `==`, `hash` and the graph's repr all go by. A process group, or any object, is refused here."""
        fields = self._value_fields()
        for name, value in fields.items():
            if isinstance(value, Quantizer):
                value._value_key()
            elif not isinstance(value, _PLAIN):
                raise TypeError(
                    f"{type(self).__name__}.{name} is {type(value).__name__}: a quantizer is a value of plain ints, "
                    "bools, floats, strings and enums. A process group baked into a graph, or left out of the key, "
                    "would silently skip a reduction: pass the group to the quantize call instead"
                )
        return (type(self), *fields.items())

    def _refuse_group(self, group: Any) -> None:
        """Quantizing with a group that nothing reduces over must not pass in silence."""
        if group is not None:
            self._value_key()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        key = self._value_key()  # also of itself: a process group must not pass
        return self is other or key == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key())

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """A string that evaluates to an equal quantizer, and the names it needs."""
        cls = type(self)
        self._value_key()
        fields: list[str] = []
        names: dict[str, type] = {cls.__name__: cls}
        for name, value in self._value_fields().items():
            if isinstance(value, Enum):
                names[type(value).__name__] = type(value)
                fields.append(f"{name}={type(value).__name__}.{value.name}")
            elif isinstance(value, Quantizer):
                text, needed = value.__fx_repr__()
                names.update(needed)
                fields.append(f"{name}={text}")
            elif isinstance(value, float):
                names["float"] = float
                fields.append(f"{name}=float.fromhex({value.hex()!r})")
            else:
                fields.append(f"{name}={value!r}")
        return f"{cls.__name__}._from_value({', '.join(fields)})", names

    @classmethod
    def _from_value(cls, **fields: Any) -> "Quantizer":
        """The quantizer of these value fields, without going through the constructor."""
        quantizer = cls.__new__(cls)
        for name, value in fields.items():
            setattr(quantizer, name, value)
        quantizer._rebuild_derived_state()
        return quantizer

    def _rebuild_derived_state(self) -> None:
        """Recompute attributes that are no value fields, from those that are."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._value_fields().items())})"

    def __reduce__(self) -> Any:
        fields = {k: int(v) if isinstance(v, DType) else v for k, v in self._value_fields().items()}
        return rebuild_quantizer, (qualified_name(type(self)), fields)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _QUANTIZERS[qualified_name(cls)] = cls

    def copy(self) -> "Quantizer":
        """An equal quantizer that shares nothing."""
        return type(self)._from_value(**self._value_fields())

    def with_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> "Quantizer":
        """An equal quantizer but for the directions that it makes."""
        if self.custom:  # what it is made of is its own affair
            made = object.__new__(type(self))
            made.__dict__.update(self.__dict__)
            made.set_usage(rowwise=rowwise, columnwise=columnwise)
            return made
        fields = self._value_fields()
        if rowwise is not None:
            fields["rowwise_usage"] = bool(rowwise)
        if columnwise is not None:
            fields["columnwise_usage"] = bool(columnwise)
        return type(self)._from_value(**fields)

    def _with_internal(self, internal: bool) -> "Quantizer":
        """An equal quantizer but for what it gives: storages, or tensors."""
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
        self, shape: Iterable[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """The context that `__tensor_unflatten__` of this format takes."""
        storage, tensor = self._classes()
        cls = storage if self.internal else tensor
        values = {kwarg: default for _, kwarg, default in cls._VALUES}
        return {
            **values,
            "class": qualified_name(cls),
            "dtype": dtype,
            **self.storage_metadata(dtype),
            "quantizer": self.copy(),
        }

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
        check_shape(shape, self)
        check_nominal(dtype)
        storage, _ = self._classes()
        inner = self.for_dtype(dtype).alloc_tensors(shape, device=device, pin_memory=pin_memory)
        made = storage.__tensor_unflatten__(inner, self.create_metadata(shape, dtype=dtype), shape, None)
        return made.requires_grad_(True) if requires_grad and not self.internal else made

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

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The shape of the column-wise codes of a tensor of this logical shape."""
        described = self.with_usage(columnwise=True)._describe_buffers(tuple(shape))
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


def rebuild_quantizer(name: str, fields: dict[str, Any]) -> Quantizer:
    """Unpickle a value quantizer: class by qualified name, plain fields. Safe under weights_only."""
    if name not in _QUANTIZERS:
        raise ValueError(
            f"no quantizer is called {name!r}: import the module that defines it; known: {sorted(_QUANTIZERS)}"
        )
    if "dtype" in fields and isinstance(fields["dtype"], int):
        fields = {**fields, "dtype": DType(fields["dtype"])}
    return _QUANTIZERS[name]._from_value(**fields)
