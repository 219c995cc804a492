"""QuantizedTensor: a `torch.Tensor` subclass over a storage's buffers, with a nominal dtype and the logical shape.

Few operations keep the quantized form: detach, clone, views of the leading dimensions, whole rows, copies, moves
between devices, allocations. Every other operation dequantizes its arguments, runs, and returns plain tensors; an
argument that it writes is quantized again. An index returns a copy, because a scale covers a block or all elements, so
that a part cannot be written alone. To write a part, assign to it: `t[index] = value`.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from mezzotint.constants import HIGH_PRECISION
from mezzotint.tensor.fsdp import make_whole, send_shard, sendable_directions
from mezzotint.tensor.partition import Split, share_amax, update_shard
from mezzotint.tensor.printing import printed
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage, rebuild_quantized_tensor, resolve_shape
from mezzotint.tracing import count_write

__all__ = ["QuantizedTensor", "rebuild_quantized_tensor"]

_aten = torch.ops.aten


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """This is the base of tensor classes: a `QuantizedTensor` holds codes and scales, and stands for the values that
    they mean.

    It is a `torch.Tensor` of the nominal dtype. Operations that know the format use the codes; all others compute with
    the values. A format is a class such as `class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor)`, and a quantizer
    makes its tensors.

    Args:
        shape: The logical shape.
        dtype: The nominal dtype, which is that of the values when they are dequantized.
        requires_grad: Whether autograd records operations on it. The default is False.
        device: The device, or None for that of the buffers.
        fake_dtype: It is accepted and has no effect.
        **fields: The buffers and values of the storage by name: those that its storage declares.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> x = mz.MXFP8Quantizer()(torch.ones(32, 32))
        >>> isinstance(x, mz.QuantizedTensor), isinstance(x, torch.Tensor)
        (True, True)
        >>> torch.equal(x.dequantize(), torch.ones(32, 32))
        True
    """

    _STORAGE: ClassVar[type[QuantizedTensorStorage]]  # the same buffers in a plain holder

    _quantizer: Quantizer | None
    # If this is a shard of a weight, these say which ranks have the others. For a shard of rows they are set when FSDP2
    # first gathers it.
    _splits: tuple[Split, ...] = ()
    _unit: Any = None  # a shard's place in FSDP2's bookkeeping (`fsdp_directions.py`)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__ if issubclass(base, QuantizedTensorStorage)]
        cls._STORAGE = next(base for base in bases if not issubclass(base, torch.Tensor))

    @staticmethod
    def __new__(
        cls: Any,
        shape: Any,
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: Any = None,
        fake_dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> "QuantizedTensor":
        """Make a tensor of this logical shape over the declared buffers and values, which are given by keyword."""
        for _, kwarg in cls._FLATTEN_TENSOR_BUFFERS:
            if device is None and fields.get(kwarg) is not None:
                device = fields[kwarg].device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._assign(dtype, fields)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ has set everything

    @classmethod
    def _build(cls, shape: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
        if shape is not None and len(shape) == 0:
            kwargs = cls._without_dimensions(kwargs)
        return cls(shape, dtype, **kwargs)

    # torch.Tensor's own attributes take precedence over the storage's.

    shape = torch.Tensor.shape
    device = torch.Tensor.device
    dtype = torch.Tensor.dtype
    size = torch.Tensor.size  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return printed(self)

    def _rebuild(self, shape: Any = None, dtype: torch.dtype | None = None, **fields: Any) -> Any:
        """Return a tensor of the same class and values with some fields replaced."""
        metadata = {**self.get_metadata(), **fields}
        return type(self)(self.shape if shape is None else shape, self.dtype if dtype is None else dtype, **metadata)

    @classmethod
    def make_like(
        cls,
        tensor: "QuantizedTensor",
        *,
        shape: Any = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **fields: Any,
    ) -> Any:
        """Return a tensor over the same buffers, with another shape, nominal dtype or fields."""
        return tensor._rebuild(shape, dtype, **fields).requires_grad_(requires_grad)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """Return a tensor over the same buffers with another nominal dtype."""
        return self._rebuild(dtype=dtype)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor. This is differentiable, with the identity as its gradient."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._dequantize(self.dtype if dtype is None else dtype).view(self.shape)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> "QuantizedTensor":
        """Quantize `tensor` into these buffers, in place; nothing changes if `noop_flag` is 1."""
        with torch.no_grad():
            if not self._splits or self._quantizer is None:
                QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)
            else:
                update_shard(tensor, self, self._quantizer, self._splits, noop_flag=noop_flag)
                share_amax(self._quantizer, self._splits)
        count_write(self)
        return self

    def take_rows(self, index: torch.Tensor) -> "QuantizedTensor | None":
        """Return these rows (int64 [n]; -1: zeros) of a matrix, row-wise, with the same codes; None if impossible."""
        fields = self._take_rows(index) if self.dim() == 2 and self.shape[0] > 0 else None
        if fields is None:
            return None
        made = self._rebuild((index.shape[0], self.shape[1]), **fields)
        if made._quantizer is not None:
            made._quantizer = made._quantizer.with_usage(rowwise=True, columnwise=False)
        return made

    def float(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float16)

    def view(self, *shape: Any) -> Any:
        return _aten.view.default(self, resolve_shape(shape, self.shape))

    def reshape(self, *shape: Any) -> Any:
        return _aten.view.default(self, resolve_shape(shape, self.shape))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Dequantize, write, and quantize the whole again, because the part may change the scale of the rest."""
        dense = self.dequantize().clone()  # the result of an autograd function must not be written
        dense[index] = value
        self.copy_(dense)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        if memory_format not in (torch.contiguous_format, torch.preserve_format):
            raise ValueError(
                f"memory_format={memory_format}: quantized tensors are contiguous only; dequantize() first"
            )
        return self

    @property
    def data(self) -> Any:
        """Return the tensor without its autograd history.

        Assigning a quantized tensor of the same class takes over its buffers. Any other tensor is quantized, in place
        if its shape is the same. The nominal dtype becomes that of what is assigned.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape and (self._splits or self._quantizer is None):
            raise ValueError(
                f"data has shape {tuple(value.shape)}, the tensor {tuple(self.shape)}: of a shard, or of a tensor "
                "without a quantizer, they must be equal"
            )
        if type(value) is not type(self):
            if value.shape != self.shape:
                with torch.no_grad():
                    value = self._quantizer._with_internal(False).quantize(value)  # type: ignore[union-attr]
            else:
                self.quantize_(value)
                value = self.to_dtype(value.dtype if value.dtype in HIGH_PRECISION else self.dtype)
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, getattr(value, attribute))
        for attribute, _, _ in self._VALUES:
            setattr(self, attribute, getattr(value, attribute))
        if (value.device, value.dtype, value.shape) != (self.device, self.dtype, self.shape):
            torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
            self._dtype = value.dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made: Any = _same_part(self.detach().clone(), self)
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made._quantizer = copy.deepcopy(self._quantizer, memo)
        for name, value in _foreign(self).items():
            setattr(made, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, arguments = super().__reduce_ex__(protocol)
        return rebuild, (*arguments, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def _stable_hash_for_caching(self) -> str:
        """Return what the compiler's cache goes by: metadata, never values."""
        names, context = self.__tensor_flatten__()
        return f"{names}{tuple(self.shape)}{sorted((k, repr(v)) for k, v in context.items())}"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage: data is in the buffers. FSDP2 needs its address, which a wrapper's does not have."""
        return torch.UntypedStorage(0, device=self.device)

    def data_ptr(self) -> int:
        """Return 0, as for every tensor whose data is in others; DCP's stager goes by it. Raise TypeError for
        safetensors, which would write no bytes and fail without saying why."""
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "safetensors":
            raise TypeError(
                f"safetensors writes plain tensors, and this is quantized ({type(self).__name__}). Save what "
                "mezzotint.distributed.checkpoint.full_state(model) gives, the buffers of quantized weights, which "
                "load_full_state reads back; or dequantize() it"
            )
        return torch.Tensor.data_ptr(self)

    # FSDP2: this tensor is a shard of rows. `tensor/fsdp.py` says what is sent of it.

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: torch.Size, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return what to gather, and what `fsdp_post_all_gather` must know."""
        return send_shard(self, mesh, orig_size, module)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the whole tensor and the buffers that FSDP2 frees, or fill `out`."""
        return make_whole(all_gather_outputs, metadata, param_dtype, out)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            return _in_inference_mode(func, args, kwargs)
        return _dispatched(func, args, kwargs)


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on quantized tensors: by their own handler if there is one, else on dequantized tensors."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        with counting_writes():
            result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _dequantized(func, args, kwargs)


