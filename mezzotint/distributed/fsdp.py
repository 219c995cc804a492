"""FSDP2 with weights in high precision, which are gathered in low precision.

    low_precision_gather(model, recipe)      # first; before or after parallelize_module with styles of this package
    for block in model.blocks:
        fully_shard(block)                   # torch's own
    fully_shard(model)

Each rank keeps its shard of a weight in high precision, quantizes it as the whole is quantized (the amax, if the format
has one for the tensor or for a column, is the largest over all shards) and sends bytes. The parameter that the module
then finds is a quantized tensor, which the GEMMs take as it is. A backward that gathers again uses the amaxes, and the
scale of delayed scaling, of the forward before it; so does the next of several microbatches (`is_first_microbatch`). If
a weight has two copies, `tensor/fsdp_directions.py` says which of them are sent.

A weight is gathered in high precision if its rows do not divide evenly over the ranks, if shards would cut blocks, if
another module has it as well, and in formats that do not allow it (a user's own quantizers, a hybrid whose column-wise
copy is made from the row-wise one and needs an amax of the whole).
"""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mezzotint.constants import cdiv
from mezzotint.layer.bind import of_module
from mezzotint.recipe import Rules
from mezzotint.tensor.fsdp import make_whole, send, sendable_directions
from mezzotint.tensor.fsdp_directions import Unit, check_one_format, in_backward
from mezzotint.tensor.partition import Split, share_amax, whole_amaxes
from mezzotint.tensor.quantize import quantize_storage
from mezzotint.tensor.storage import QuantizedTensorStorage

_aten = torch.ops.aten

# FSDP2 and moves between devices do these to a parameter; the results of everything else are plain tensors.
_KEEPS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}


