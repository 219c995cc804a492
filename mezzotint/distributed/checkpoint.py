"""Checkpoints with torch.distributed.checkpoint (DCP): they hold plain tensors only, and can be read at any world size,
bit for bit.

    save(folder, model, optimizer, extra={"step": torch.tensor(100)})
    extra = load(folder, model, optimizer)

`plain_state(model)` is written: parameters as they are, FSDP2's shards as DTensors; in place of a quantized weight its
buffers (`weight.data`, `weight.fp8_scale_inv`, …) without the padding of scales, so that they have the same bytes at
every world size; delayed scaling's state under `…_extra_state`. Tensor-parallel shards of weights (modules made with
`tp_group`, and gated ones that a style has split) are written where they lie in the whole (`parts.py`), and read by any
number of ranks that share them. Quantized shards are written if no block is cut, with scales of the whole once. For
torch.save or safetensors, `full_state(model)` gathers shards, and `load_full_state` loads that into a model, sharded or
whole.

A checkpoint counts once all of it is written: DCP writes `.metadata` last.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from mezzotint.comm.groups import is_initialized
from mezzotint.constants import cdiv
from mezzotint.distributed.parts import (
    Parts,
    ShardPlacement,
    check_shared_scales,
    find_split,
    local_of,
    placement_of,
    whole_of,
)
from mezzotint.distributed.reading import METADATA, in_one_process, load_state, read_metadata
from mezzotint.tensor.storage import QuantizedTensorStorage

_LEARNT = "_extra_state"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def is_complete(folder: str | Path) -> bool:
    """Return whether a checkpoint was written there to its end."""
    return (Path(folder) / METADATA).is_file()


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    *,
    process_group: Any = None,
    is_async: bool = False,
) -> Future[Any] | None:
    """Write model, optimizer and `extra` (equal on all ranks) to a new folder. All ranks call it.

    `is_async` copies everything, writes it in a thread and returns its future. It needs a `process_group` of its own
    that serves the CPU: `torch.distributed.new_group(backend="gloo")`.
    """
    if is_async and process_group is None:
        raise ValueError(
            "is_async without process_group: training goes on while the checkpoint is written, which needs a group of "
            "its own then; make one at the start, torch.distributed.new_group(backend='gloo'), and give it"
        )
    if is_complete(folder):
        raise ValueError(f"{folder} holds a checkpoint already: give a folder that does not")
    places = find_split(model)
    check_shared_scales(model)
    state = {"model": _placed(plain_state(model), places, model), "extra": dict(_tensors(extra or {}))}
    if optimizer is not None:
        held = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        state["optimizer"] = _placed_state(held, places, model)
    where: dict[str, Any] = {"checkpoint_id": str(folder), "process_group": process_group}
    if is_async:
        started = dcp.async_save(state, async_stager=_Copies(), **where)
        assert isinstance(started, Future)
        return started
    with in_one_process():
        dcp.save(state, no_dist=not is_initialized(), **where)
    return None


class _Copies(BlockingAsyncStager):
    """This stager copies everything to the CPU before `async_save` returns, also `Parts`, which torch does not know."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return pytree.tree_map_only(torch.Tensor, _copied, state_dict)


def _copied(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, Parts):
        return Parts(value.shape, value.dtype, [(offsets, _copied(part)) for offsets, part in value.pieces])
    return value.detach().to("cpu", copy=True)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: Any = None,
) -> dict[str, torch.Tensor]:
    """Read what `save` wrote, at any world size, into model and optimizer, and return `extra`. All ranks call it.

    Nothing in the files is executed: they hold tensors and plain values. An entry of another dtype or shape raises a
    ValueError.
    """
    if not is_complete(folder):
        raise ValueError(f"{folder} holds no checkpoint, or one that was not written to its end: give another")
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    learnt = {
        key: _empty(key, meta) for key, meta in stored.items() if key.startswith("model.") and key.endswith(_LEARNT)
    }
    places = find_split(model)
    plain = {k: v for k, v in plain_state(model).items() if not k.endswith(_LEARNT)}
    state: dict[str, Any] = {
        "model": _placed(plain, places, model),
        "extra": {key.removeprefix("extra."): _empty(key, m) for key, m in stored.items() if key.startswith("extra.")},
    }
    state["model"].update({key.removeprefix("model."): value for key, value in learnt.items()})
    if optimizer is not None:
        # This comes before the weights are read: an optimizer without state takes a step to get one.
        held = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        state["optimizer"] = _placed_state(held, places, model)
    load_state(folder, state, metadata, process_group)
    if optimizer is not None:
        read = state["optimizer"]
        whole = {key: held[key] if isinstance(value, Parts) else value for key, value in read.items()}
        set_optimizer_state_dict(model, optimizer, whole, options=_OPTIONS)
    _set_learnt(model, state["model"])
    return state["extra"]


