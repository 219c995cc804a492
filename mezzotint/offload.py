"""CPU offload: what layers save for backward is kept in the host's memory until backward needs it.

    context, sync = get_cpu_offload_context(enabled=True, num_layers=3, model_layers=4)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)

In forward, the saved tensors of a layer are copied to pinned memory at its end, on a stream of their own, while the
next layer computes; at the end of that one the GPU's copies are released. In backward, a layer's tensors are copied
back while the layer behind it computes. The first `num_layers` of a model's layers are offloaded, since they wait
longest.

Parameters, small tensors and tensors that are marked (`mark_not_offload`) stay. Values are copied bit by bit.
"""

from contextlib import nullcontext
from typing import Any

import torch

from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"]

SMALL = 256 * 1024  # in elements; smaller tensors stay where they are
_MARK = "_mezzotint_not_offloaded"


def mark_not_offload(*tensors: Any) -> None:
    """Leave these tensors, or the buffers of quantized ones, on the GPU when activations are offloaded.

    Args:
        *tensors: Tensors, quantized or not, and Nones.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.mark_not_offload(torch.ones(4), None)
    """
    for tensor in tensors:
        if tensor is None:
            continue
        buffers = [buffer for _, buffer in tensor._buffers()] if isinstance(tensor, QuantizedTensorStorage) else []
        for part in (tensor, *buffers):
            setattr(part, _MARK, True)


def may_leave(tensor: torch.Tensor) -> bool:
    """Return whether a saved tensor is worth copying: on a GPU, large, no parameter or view of one, and not marked."""
    return tensor.is_cuda and tensor.numel() >= SMALL and _is_free(tensor)


def _is_free(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
        return False
    return not getattr(tensor, _MARK, False)


class _Kept:
    """A `_Kept` is a saved tensor, which is on the GPU, in the host's memory, or on its way."""

    __slots__ = ("device", "device_copy", "free", "host_copy", "version")

    def __init__(self, tensor: torch.Tensor, free: "dict[Any, list[torch.Tensor]] | None") -> None:
        self.version = tensor._version
        self.device = tensor.device
        self.device_copy: torch.Tensor | None = tensor
        self.host_copy: torch.Tensor | None = None
        self.free = free  # where the host buffer goes when nobody can ask for the tensor again

    def check(self) -> None:
        """Raise RuntimeError if the tensor was written since it was saved, as autograd does for what it keeps."""
        if self.device_copy is not None and self.device_copy._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.device_copy.shape)} that was saved for backward was written in place "
                "before it was copied to the host: its gradient would be wrong. Write into a new tensor instead, or "
                "leave this one out with mark_not_offload"
            )

    def __del__(self) -> None:
        if self.free is not None and self.host_copy is not None:
            self.free.setdefault(_form(self.host_copy), []).append(self.host_copy)