def _in_inference_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on quantized tensors in inference mode, where autograd has not prepared it.

    Composite operations arrive here, and are decomposed. A view of a tensor from outside of the mode takes that
    tensor's version counter, which an inference tensor cannot have, so it is made in the mode of its base.
    """
    if func not in _HANDLERS and func._can_decompose():
        return func.decompose(*args, **kwargs)
    if not func.is_view:
        return _dispatched(func, args, kwargs)
    with torch.inference_mode(args[0].is_inference()):
        return _dispatched(func, args, kwargs)


def counting_writes() -> Any:
    """Return a context in which autograd's version counters count writes, which they do not do below the dispatcher.

    Without it a backward that has saved a buffer would not notice that it was written since, and a view of a buffer
    would have a counter of its own. Plain views must not be made in it, because autograd takes them for its own.

    This is private API, seen in torch 2.11 and 2.13, whose `torch.utils.checkpoint` uses it for the same reason.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor._dequantize(tensor.dtype if dtype is None else dtype).view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


# This is the dispatch table. A handler returns NotImplemented if the format cannot do it, and then the default runs.

_HANDLERS: dict[Any, Callable[..., Any]] = {}


def _handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(handler: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _HANDLERS[op] = handler
        return handler

    return enter


def _dequantized(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on plain tensors, and quantize again what its schema says it writes."""
    written: list[tuple[QuantizedTensor, torch.Tensor]] = []
    mutable = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def plain(value: Any, name: str) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        dense = value._dequantize(value.dtype).view(value.shape)
        if name in mutable:
            _check_whole(value)
            written.append((value, dense))
        return dense

    names = [a.name for a in func._schema.arguments]
    args = [pytree.tree_map(lambda v, n=n: plain(v, n), a) for n, a in zip(names, args, strict=False)]
    kwargs = {n: pytree.tree_map(lambda v, n=n: plain(v, n), v) for n, v in kwargs.items()}
    result = func(*args, **kwargs)
    with counting_writes():
        for target, dense in written:
            target.quantize_(dense)
    targets = {id(dense): target for target, dense in written}
    return pytree.tree_map(lambda made: targets.get(id(made), made), result) if written else result


@_handles(_aten.detach.default, _aten.alias.default)
def _detach(func: Any, tensor: QuantizedTensor) -> Any:
    return _same_part(_with_attributes(tensor._rebuild(), tensor), tensor)


def _same_part(made: Any, tensor: QuantizedTensor) -> Any:
    """Mark `made`, which has the values of `tensor`, as the same shard: the same ranks have the other shards."""
    if tensor._splits:
        made._splits = tensor._splits
    return made


@_handles(_aten.as_strided.default)
def _as_strided(func: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return the tensor as it is if that is what is asked for; FSDP2 asks so for a gathered parameter."""
    same = tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride() and not storage_offset
    return _with_attributes(tensor._rebuild(), tensor) if same else NotImplemented


@_handles(_aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> Any:
    cloned: dict[str, Any] = {k: _cloned(getattr(tensor, name)) for name, k in tensor._FLATTEN_TENSOR_BUFFERS}
    return tensor._rebuild(**cloned)


def _cloned(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


@_handles(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten._reshape_alias.default)
def _view(func: Any, tensor: QuantizedTensor, shape: Any, *strides: Any) -> Any:
    shape = resolve_shape((tuple(shape),), tensor.shape)
    if tuple(shape) == tuple(tensor.shape):
        return tensor._rebuild()
    fields = tensor._view(shape)
    return NotImplemented if fields is None else tensor._rebuild(shape, **fields)


@_handles(_aten.slice.Tensor)
def _slice(
    func: Any,
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    size = tensor.shape[0]
    start, stop, _ = slice(start, end).indices(size)
    if dim % tensor.dim() != 0 or step != 1 or tensor.dim() < 2:
        return NotImplemented
    return _rows(tensor, start, max(start, stop))


def _rows(tensor: QuantizedTensor, start: int, stop: int) -> Any:
    if (start, stop) == (0, tensor.shape[0]):
        return tensor._rebuild()
    fields = tensor._rows(start, stop)
    if fields is None:
        return NotImplemented
    made = tensor._rebuild((stop - start, *tensor.shape[1:]), **fields)
    return _clone(_aten.clone.default, made) if made._COPIES_ROWS else made


def _check_whole(tensor: QuantizedTensor) -> None:
    """Raise ValueError if the tensor is some rows of another: they are a copy, so a write would not reach the other."""
    base = tensor._base if tensor._COPIES_ROWS and tensor._is_view() else None
    if type(base) is type(tensor) and base.numel() != tensor.numel():
        raise ValueError(
            f"this {type(tensor).__name__} is a slice {tuple(tensor.shape)} of one of shape {tuple(base.shape)}, and a "
            "copy: what is written into it does not reach the other; assign, tensor[index] = value, or clone() it first"
        )


@_handles(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(func: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    if dim % tensor.dim() != 0 or tensor.dim() < 2:
        return NotImplemented
    total = tensor.shape[0]
    if isinstance(sizes, int):
        bounds = [(i, min(i + sizes, total)) for i in range(0, max(total, 1), max(sizes, 1))]
    else:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        bounds = list(zip([0, *ends], ends, strict=False))
    parts = [_rows(tensor, start, stop) for start, stop in bounds]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


@_handles(_aten.copy_.default)
def _copy(func: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        return func(dst, _in_dtype(src, dst.dtype), non_blocking)
    if type(dst) is type(src) and dst.shape == src.shape and dst.has_form_of(src):
        dst.copy_from_storage(src)
        return dst
    _check_whole(dst)
    if src.dtype not in HIGH_PRECISION:
        src = src.to(dst.dtype)
    src = src.to(dst.device)
    dst.quantize_(src.expand(dst.shape) if src.shape != dst.shape else src)
    return dst


@_handles(_aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype is not None and dtype != tensor.dtype:
        return func(_in_dtype(tensor, dtype), dtype=dtype, device=device, **options)
    options.pop("memory_format", None)
    device = tensor.device if device is None else device
    moved = {
        kwarg: None if (buffer := getattr(tensor, name)) is None else buffer.to(device=device, copy=True)
        for name, kwarg in tensor._FLATTEN_TENSOR_BUFFERS
    }
    return _same_part(_with_attributes(tensor._rebuild(**moved), tensor), tensor)


def _in_dtype(tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values rounded once to `dtype`, or in the nominal dtype if `dtype` is no high precision."""
    return tensor._dequantize(dtype if dtype in HIGH_PRECISION else tensor.dtype).view(tensor.shape)


def _with_attributes(made: QuantizedTensor, tensor: QuantizedTensor) -> QuantizedTensor:
    """Give `made` the attributes that others have set on `tensor`, but for the one of being a parameter.

    `nn.Module._apply` swaps a parameter with `Parameter(param.to(...))`, which detaches, and would lose main_grad.
    """
    for name, value in _foreign(tensor).items():
        if name != "_is_param":
            setattr(made, name, value)
    return made


def _foreign(tensor: QuantizedTensor) -> dict[str, Any]:
    """Return the attributes that others have set on a tensor."""
    own = {name for name, _ in tensor._FLATTEN_TENSOR_BUFFERS} | {name for name, _, _ in tensor._VALUES}
    own |= {"_dtype", "_splits", "_unit"}
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


@_handles(_aten.new_empty.default, _aten.empty_like.default)
def _empty(func: Any, tensor: QuantizedTensor, size: Any = None, **options: Any) -> Any:
    dtype = options.get("dtype") or tensor.dtype
    if tensor._quantizer is None or dtype != tensor.dtype:
        return NotImplemented
    usages = tensor.get_usages()
    quantizer = tensor._quantizer.with_usage(rowwise=usages["rowwise"], columnwise=usages["columnwise"])
    device = options.get("device") or tensor.device
    return quantizer.make_empty(tensor.shape if size is None else size, dtype=dtype, device=device)


@_handles(_aten.new_zeros.default)
def _zeros(func: Any, tensor: QuantizedTensor, size: Any, **options: Any) -> Any:
    """Return quantized zeros if a shard of that many rows has whole blocks: FSDP2 copies the shard into them."""
    quantizer = tensor._quantizer
    shape = tuple(size)
    if quantizer is None or len(shape) < 2 or sendable_directions(quantizer, shape[0]) is None:
        return NotImplemented
    made = _empty(func, tensor, shape, **options)
    if made is not NotImplemented:
        for _, buffer in made._buffers():
            buffer.zero_()
    return made
