"""The memory of a training step, counted on fake tensors: the real modules run, and no byte of data exists.

One step of a model of `SAMPLED` layers is run in a `FakeTensorMode`, and every storage is counted from its allocation
to its end. The step falls into parts at the borders between layers; since all layers are alike, the step of a model of
any depth is the same parts with those of the middle layer repeated.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzotint.cli.model import LanguageModel, ModelConfig
from mezzotint.quantization import autocast
from mezzotint.recipe import Recipe

SAMPLED, MIDDLE = 3, 1  # layers of the model that is run, and the one of them that stands for all that are left out


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a step: what is alive at its end, and at most, over what was alive at its beginning."""

    name: str
    end: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of a training step."""

    parameters: int  # how many
    saved_per_layer: int
    saved: int
    weights: int  # parameters and buffers
    gradients: int
    optimizer: int
    peak: int  # all of them, and what is computed on the way
    peak_in: str  # the part of the step that has the peak


class LiveBytes(TorchDispatchMode):
    """Counts storages that were made while it is on, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self._start = 0
        self.parts: list[Part] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return made

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """What was there before."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def end_part(self, name: str) -> None:
        self.parts.append(Part(name, self.live - self._start, self.peak - self._start))
        self._start = self.peak = self.live


class SavedBytes:
    """Counts what autograd saves, each storage once, without those of `but`: `with saved.hooks(): forward`."""

    def __init__(self, but: Iterable[torch.Tensor]) -> None:
        self.total = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in but}

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)  # what is saved lives until backward: no other storage gets its address
            self.total += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive


def plan_step(config: ModelConfig, recipe: Recipe | None, dtype: torch.dtype = torch.float32) -> StepMemory:
    """A step with AdamW, in eager mode: forward, backward, update. `dtype` is the parameters'."""
    sampled = min(config.layers, SAMPLED)
    middle = min(MIDDLE, sampled - 1)
    more = config.layers - sampled  # layers that are left out
    with FakeTensorMode():
        model = LanguageModel(replace(config, layers=sampled), dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(config.batch, config.sequence, dtype=torch.int64)
        live, saved = LiveBytes(), SavedBytes(model.parameters())
        live.ignore([*model.parameters(), *model.buffers(), tokens])
        marks = _watch(model, live, saved)
        with live:
            with autocast(enabled=recipe is not None, recipe=recipe), saved.hooks():
                loss = model(tokens, tokens)
            loss.backward()
            del loss
            live.end_part("backward of the embedding")
            optimizer.step()  # makes its state, which the next step finds; it needs nothing else

        def bytes_of(tensors: Iterable[Any]) -> int:
            return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))

        def in_all(count: Callable[[nn.Module], int]) -> int:
            return count(model) + count(model.layers[middle]) * more

        def states(module: nn.Module) -> int:
            return sum(bytes_of(optimizer.state[parameter].values()) for parameter in module.parameters())

        weights = in_all(lambda module: bytes_of([*module.parameters(), *module.buffers()]))
        updates = in_all(states)
        per_layer = marks[middle + 1] - marks[middle]
        peak, where = _find_peak(live.parts, middle, more)
        return StepMemory(
            parameters=in_all(lambda module: sum(parameter.numel() for parameter in module.parameters())),
            saved_per_layer=per_layer,
            saved=saved.total + per_layer * more,
            weights=weights,
            gradients=in_all(lambda module: bytes_of(parameter.grad for parameter in module.parameters())),
            optimizer=updates,
            peak=weights + updates + peak,
            peak_in=where,
        )


def _watch(model: LanguageModel, live: LiveBytes, saved: SavedBytes) -> list[int]:
    """End a part at every border between layers, forward and backward. Gives what is saved up to each, filled later."""
    marks: list[int] = []

    def border(name: str, number: int) -> Callable[..., None]:
        def reach(module: nn.Module, args: tuple[Any, ...]) -> None:
            marks.append(saved.total)
            live.end_part(_forward(number - 1) if number else "forward of the embedding")
            args[0].register_hook(lambda gradient: live.end_part(name))

        return reach

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(border(_backward(number), number))
    model.norm.register_forward_pre_hook(border("head and loss", len(model.layers)))
    return marks


def _forward(number: int) -> str:
    return f"forward of layer {number}"


def _backward(number: int) -> str:
    return f"backward of layer {number}"


def _find_peak(parts: list[Part], middle: int, more: int) -> tuple[int, str]:
    """Of the parts one after another, the middle layer's `more` times more; and where it is."""
    level = peak = 0
    where = ""
    for part in parts:
        repeats = more + 1 if part.name in (_forward(middle), _backward(middle)) else 1
        for _ in range(repeats):
            if level + part.peak > peak:
                peak, where = level + part.peak, part.name.rstrip(" 0123456789")
            level += part.end
    return peak, where