class _Layer:
    """A `_Layer` has what was saved between two calls of `sync`. `before` is the layer in front, copied back later."""

    def __init__(self, before: "_Layer | None") -> None:
        self.before = before
        self.kept: dict[Any, _Kept] = {}
        self.copied: Any = None  # the event of the copies to the host; below, of those back
        self.loaded: Any = None

    def keep(self, tensor: torch.Tensor, free: Any) -> _Kept:
        """Return what keeps this tensor. There is one for each tensor: a second op that saves it shares the copy."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if key not in self.kept:
            self.kept[key] = _Kept(tensor, free)
        return self.kept[key]


class _Transfers:
    """This class copies between the two memories, on one stream; without a GPU, it copies at once."""

    def __init__(self, stream: Any, retains: bool) -> None:
        self.stream = stream
        self.free: dict[Any, list[torch.Tensor]] | None = {} if retains else None  # host buffers, by what they hold

    def to_host(self, layer: _Layer) -> None:
        """Start to copy a layer's tensors to the host."""
        pairs = []
        for kept in layer.kept.values():
            if kept.host_copy is None and kept.device_copy is not None:
                kept.check()
                kept.host_copy = self._host_buffer(kept.device_copy)
                pairs.append((kept.host_copy, kept.device_copy))
        if pairs:
            layer.copied = self._copy(pairs)

    def release(self, layer: _Layer) -> None:
        """Release the GPU's copies once they are copied: kernels launched from here on may write to their memory."""
        if layer.copied is not None:
            self._wait(layer.copied)
            layer.copied = None
            for kept in layer.kept.values():
                kept.check()
                kept.device_copy = None

    def to_device(self, layer: _Layer) -> None:
        """Start to copy back what has been released."""
        pairs = []
        for kept in layer.kept.values():
            if kept.device_copy is None and kept.host_copy is not None:
                kept.device_copy = torch.empty_like(kept.host_copy, device=kept.device, pin_memory=False)
                pairs.append((kept.device_copy, kept.host_copy))
        if pairs:
            layer.loaded = self._copy(pairs)

    def take(self, layer: _Layer, kept: _Kept) -> torch.Tensor:
        """Return the tensor for backward, and copy it back first if that has not begun."""
        if kept.device_copy is None:
            self.to_device(layer)
        if layer.loaded is not None:
            self._wait(layer.loaded)
            layer.loaded = None
        assert kept.device_copy is not None
        if kept.host_copy is None:
            kept.check()
        return kept.device_copy

    def _host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        free = None if self.free is None else self.free.get(_form(like))
        return free.pop() if free else torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copy each (destination, source); return an event to wait for, or True if it is done."""
        if not any(a.is_cuda or b.is_cuda for a, b in pairs):
            for destination, source in pairs:
                destination.copy_(source)
            return True
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not True:
            torch.cuda.current_stream().wait_event(event)


def _form(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride()


class _Offload:
    """This is the context, with the function that is called at the end of a layer."""

    def __init__(self, num_layers: int, model_layers: int, transfers: _Transfers, is_manual: bool) -> None:
        # The last layer's tensors stay, because they are needed as soon as they are saved.
        self.count = model_layers if is_manual else min(num_layers, model_layers - 1)
        self.model_layers, self.transfers, self.is_manual = model_layers, transfers, is_manual
        self.layers: list[_Layer] = [_Layer(None)]  # of the current forward, the current layer last
        self.ended: list[_Layer] = []  # of the last forward, for a synchronizer
        self.hooks: list[Any] = []

    def __enter__(self) -> "_Offload":
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self.take)
        hooks.__enter__()
        self.hooks.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.pop().__exit__(*error)

    @property
    def inside_context(self) -> bool:
        """Return whether the context is entered; programs ask for it by this name."""
        return bool(self.hooks)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if len(self.layers) > self.count or not may_leave(tensor):
            return tensor
        layer = self.layers[-1]
        # It is detached, because it would otherwise hold the graph that holds it.
        return layer, layer.keep(tensor.detach(), self.transfers.free)

    def take(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else self.transfers.take(*packed)

    def end_layer(self, x: torch.Tensor) -> torch.Tensor:
        """End a layer, given its output: start its copies, and release those of the layer before."""
        layer = self.layers[-1]
        if not self.is_manual:
            self.transfers.to_host(layer)
            if layer.before is not None:
                self.transfers.release(layer.before)
        if len(self.layers) < self.model_layers:
            self.layers.append(_Layer(layer))
        else:
            self.ended, self.layers = self.layers if self.is_manual else [], [_Layer(None)]
        return _EndOfLayer.apply(x, layer, self)

    def begin_backward(self, layer: _Layer) -> None:
        """Begin to copy back the layer in front of this one, while backward computes this one."""
        if not self.is_manual and layer.before is not None:
            self.transfers.to_device(layer.before)


class _EndOfLayer(torch.autograd.Function):
    """This function is the identity, and notices when backward reaches the layer in front of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer, offload: _Offload) -> torch.Tensor:
        ctx.layer, ctx.offload = layer, offload
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.offload.begin_backward(ctx.layer)
        return dy, None, None


