"""The planner: it counts the memory of a training step on fake tensors, so that the real
modules run and no data exists.

One step of a model of `SAMPLED` layers is run in a `FakeTensorMode`, and every storage is counted from its allocation
to its end. The step is cut into parts at the borders between layers. Since all layers are alike, the step of a model of
any depth consists of the same parts, with those of the middle layer repeated.

In a world of several ranks it is rank 0's step, in a process group that is fake too: the collectives run, send nothing,
and are counted as they would be sent. Routers are assumed to spread their tokens evenly.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzotint.notebook import html_table
from mezzotint.optimizers import FusedAdam
from mezzotint.quantization import autocast, quantized_model_init
from mezzotint.recipe import Recipe, Rules
from mezzotint.recomputation import checkpoint
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.trainer.console import CommandError, as_size
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.mesh import (
    balanced_exchange,
    fake_world,
    make_meshes,
    make_model,
    make_optimizer,
    reduce_over_meshes,
)
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.savings import Savings
from mezzotint.trainer.sizes import ModelConfig
from mezzotint.trainer.traffic import SentBytes

# The model that is run has SAMPLED layers, and layer MIDDLE stands for all that are left out: what FSDP2 keeps from one
# layer to the next in backward begins with the last layer but one.
SAMPLED, MIDDLE = 4, 1
_ONE_RANK, _NO_SAVINGS = Layout(), Savings()


@dataclass(frozen=True, slots=True)
class Part:
    """A `Part` is a stretch of a step: the bytes that are alive at its `end` and at its `peak`, more than at its
    beginning, and what it `sent`."""

    name: str
    end: int
    peak: int
    sent: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """A `StepMemory` holds the bytes of a training step on one rank."""

    parameters: int  # how many this rank has
    saved_per_layer: int
    saved: int
    weights: int  # parameters and buffers
    gradients: int
    optimizer: int
    peak: int  # all of them, and what is computed on the way
    peak_in: str  # the part of the step that has the peak
    sent: dict[str, int]  # to other ranks, by the kind of collective

    def _repr_html_(self) -> str:
        """Return the sizes as a table for a notebook."""
        names = ("saved_per_layer", "saved", "weights", "gradients", "optimizer", "peak")
        rows = [(name.replace("_", " "), as_size(getattr(self, name))) for name in names]
        sent = [(f"sent by {kind}", as_size(size)) for kind, size in self.sent.items()]
        return html_table([*rows, ("peak in", self.peak_in), *sent])


class LiveBytes(TorchDispatchMode):
    """This mode counts the storages that are made while it is on, until they are freed."""

    def __init__(self, sent: SentBytes | None = None) -> None:
        """Start counting at 0; `sent` says how many bytes were sent, which is noted for each part."""
        super().__init__()
        self.live = self.peak = self._start = 0
        self.parts: list[Part] = []
        self._sent = SentBytes() if sent is None else sent
        self._sent_before: Counter[str] = Counter()
        self._known: set[int] = set()
        self._sizes: dict[int, tuple[Any, int]] = {}  # of the storages that are alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "fsdp"):
            self._measure()
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self._add(storage_of(value))
        return made

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out the storages of these tensors, which existed before."""
        self._known.update(storage_of(part)._cdata for tensor in tensors for part in buffers_of(tensor))

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._sizes[key] = weakref.ref(storage), size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._known.discard(key)
        self.live -= self._sizes.pop(key)[1]

    def _measure(self) -> None:
        """Update the sizes of storages that FSDP2 resized.

        FSDP2 frees and restores the memory of gathered weights without an operation that this mode sees, so that is
        noticed when the next collective begins, or the part ends.
        """
        for key, (found, size) in list(self._sizes.items()):
            storage = found()
            if storage is not None and storage.nbytes() != size:
                self.live += storage.nbytes() - size
                self._sizes[key] = found, storage.nbytes()
        self.peak = max(self.peak, self.live)

    def end_part(self, name: str) -> None:
        self._measure()
        sent = dict(self._sent.total - self._sent_before)
        self._sent_before = self._sent.total.copy()
        self.parts.append(Part(name, self.live - self._start, self.peak - self._start, sent))
        self._start = self.peak = self.live


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage that this rank has of a tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a quantized tensor's bytes, or the tensor itself if it is not quantized."""
    if not isinstance(tensor, QuantizedTensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


class SavedBytes:
    """This counter adds up what autograd saves, each storage once, except those of `but`:
    `with saved.hooks(): forward`."""

    def __init__(self, but: Iterable[torch.Tensor]) -> None:
        self._own = {storage_of(part)._cdata for tensor in but for part in buffers_of(tensor)}
        self._saved: dict[int, Any] = {}

    @property
    def total(self) -> int:
        """Return the bytes that are saved now: a weight that FSDP2 gathered is saved, and loses its
        memory when it is sharded again."""
        found = [storage() for storage in self._saved.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage._cdata not in self._own:
            # What is saved lives until backward, so no other storage gets its address.
            self._saved.setdefault(storage._cdata, weakref.ref(storage))
        return tensor.detach()  # the tensor itself would keep its own graph alive


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the whole model, however many ranks share it."""
    with FakeTensorMode():
        model = LanguageModel(replace(config, layers=1))
        of_layer = sum(parameter.numel() for parameter in model.layers.parameters())
        return sum(parameter.numel() for parameter in model.parameters()) + of_layer * (config.layers - 1)


def plan_step(
    config: ModelConfig,
    recipe: Recipe | None,
    dtype: torch.dtype = torch.float32,
    layout: Layout = _ONE_RANK,
    savings: Savings = _NO_SAVINGS,
) -> StepMemory:
    """Return the memory and traffic of a step with AdamW in eager mode: forward, backward and update.

    `recipe` is None for BF16, `dtype` is that of the parameters, `layout` says how ranks share the model, and `savings`
    which ways to need less memory are used.
    """
    layout.check_model(config)
    if savings.quantized_weights and layout.fsdp:
        raise CommandError("--quantized-weights with --fsdp: shards are of high precision; give one of them")
    with nullcontext() if layout.world == 1 else fake_world(layout.world):
        return _plan(config, recipe, dtype, layout, savings)


def _make_optimizer(model: nn.Module, savings: Savings) -> torch.optim.Optimizer:
    if savings.optimizer_dtype == "float32" and not savings.quantized_weights:
        return make_optimizer(model)
    moments = {"fp8": torch.uint8}.get(savings.optimizer_dtype) or getattr(torch, savings.optimizer_dtype)
    return FusedAdam(
        model.parameters(),
        master_weights=savings.quantized_weights,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )


def _recompute(model: LanguageModel) -> None:
    """Make backward run the forward of each layer again. The random state is not
    restored, as fake tensors have none."""
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _plan(
    config: ModelConfig, recipe: Recipe | None, dtype: torch.dtype, layout: Layout, savings: Savings
) -> StepMemory:
    # Rules may treat every layer differently, so with them all layers are run.
    sampled = config.layers if isinstance(recipe, Rules) else min(config.layers, SAMPLED)
    middle = min(MIDDLE, sampled - 1)
    more = config.layers - sampled  # layers that are left out
    meshes = make_meshes(layout) if layout.world > 1 else None
    with FakeTensorMode():
        shallow = replace(config, layers=sampled)
        is_quantized = savings.quantized_weights and recipe is not None
        with quantized_model_init(enabled=is_quantized, recipe=recipe) if is_quantized else nullcontext():
            options: dict[str, Any] = {"dtype": dtype, "exchange": balanced_exchange, "recomputes": savings.recompute}
            model = make_model(shallow, layout, meshes, recipe, **options)
        optimizer = _make_optimizer(model, savings)
        if savings.recompute:
            _recompute(model)
        tokens = torch.zeros(config.batch, config.sequence, dtype=torch.int64)
        sent = SentBytes()
        live, saved = LiveBytes(sent), SavedBytes(model.parameters())
        live.ignore([*model.parameters(), *model.buffers(), tokens])
        marks = _watch(model, live, saved)
        with live, sent:
            with autocast(enabled=recipe is not None, recipe=recipe, memory=savings.memory), saved.hooks():
                loss = model(tokens, tokens)
            saved_in_all = saved.total
            loss.backward()
            del loss
            live.end_part("backward of the embedding")
            if meshes is not None:
                for number, layer in enumerate(model.layers):
                    reduce_over_meshes(layer, layout, meshes)
                    live.end_part(_reduction(number))
                reduce_over_meshes(model, layout, meshes, but=model.layers)
                live.end_part("gradients of the embedding")
            optimizer.step()  # makes the state that the next step finds, and allocates nothing else

        def bytes_of(tensors: Iterable[Any]) -> int:
            found = [part for tensor in tensors if isinstance(tensor, torch.Tensor) for part in buffers_of(tensor)]
            storages = [storage_of(tensor) for tensor in found]
            return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

        def in_all(count: Callable[[nn.Module], int]) -> int:
            return count(model) + count(model.layers[middle]) * more

        def states(module: nn.Module) -> int:
            return sum(bytes_of(optimizer.state[parameter].values()) for parameter in module.parameters())

        def numbers(module: nn.Module) -> int:
            return sum((p._local_tensor if isinstance(p, DTensor) else p).numel() for p in module.parameters())

        weights = in_all(lambda module: bytes_of([*module.parameters(), *module.buffers()]))
        updates = in_all(states)
        per_layer = marks[middle + 1] - marks[middle]
        peak, where = _find_peak(live.parts, middle, more)
        return StepMemory(
            parameters=in_all(numbers),
            saved_per_layer=per_layer,
            saved=saved_in_all + per_layer * more,
            weights=weights,
            gradients=in_all(lambda module: bytes_of(parameter.grad for parameter in module.parameters())),
            optimizer=updates,
            peak=weights + updates + peak,
            peak_in=where,
            sent=_sent_in_all(live.parts, middle, more),
        )


def _watch(model: LanguageModel, live: LiveBytes, saved: SavedBytes) -> list[int]:
    """End a part at every border between layers, in forward and in backward, and return a list that forward fills with
    the bytes saved up to each border."""
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


def _reduction(number: int) -> str:
    return f"gradients of layer {number}"


def _repeats(part: Part, middle: int, more: int) -> int:
    """Return how many times a part comes in the whole model, of which `more` layers were left out."""
    return more + 1 if part.name in (_forward(middle), _backward(middle), _reduction(middle)) else 1


def _find_peak(parts: list[Part], middle: int, more: int) -> tuple[int, str]:
    """Return the largest number of live bytes over the parts, those of the middle layer repeated `more` times, and the
    name of the part that has it."""
    level = peak = 0
    where = ""
    for part in parts:
        times = _repeats(part, middle, more)
        highest = level + max(0, part.end) * (times - 1)  # of the last repetition if they grow, else the first
        if highest + part.peak > peak:
            peak, where = highest + part.peak, part.name.rstrip(" 0123456789")
        level += part.end * times
    return peak, where


def _sent_in_all(parts: list[Part], middle: int, more: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        for kind, size in part.sent.items():
            total[kind] += size * _repeats(part, middle, more)
    return dict(total)