class ShardedWeight(torch.Tensor):
    """A `ShardedWeight` is a weight or shard in high precision, which FSDP2 gathers as the module's recipe quantizes
    it."""

    _tensor: torch.Tensor
    _recipe: Any
    _gemm: int
    _used: Any  # of the last forward: its quantizer and the amaxes of the whole
    _unit: Unit | None  # its place in FSDP2's bookkeeping

    @staticmethod
    def __new__(cls: Any, tensor: torch.Tensor, recipe: Any, gemm: int) -> "ShardedWeight":
        made = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        made._tensor, made._recipe, made._gemm, made._used, made._unit = tensor, recipe, gemm, None, None
        return made

    def __init__(self, *args: Any) -> None:
        pass  # __new__ has set everything

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self._tensor!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_tensor"], (self._recipe, self._gemm)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return ShardedWeight(inner["_tensor"], *context)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._tensor.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found: list[ShardedWeight] = []

        def plain(x: ShardedWeight) -> torch.Tensor:
            found.append(x)
            return x._tensor

        plain_args, plain_kwargs = pytree.tree_map_only(ShardedWeight, plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for weight in found:
                weight._used = None  # these were of the old values
        if func._schema.name.endswith("_") and isinstance(args[0], ShardedWeight):
            return args[0]
        if func not in _KEEPS:
            return result
        like = found[0]
        return pytree.tree_map_only(torch.Tensor, lambda t: ShardedWeight(t, like._recipe, like._gemm), result)

    # FSDP2

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what to gather, and what `fsdp_post_all_gather` must know: None for a weight in high precision."""
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"a weight of shape {tuple(outer_size)} is in shards of shape {tuple(self.shape)}: "
                "low_precision_gather gathers shards of rows; leave shard_placement_fn, or give Shard(0)"
            )
        shard = self._tensor.to(mp_policy.param_dtype or self._tensor.dtype)
        count, rows, is_backward = mesh.size(), cdiv(outer_size[0], mesh.size()), in_backward()
        quantizer = module._live_quantizer(self._recipe, self._gemm, "weight")
        check_one_format(quantizer, self.device, module, mesh.get_group())
        which = sendable_directions(quantizer, rows)
        if which is None or outer_size[0] % count:
            missing = rows - shard.shape[0]
            return (torch.nn.functional.pad(shard, (0, 0, 0, missing)) if missing else shard,), None
        # The rows are split over the mesh, and the tensor that they belong to over the ranks that share the weight.
        live, splits, parallel = quantizer, [Split(0, mesh.get_group())], module._parallel(self._gemm)
        if parallel is not None:
            splits += parallel.splits("weight")
        if is_backward and self._used is not None:
            quantizer, amaxes = self._used
        else:
            amaxes = whole_amaxes(shard, quantizer, splits)
            if self._used is not None and module._weight_scales is not None:
                quantizer = self._used[0]  # the next microbatch uses the scale of the first
            self._used = quantizer.frozen(), amaxes
        storage = quantize_storage(shard, quantizer, **amaxes)
        if not is_backward:
            share_amax(live, splits)
        buffers, sent = send(storage, self, which, mesh, module)
        return buffers, (outer_size, quantizer, sent)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the whole weight and the buffers that FSDP2 frees, or fill `out` (a DTensor in tensor parallelism)."""
        out = out._local_tensor if isinstance(out, DTensor) else out
        if metadata is not None:
            return make_whole(all_gather_outputs, metadata, param_dtype, out)
        return None if out is not None else (all_gather_outputs[0], ())


def low_precision_gather(model: nn.Module, recipe: Any = None, *, one_direction: bool | None = None) -> nn.Module:
    """Let FSDP2 gather the weights of the model's matrix products as `recipe` quantizes them. Call it before
    `fully_shard`.

    In the state dict weights are what they would be without this: plain tensors, sharded after `fully_shard`.

    Args:
        model: The model, before `fully_shard` is called on it.
        recipe: The recipe that the model trains with; if it is `Rules`, the model must have been bound to them
            (`bind_rules`). Quantized weights (`quantized_model_init`) need none.
        one_direction: Which copies are sent, for formats that hold two copies of a weight of which one cannot be made
            from the other (MXFP8 in blocks of 1x32). None (the default) sends what is read until FSDP2 gathers again:
            the row-wise copy for forward, the column-wise one for backward. It sends both if FSDP2 keeps the weight for
            backward (`reshard_after_forward=False`), and for a backward that computes forward again (activation
            checkpointing) or may do so (compiled modules). False sends both. True always sends one, also of compiled
            modules: a forward that is computed again then raises an error in eager code, and reads NaN in a graph.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is no module, or `one_direction` is none of the three.
        ValueError: If a weight is sharded already, or neither quantized nor given a recipe; or if the recipe computes
            backward in high precision.

    Example:
        >>> import mezzotint as mz
        >>> from mezzotint.distributed import low_precision_gather
        >>> model = mz.Linear(64, 64, device="cpu")
        >>> model = low_precision_gather(model, mz.recipe.MXFP8BlockScaling())  # then fully_shard(model)
        >>> model.state_dict()["weight"].shape
        torch.Size([64, 64])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}: give an nn.Module")
    if one_direction is not None and not isinstance(one_direction, bool):
        raise TypeError(f"one_direction is {one_direction!r}: give True, False or None")
    if recipe is not None and recipe.override() == "high_precision":
        raise ValueError(
            "recipe has backward_override='high_precision', which reads the weight as it is: leave low_precision_gather"
        )
    recipe = None if recipe is None else recipe.frozen()
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for module in model.modules():
        names: dict[str, int] = getattr(module, "_gathered_weights", dict)()
        names = {name: gemm for name, gemm in names.items() if uses[id(getattr(module, name))] == 1}
        if names:
            module.gathers_one_direction = one_direction  # type: ignore[assignment]
        if isinstance(recipe, Rules) and names:  # weights that rules keep in high precision are gathered so
            own = of_module(module, recipe)
            chosen = {name: None if own is None else own.of(gemm, "weight") for name, gemm in names.items()}
            names = {name: gemm for name, gemm in names.items() if chosen[name] is not None}
        else:
            chosen = dict.fromkeys(names, recipe)
        wrapped = [name for name, gemm in names.items() if _wrap_weight(module, name, chosen[name], gemm)]
        if wrapped:
            module.register_state_dict_post_hook(_unwrap)
    return model


def _wrap_weight(module: Any, name: str, recipe: Any, gemm: int) -> bool:
    """Wrap the weight if it is in high precision, and return whether it was."""
    weight = getattr(module, name)
    local = weight
    if isinstance(weight, DTensor):
        local = weight._local_tensor
        if module._is_fully_sharded or not module._weights[gemm].is_placed:  # not made by a style
            raise ValueError(f"{name} is in shards already: call low_precision_gather first, before fully_shard")
    if isinstance(local, QuantizedTensorStorage):
        return False
    if recipe is None:
        raise ValueError(f"recipe is None and {name} is not quantized: give the recipe that the model trains with")
    if isinstance(local, ShardedWeight):
        raise ValueError(f"{name} is gathered in low precision already: call low_precision_gather once")
    setattr(module, name, nn.Parameter(wrap(weight.detach(), recipe, gemm), weight.requires_grad))
    return True


def wrap(weight: torch.Tensor, recipe: Any, gemm: int) -> torch.Tensor:
    """Return a weight, or a DTensor of which this rank has a shard, as one that FSDP2 gathers in low precision."""
    if isinstance(weight, DTensor):
        return _over(weight, ShardedWeight(weight._local_tensor, recipe, gemm))
    return ShardedWeight(weight, recipe, gemm)


def _over(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return `local` as this rank's shard of a DTensor that is split as `like` is."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _unwrap(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace, in a state dict, wrapped weights by plain tensors, or DTensors of plain shards, over the same memory."""
    for name in module._parameters:
        value = state_dict.get(f"{prefix}{name}")
        if isinstance(value, ShardedWeight):
            state_dict[f"{prefix}{name}"] = value._tensor
        elif isinstance(value, DTensor) and isinstance(value._local_tensor, ShardedWeight):
            state_dict[f"{prefix}{name}"] = _over(value, value._local_tensor._tensor)