def _placed(state: Mapping[str, Any], places: Mapping[str, ShardPlacement], model: nn.Module) -> dict[str, Any]:
    """Return a model's state with shards of weights as `Parts`, which know their place in the whole.

    A state dict may call a parameter by another name (of operations), and has the buffers of a quantized one. Such
    entries are recognised by their memory.
    """
    by_memory: dict[int, Parts] = {}
    for name, place in places.items():
        local: Any = local_of(model.get_parameter(name))
        if isinstance(local, QuantizedTensorStorage):
            parts = place.buffers(local)
            by_memory.update({buffer.data_ptr(): parts[attribute] for attribute, buffer in local._buffers()})
        elif local.numel():
            by_memory[local.data_ptr()] = place.parts(local)
    placed = dict(state)
    for key, value in state.items() if places else ():
        local = local_of(value)
        if local.numel():
            placed[key] = by_memory.get(local.data_ptr(), value)
        elif key in places:
            placed[key] = places[key].parts(value)
    return placed


def _placed_state(state: Mapping[str, Any], places: Mapping[str, ShardPlacement], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state, `state.<parameter>.<what>`, with shards as `Parts`. An entry must have the
    parameter's shape or no dimensions."""
    placed = dict(state)
    for key, value in state.items():
        name = key.removeprefix("state.").rpartition(".")[0]
        if not key.startswith("state.") or name not in places or not isinstance(value, torch.Tensor) or not value.dim():
            continue
        shape = model.get_parameter(name).shape
        if value.shape != shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, its parameter {tuple(shape)}, a shard of a weight (tp_group): "
                "where such state lies in the whole is not known; keep state in the shape of the parameter"
            )
        placed[key] = places[name].parts(value)
    return placed


def plain_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict in plain tensors, and DTensors of plain shards, over the memory of the model."""
    plain: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, QuantizedTensorStorage):
            plain.update({f"{key}.{name}": buffer for name, buffer in _buffers(value, local)})
        else:
            plain[key] = value
    return plain


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `plain_state` in whole tensors on the CPU, on every rank: what torch.save and safetensors take."""
    found = {}
    for key, value in plain_state(model).items():
        whole = whole_of(value) if isinstance(value, DTensor) else value
        found[key] = whole.detach().cpu().clone(memory_format=torch.contiguous_format)
    return found


@torch.no_grad()
def load_full_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Write what `full_state` returned, the same on every rank, into a model, sharded or whole."""
    wanted = {key: value for key, value in plain_state(model).items() if not key.endswith(_LEARNT)}
    given = {key for key in state if not key.endswith(_LEARNT)}
    if given != wanted.keys():
        raise ValueError(
            f"state has not the names of the model: missing {sorted(wanted.keys() - given)}, unexpected "
            f"{sorted(given - wanted.keys())}; give what full_state gave of the same model"
        )
    for key, target in wanted.items():
        value = state[key].to(target.device)
        if value.shape != target.shape:
            raise ValueError(f"{key} has shape {tuple(value.shape)}, the model's {tuple(target.shape)}: give its own")
        if value.dtype != target.dtype:
            raise ValueError(f"{key} is {value.dtype}, the model's {target.dtype}: cast one of them first")
        if isinstance(target, DTensor):
            placement_of(key, target).copy_whole(target, value)
        else:
            target.copy_(value)
    _set_learnt(model, state)


def _set_learnt(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Set delayed scaling's state, or the initial one if none was learnt. Quantized weights that modules kept are
    dropped, because they were made from other parameters."""
    for module in model.modules():
        reset = getattr(module, "reset_fp8_meta_tensors", None)
        if reset is not None:
            reset()
    # Torch loads it, because it knows modules that name it differently.
    model.load_state_dict({key: value for key, value in state.items() if key.endswith(_LEARNT)}, strict=False)


def _buffers(value: Any, local: QuantizedTensorStorage) -> list[tuple[str, Any]]:
    """Return (name, tensor) for each buffer of a quantized tensor, or of a DTensor's shard of rows, without padding."""
    extracted, meta = local.fsdp_extract_buffers()
    shards, along = dict(zip(meta["dims"], extracted, strict=True)), local._along_matrix() or {}
    kwargs = dict(local._FLATTEN_TENSOR_BUFFERS)
    found: list[tuple[str, Any]] = []
    for attribute, whole in local._buffers():
        buffer = shards.get(attribute, whole)
        columns = along[attribute][1] if attribute in along and len(local.shape) == 2 else None
        if columns is not None:  # also without the padding behind columns, which shards would cut
            buffer = buffer.narrow(columns[0], 0, cdiv(local.shape[1], columns[1]))
        if attribute in shards and isinstance(value, DTensor):
            placements = [Shard(meta["dims"][attribute]) if isinstance(p, Shard) else p for p in value.placements]
            buffer = DTensor.from_local(buffer, value.device_mesh, placements, run_check=False)
        found.append((kwargs[attribute], buffer))
    return found


def _tensors(extra: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    for name, value in extra.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"extra[{name!r}] is {type(value).__name__}: give a tensor, which is read without pickle")
    return extra


def _empty(key: str, meta: Any) -> torch.Tensor:
    if not isinstance(meta, TensorStorageMetadata):
        raise ValueError(f"{key} is no tensor in this checkpoint: give one that `save` wrote")
    return torch.empty(meta.size, dtype=meta.properties.dtype)