class ManualOffloadSynchronizer:
    """A synchronizer lets the caller start the copies to and from the host, layer by layer, numbered in the order of
    the calls of `sync`. `get_cpu_offload_context(manual_synchronization=True)` makes it.

    Args:
        offload: What holds the layers.
        enabled: Whether there is anything to copy.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layers = [mz.Linear(16, 16, device="cpu") for _ in range(1)]
        >>> context, sync, synchronizer = mz.get_cpu_offload_context(enabled=True, manual_synchronization=True)
        >>> x = torch.randn(4, 16)
        >>> for layer in layers:
        ...     with context:
        ...         x = layer(x)
        ...     x = sync(x)
        >>> synchronizer.start_offload_layer(0)
        >>> synchronizer.release_activation_forward_gpu_memory(0)
        >>> synchronizer.start_reload_layer(0)
        >>> x.sum().backward()
    """

    def __init__(self, offload: _Offload, enabled: bool) -> None:
        self._offload, self._enabled = offload, enabled

    def _layer(self, layer_id: int) -> _Layer:
        """Return a layer of the current forward, or of the last one."""
        if not self._enabled:
            return _Layer(None)  # a layer with nothing to copy
        ended = self._offload.layers[:-1] or self._offload.ended
        if not 0 <= layer_id < len(ended):
            raise ValueError(f"layer_id is {layer_id}: {len(ended)} layers have ended; count them from 0")
        return ended[layer_id]

    def start_offload_layer(self, layer_id: int) -> None:
        """Start to copy a layer's tensors to the host."""
        self._offload.transfers.to_host(self._layer(layer_id))

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Release a layer's tensors on the GPU once they are copied."""
        self._offload.transfers.release(self._layer(layer_id))

    def start_reload_layer(self, layer_id: int) -> None:
        """Start to copy a layer's tensors back."""
        self._offload.transfers.to_device(self._layer(layer_id))


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> Any:
    """Return what copies saved activations to the host's memory during forward, and back during backward.

    Run each layer inside of the context, and call `sync` on its output. If not `enabled`, or without
    `offload_activations`, both do nothing, whatever the other arguments are. Tensors on the CPU, small ones and
    parameters stay where they are.

    Args:
        enabled: Whether anything is offloaded. The default is False.
        num_layers: How many layers are offloaded. The default is 1.
        model_layers: How many layers the model has. The default is 1.
        offload_activations: Whether activations are offloaded. The default is True.
        offload_weights: It must be False: weights stay on the GPU.
        double_buffering: It is accepted and has no effect: the caching allocator hands one layer's memory to the next
            but one.
        manual_synchronization: Whether the caller starts the copies. The default is False.
        retain_pinned_cpu_buffers: Whether the host's buffers are kept for reuse. The default is False.
        offload_stream: The CUDA stream of the copies, or None for a new one.

    Returns:
        The pair (context, sync), or with `manual_synchronization` (context, sync, synchronizer).

    Raises:
        NotImplementedError: If `offload_weights` is True.
        ValueError: If a number of layers is not positive, or there are more than the model has.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layers = [mz.Linear(16, 16, device="cpu") for _ in range(2)]
        >>> context, sync = mz.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
        >>> x = torch.randn(4, 16)
        >>> for layer in layers:
        ...     with context:
        ...         x = layer(x)
        ...     x = sync(x)
        >>> x.sum().backward()
    """
    if enabled:
        _check_arguments(num_layers, model_layers, offload_weights)
    transfers = _Transfers(offload_stream, retain_pinned_cpu_buffers)
    offload = _Offload(num_layers, model_layers, transfers, manual_synchronization)
    is_on = enabled and offload_activations
    parts: tuple[Any, ...] = (offload, offload.end_layer) if is_on else (nullcontext(), lambda x: x)
    return (*parts, ManualOffloadSynchronizer(offload, is_on)) if manual_synchronization else parts


def _check_arguments(num_layers: int, model_layers: int, offload_weights: bool) -> None:
    if offload_weights:
        raise NotImplementedError(
            "offload_weights=True: weights stay on the GPU; shard them with FSDP2 and its CPUOffloadPolicy"
        )
    for name, value in (("num_layers", num_layers), ("model_layers", model_layers)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a positive int")
    if num_layers > model_layers:
        raise ValueError(f"num_layers is {num_layers}, model_layers {model_layers}: give at most as many")
