"""Quantization by a quantizer: these functions quantize into new buffers or into given ones, and put buffers into their
holder.

They are free functions because traced code needs them: a value-opaque object is a constant to the compiler, which does
not trace methods of a constant that was made inside the graph (`q.with_usage(...)`). Here it meets plain functions that
only ask the constant for other constants.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.kernels._lib import callee, run_op
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.philox import draw_rng
from mezzotint.kernels.quantize_ops import SOURCES, entering, fused, of_groups
from mezzotint.tensor.flatten import class_by_name
from mezzotint.tensor.interface import QuantizerLike
from mezzotint.tensor.quantize_call import QuantizeCall
from mezzotint.tensor.scale_slot import DelayedScale, ScaleSlot, scale_alone
from mezzotint.tensor.storage import QuantizedTensorStorage
from mezzotint.tracing import count_write, eager_only, traced_as


def quantize(x: torch.Tensor, quantizer: QuantizerLike, *, dtype: torch.dtype | None = None) -> Any:
    """Return `x` as a quantized tensor, or as a storage if the quantizer is internal. See `Quantizer.quantize`."""
    if not isinstance(x, torch.Tensor):
        x = _plain(x)
    if dtype is not None:
        check_nominal(dtype)
    if quantizer.internal:
        storage = quantize_storage(x.detach(), quantizer.copy())
        if dtype is not None:
            storage._dtype = dtype
        return storage
    if torch.is_grad_enabled() and x.requires_grad:
        made = _Quantize.apply(x, _quantize_tensor(x.detach(), quantizer, dtype))
        if not quantizer._is_constant():
            made._quantizer = quantizer.copy()
        return made
    return _quantize_tensor(x, quantizer, dtype)


def quantize_storage(x: torch.Tensor, quantizer: QuantizerLike, **given: torch.Tensor | None) -> QuantizedTensorStorage:
    """Return `x` as a storage with the quantizer's directions. The storage keeps the quantizer itself and no copy,
    because this package takes it for a value and does not assign to it.

    `given` has tensors by name: amaxes that were reduced over a group, and the state of the random number generator.
    """
    return assemble(quantize_buffers(x, quantizer, given), quantizer, True, x.shape, x.dtype, quantizer)


def quantize_scaled(x: torch.Tensor, quantizer: QuantizerLike, scale: DelayedScale) -> tuple[Any, torch.Tensor | None]:
    """Return `x` as a storage, and its amax, FP32 [1], if the quantizer takes a scale with the call (else None). With a
    `ScaleSlot` the amax is None if nobody asks for it, or if it has been entered already."""
    if quantizer.is_custom():
        return quantizer.quantize(x), None
    call = _call_of(quantizer, x.dtype)
    if call is None or isinstance(x, QuantizedTensorStorage):
        return quantize_storage(x, quantizer), None
    place = scale if call.takes_scale and isinstance(scale, ScaleSlot) else None
    enter = None if place is None else entering(call.op, x)
    if place is not None and enter is not None:
        buffers = enter(x, place.scales, place.slot, place.history, *call.options)
        return _as_storage(buffers, call, quantizer, x.shape, x.dtype), None
    run, amax = callee(call.op, x), None
    if call.takes_scale:
        *buffers, amax = run(x, scale_alone(scale), *call.options)
        amax = amax if place is None or place.history is not None else None
    elif call.alone is not None:
        buffers = run(x, *call.alone)
    else:
        buffers = run(x, *_tensor_arguments(x, call.tensors, {}), *call.options)
    return _as_storage(buffers, call, quantizer, x.shape, x.dtype), amax


@traced_as(lambda quantizer, dtype: quantizer.call_for(dtype))
def _call_of(quantizer: QuantizerLike, dtype: torch.dtype) -> QuantizeCall | None:
    """Return `quantizer.call_for(dtype)`, by one look where it has been asked before."""
    memo = quantizer.__dict__.get("_memo")
    call = None if memo is None else memo.get(dtype)
    return quantizer.call_for(dtype) if call is None else call


def _as_storage(
    buffers: Sequence[torch.Tensor], call: QuantizeCall, quantizer: QuantizerLike, shape: Any, dtype: torch.dtype
) -> Any:
    """Return the buffers that `call` made as a storage of this logical shape."""
    if call.holder is None:
        return assemble(buffers, quantizer, True, shape, dtype, quantizer)
    name, kwargs, values = call.holder
    fields: dict[str, Any] = dict(zip(kwargs, buffers, strict=True))
    fields.update(values)
    fields["quantizer"] = quantizer
    return class_by_name(name)._build(shape, dtype, fields)


def quantize_groups(
    xs: Sequence[torch.Tensor], quantizers: Sequence[QuantizerLike | None], scales: Sequence[torch.Tensor | None]
) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
    """Do what `quantize_scaled` does to each of G tensors, with one op if the quantizers are alike.

    Return the storages, or the tensors themselves if their quantizer is None, and the amaxes.
    """
    call = _common_call(xs, quantizers)
    if call is None:
        each = [
            (x, None) if quantizer is None else quantize_scaled(x, quantizer, scale)
            for x, quantizer, scale in zip(xs, quantizers, scales, strict=True)
        ]
        return tuple([made for made, _ in each]), tuple([amax for _, amax in each])
    given = [_tensor_arguments(x, call.tensors, {"scale": scale}) for x, scale in zip(xs, scales, strict=True)]
    listed = [[each[i] for each in given if each[i] is not None] for i in range(len(call.tensors))]
    made = run_op(of_groups(call.op), list(xs), *listed, *call.options)
    count = len(made) // len(xs)
    storages, amaxes = [], []
    for i, (x, quantizer) in enumerate(zip(xs, quantizers, strict=True)):
        assert quantizer is not None
        buffers = made[i * count : (i + 1) * count]
        amax = None
        if quantizer.takes_scale():
            *buffers, amax = buffers
        storages.append(_as_storage(buffers, call, quantizer, x.shape, x.dtype))
        amaxes.append(amax)
    return tuple(storages), tuple(amaxes)


def _common_call(xs: Sequence[torch.Tensor], quantizers: Sequence[QuantizerLike | None]) -> QuantizeCall | None:
    """Return the call that quantizes all of these tensors in one op; None if there is none, or one tensor alone."""
    common: QuantizeCall | None = None
    for x, quantizer in zip(xs, quantizers, strict=True):
        if quantizer is None or isinstance(x, QuantizedTensorStorage) or x.dtype != xs[0].dtype or len(xs) == 1:
            return None
        if quantizer.is_custom() or quantizer._parts() is not None or quantizer.unpacked:  # no op unpacks many
            return None
        check_quantizable(x, quantizer)
        call = quantizer.call_for(x.dtype)
        if call is None or (common is not None and not call.is_same_as(common)):
            return None
        common = call
    return common


def quantize_source(
    source: str,
    arguments: tuple[Any, ...],
    shape: Any,
    dtype: torch.dtype,
    quantizer: QuantizerLike,
    scale: DelayedScale,
    sums: torch.dtype | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Quantize what a producer (`kernels/quantize_ops.py`) makes of `arguments`, in one op if the quantizer has it.

    Return the storage, the amax as `quantize_scaled` does, and column sums in dtype `sums`, or None if `sums` is None
    or the producer has no sums.
    """
    has_sums = SOURCES[source].sums
    call = None if quantizer.is_custom() else quantizer.call_for(dtype)
    if call is None:
        made = run_op(SOURCES[source].op, *arguments)
        storage, amax = quantize_scaled(made, quantizer, scale)
        return storage, amax, column_sum(made, sums) if has_sums and sums is not None else None
    place = scale if isinstance(scale, ScaleSlot) and call.takes_scale else None
    enter = None if place is None else entering(call.op, arguments[0], True)
    if place is not None and enter is not None:
        summed = arguments[0].new_empty(shape[-1], dtype=sums) if has_sums and sums is not None else None
        fields = source, len(arguments), summed, place.scales, place.slot, place.history, *arguments
        buffers = enter(*fields, *call.options)
        return _as_storage(buffers, call, quantizer, shape, dtype), None, summed
    if has_sums:
        arguments = (*arguments, sums)
    given = _tensor_arguments(arguments[0], call.tensors, {"scale": scale_alone(scale)})
    buffers = run_op(fused(call.op, source), *arguments, *given, *call.options)
    summed, amax = None, None
    if has_sums:
        *buffers, summed = buffers
    if call.takes_scale:
        *buffers, amax = buffers
    if place is not None and place.history is None:
        amax = None
    return _as_storage(buffers, call, quantizer, shape, dtype), amax, None if sums is None else summed


def _quantize_tensor(x: torch.Tensor, quantizer: QuantizerLike, dtype: torch.dtype | None) -> Any:
    return assemble(quantize_buffers(x, quantizer, {}), quantizer, False, x.shape, x.dtype if dtype is None else dtype)


def quantize_buffers(
    x: torch.Tensor, quantizer: QuantizerLike, given: dict[str, torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the buffers of `x` in the quantizer's order. A tensor without dimensions is taken as one of shape (1,)."""
    if isinstance(x, QuantizedTensorStorage):
        x = x.dequantize()
    check_quantizable(x, quantizer)
    x = x.reshape(1) if x.dim() == 0 else x
    parts = quantizer._parts()
    if parts is not None:
        guard_usages(quantizer)
        return _two_parts(x, parts, given)
    call = quantizer.call_for(x.dtype)
    if call is None:
        return quantizer._quantize(x)  # type: ignore[attr-defined]
    return callee(call.op, x)(x, *_tensor_arguments(x, call.tensors, given), *call.options)


def _plain(x: Any) -> torch.Tensor:
    """Return a storage dequantized; raise TypeError for anything else, which is no tensor."""
    if not isinstance(x, QuantizedTensorStorage):
        raise TypeError(f"tensor is {type(x).__name__}: give a torch.Tensor")
    return x.dequantize()


def guard_usages(quantizer: QuantizerLike) -> int:
    """Read what may be assigned in place, so that the compiler guards on it.

    The compiler guards by identity on a quantizer that is no value (a hybrid with a part of delayed scaling), and does
    not see `q.set_usage(...)`. It guards on an attribute if a decision depends on it, not if it is only read.
    """
    usages = (1 if quantizer.rowwise_usage else 0) + (2 if quantizer.columnwise_usage else 0)
    return usages + (4 if quantizer.internal else 0) + (8 if quantizer.optimize_for_gemm else 0)


def _two_parts(x: torch.Tensor, parts: tuple[Any, ...], given: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the buffers of a row-wise and a column-wise quantizer, one after the other."""
    rowwise, columnwise, chained = parts
    buffers = [] if rowwise is None else quantize_buffers(x, rowwise, given)
    if columnwise is not None:
        source = x if chained is None else quantize_storage(x, chained).dequantize(dtype=x.dtype)
        buffers = buffers + quantize_buffers(source, columnwise, given)
    return buffers


def _tensor_arguments(
    x: torch.Tensor, names: tuple[str, ...], given: dict[str, torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the op's tensor arguments by name. "rng!" is required, so it is drawn if it is not given."""
    arguments = []
    for name in names:
        if name == "rng!":
            rng = given.get("rng")
            arguments.append(draw_rng(x) if rng is None else rng)
        else:
            arguments.append(given.get(name))
    return arguments


def assemble(
    buffers: Sequence[torch.Tensor],
    quantizer: QuantizerLike,
    internal: bool,
    shape: Any,
    dtype: torch.dtype,
    owned: Any = None,
) -> Any:
    """Return the op's buffers as a storage, or a tensor of this logical shape, whose quantizer is `owned` or a copy."""
    name, kwargs, values = quantizer._holder(internal)
    fields: dict[str, Any] = dict(zip(kwargs, buffers, strict=True))
    fields.update(values)
    # The class is found by name, through the registry: a class that comes out of a constant has no source on which the
    # compiler could guard.
    cls = class_by_name(name)
    if quantizer._is_constant():
        fields["quantizer"] = quantizer.copy() if owned is None else owned
        return cls._build(shape, dtype, fields)
    # A quantizer that holds tensors, or that the compiler does not know, is no constant: it is set on the finished
    # tensor, outside of what a graph carries.
    made = cls._build(shape, dtype, fields)
    made._quantizer = quantizer.copy()
    return made


def update_quantized(
    src: torch.Tensor,
    dst: Any,
    quantizer: QuantizerLike,
    *,
    noop_flag: torch.Tensor | None = None,
    **given: torch.Tensor | None,
) -> Any:
    """Quantize `src` into the buffers that `dst` holds, in place; nothing changes if `noop_flag` is 1.

    `given` is as in `quantize_storage`.
    """
    rowwise_names, columnwise_names, class_name = quantizer._targets()
    storage_class: Any = class_by_name(class_name)
    if not isinstance(dst, storage_class):
        raise TypeError(
            f"dst is {type(dst).__name__}: {type(quantizer).__name__} writes into {class_name}; "
            "make one with make_empty"
        )
    if noop_flag is not None:
        check_noop(noop_flag)
    if not isinstance(src, torch.Tensor):
        src = _plain(src)
    if tuple(dst.shape) != tuple(src.shape):
        raise ValueError(f"dst has shape {tuple(dst.shape)}, src {tuple(src.shape)}: they must be equal")
    if isinstance(src, QuantizedTensorStorage):
        src = src.dequantize()
    guard_usages(quantizer)
    # Attributes are used and no methods: the compiler reads attributes of a tensor subclass and cannot call its
    # methods. They are those of an alias that the graph made: attributes of an argument become inputs of their own, and
    # what is written to them does not show in the argument until the graph has ended.
    held = dst.detach() if isinstance(dst, torch.Tensor) else dst
    _check_form(held, quantizer, storage_class)
    quantizer = quantizer.with_usage(
        rowwise=getattr(held, rowwise_names[0]) is not None,
        columnwise=getattr(held, columnwise_names[0]) is not None,
    )
    check_quantizable(src, quantizer)
    buffers = [getattr(held, f"_{n}") for n in quantizer._buffer_names()]
    if src.dim() == 0:
        src, buffers = src.reshape(1), [buffer.reshape(1) if buffer.dim() == 0 else buffer for buffer in buffers]
    if buffers[0].device != src.device:
        raise ValueError(f"src is on {src.device}, dst on {buffers[0].device}: move one of them with .to()")
    with torch.no_grad():
        _update_buffers(src, buffers, quantizer, noop_flag, given)
    count_write(dst)
    return dst


def update_scaled(
    src: torch.Tensor,
    dst: Any,
    quantizer: QuantizerLike,
    scale: torch.Tensor | None,
    *,
    noop_flag: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize as `update_quantized` does, by a `scale` that is given; return the amax of `src`, FP32 [1]."""
    held = dst.get_usages()
    quantizer = quantizer.with_usage(rowwise=held["rowwise"], columnwise=held["columnwise"])
    call = quantizer.call_for(src.dtype)
    assert call is not None
    amax = src.new_zeros(1, dtype=torch.float32)
    buffers = [getattr(dst, f"_{name}") for name in quantizer._buffer_names()]
    with torch.no_grad():
        quantizer._in_place_op()(src, [*buffers, amax], noop_flag, scale, *call.options)
    return amax


def _check_form(dst: Any, quantizer: QuantizerLike, storage_class: Any) -> None:
    """Raise ValueError unless what `dst` says of its bytes is true of those that the quantizer makes."""
    values = quantizer.storage_metadata()
    for attribute, kwarg, _ in storage_class._VALUES:
        if kwarg in values and getattr(dst, attribute) != values[kwarg]:
            raise ValueError(
                f"dst has {kwarg}={getattr(dst, attribute)!r}, {type(quantizer).__name__} makes {values[kwarg]!r}: "
                "quantize with the quantizer that dst was made with, or into a new tensor"
            )
    _check_layout(dst, quantizer)


@eager_only()
def _check_layout(dst: Any, quantizer: QuantizerLike) -> None:
    """Raise ValueError unless `dst` has a quantizer of this layout, if any; a graph does not know that of an alias."""
    if dst._quantizer is not None and dst._quantizer._layout() != quantizer._layout():
        raise ValueError(
            f"dst was made with {dst._quantizer!r}, whose bytes mean something else than those of {quantizer!r}: "
            "quantize with the quantizer that dst was made with, or into a new tensor"
        )


def _update_buffers(
    src: torch.Tensor,
    buffers: list[torch.Tensor],
    quantizer: QuantizerLike,
    noop_flag: torch.Tensor | None,
    given: dict[str, torch.Tensor | None],
) -> None:
    parts = quantizer._parts()
    if parts is not None:
        rowwise, columnwise, chained = parts
        count = 0 if rowwise is None else len(rowwise._buffer_names())
        if rowwise is not None:
            _update_buffers(src, buffers[:count], rowwise, noop_flag, given)
        if columnwise is not None:
            source = src if chained is None else quantize_storage(src, chained).dequantize(dtype=src.dtype)
            _update_buffers(source, buffers[count:], columnwise, noop_flag, given)
        return
    call = quantizer.call_for(src.dtype)
    if call is None:
        quantizer._update(src, buffers, noop_flag)  # type: ignore[attr-defined]
        return
    quantizer._in_place_op()(src, buffers, noop_flag, *_tensor_arguments(src, call.tensors, given), *call.options)


class _Quantize(torch.autograd.Function):
    """This function returns `quantized`, with the identity as its gradient with respect to x, from which it was made.

    The quantization itself is done outside: it may write a running amax, which a traced autograd function must not
    touch.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: Any) -> Any:
        return quantized.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def check_quantizable(x: torch.Tensor, quantizer: QuantizerLike) -> None:
    """Raise an error for what every format refuses: no tensor, a dtype that is no high precision, no direction."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"tensor is {type(x).__name__}: give a torch.Tensor")
    check_quantized_dtype(x.dtype, quantizer)
    check_directions(quantizer)


def check_quantized_dtype(dtype: torch.dtype, quantizer: QuantizerLike) -> None:
    """Raise TypeError unless tensors of this dtype can be quantized."""
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"tensor has dtype {dtype}: {type(quantizer).__name__} takes float32, float16 or bfloat16")


def check_nominal(dtype: torch.dtype) -> None:
    """Raise TypeError unless a quantized tensor can stand for this dtype."""
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"dtype is {dtype}: a quantized tensor stands for float32, float16 or bfloat16")


def check_noop(noop_flag: torch.Tensor) -> None:
    """Raise an error unless the flag is a tensor of one element; 1 means that there is nothing to do."""
    if not isinstance(noop_flag, torch.Tensor):
        raise TypeError(f"noop_flag is {type(noop_flag).__name__}: give a tensor of one element, 1 for nothing to do")
    if noop_flag.numel() != 1:
        raise ValueError(f"noop_flag has shape {tuple(noop_flag.shape)}: give one element, 1 for nothing to do")


def check_directions(quantizer: QuantizerLike) -> None:
    """Raise ValueError unless at least one direction is asked for."""
    if not (quantizer.rowwise_usage or quantizer.columnwise_usage):
        raise ValueError(
            f"{type(quantizer).__name__} has rowwise_usage=False and columnwise_usage=False: nothing to make; "
            "ask for one with set_usage or with_usage"
        )
