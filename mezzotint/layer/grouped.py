"""The weights and biases of groups: each group has parameters of its own, `weight0`, `bias0`, …, or one parameter holds
those of all.

    single_grouped_weight    weight (G, out, in)      quantized: a GroupedTensor
    single_grouped_bias      bias (G, out)

The groups are slices of that parameter; their initial values and bits are those of parameters of their own. A state
dict of either form loads into the other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzotint.functional.grouped_linear import compute_grouped_weight_gradients, is_stack
from mezzotint.functional.linear import WeightGrad
from mezzotint.layer.base import Layer
from mezzotint.layer.parameters import high_precision_init, replace_parameter
from mezzotint.layer.weights import Weights, accumulate
from mezzotint.layer.wgrad import WeightGradStore
from mezzotint.tensor.grouped import GroupedTensor
from mezzotint.tensor.partition import Split
from mezzotint.tensor.quantized_tensor import QuantizedTensor


class GroupWeights(Weights):
    """A `GroupWeights` describes the weight and bias of one group of `count`. `stacks_weight` and `stacks_bias` say
    that they are slices of one parameter of all groups."""

    def __init__(
        self,
        group: int,
        count: int,
        in_features: int,
        out_features: int,
        bias: bool,
        init_method: Callable[[torch.Tensor], Any] | None,
        *,
        stacks_weight: bool,
        stacks_bias: bool,
        **split: Any,
    ) -> None:
        super().__init__("", in_features, out_features, bias, None, init_method, str(group), **split)
        self.group, self.count = group, count
        self.stacks = {"weight": stacks_weight, "bias": stacks_bias}
        self.weight_names = ["weight"] if stacks_weight else self.weight_names
        self.bias_names = ["bias"] if stacks_bias and bias else self.bias_names

    def register(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Register this group's parameters, uninitialized. A parameter of all groups is registered by the first
        group."""
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for kind, shape in shapes.items():
            name = kind if self.stacks[kind] else f"{kind}{self.group}"
            if self.stacks[kind] and self.group > 0:
                continue
            shape = (self.count, *shape) if self.stacks[kind] else shape
            is_there = name in (*self.weight_names, *self.bias_names)
            value = torch.empty(shape, device=device, dtype=dtype) if is_there else None
            module.register_parameter(name, None if value is None else nn.Parameter(value))
        self._mark(module)

    def is_plain(self) -> bool:
        return False  # they are read with `GroupedLayer._group_parameters`

    def _own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value[self.group] if self.stacks.get(name, False) else value

    def _reset_plain(self, module: Any, name: str, init: Callable[[torch.Tensor], Any]) -> None:
        value = getattr(module, name).data
        if not self.stacks["weight"] or not hasattr(value, "to_local"):
            self._draw(self._own(name, value), module, init)
            return
        # A slice of a DTensor may be a copy. So each rank draws all groups, as one rank alone would, and keeps its own.
        drawn = torch.empty(value.shape[1:], dtype=value.dtype, device=value.device)
        self._draw(drawn, module, init)
        _keep_part(value, self.group, drawn)

    def _mark(self, module: Any) -> None:
        super()._mark(module)
        if self.mode is not None:
            for name in (*self.weight_names, *self.bias_names):
                parameter = getattr(module, name)
                if self.stacks.get(name, False) and hasattr(parameter, "partition_dim"):
                    parameter.partition_dim += 1  # dimension 0 is that of groups

    def _reset_quantized(self, module: Any, name: str, gemm: int, init: Callable[[torch.Tensor], Any]) -> None:
        """Draw all groups in high precision, and quantize them together after the last one if they are one
        parameter."""
        if not self.stacks["weight"]:
            super()._reset_quantized(module, name, gemm, init)
            return
        old = getattr(module, name)
        if self.group == 0:
            self.check_quantizers(module)
            replace_parameter(module, name, torch.empty(old.shape, dtype=old.dtype, device=old.device))
        self._reset_plain(module, name, init)
        if self.group == self.count - 1:
            value, shapes = getattr(module, name).data, [tuple(old.shape[1:])] * self.count
            quantizer = self.weight_quantizer(module, gemm)
            made = GroupedTensor.make_grouped_tensor_with_shapes(self.count, shapes, quantizer, old.device, old.dtype)
            parameter = replace_parameter(module, name, made.quantize_(value))
            if self.preserves:
                high_precision_init(parameter, value)

    def splits(self, module: Any) -> tuple[Split, ...]:
        """Return how the weight is split over ranks; nothing for one weight of all groups, whose scales are those of
        this rank's shards."""
        return () if self.stacks["weight"] else super().splits(module)

    def join_weight(self) -> None:
        """Make the weight a slice of the parameter of all groups from now on."""
        self.stacks["weight"], self.weight_names = True, ["weight"]

    def check_quantizers(self, module: Any) -> None:
        """Raise if groups have quantizers of their own, because one weight of all groups has one quantizer."""
        assert self.init_recipe is not None
        first, *others = [module._live_quantizer(self.init_recipe, group, "weight") for group in range(self.count)]
        if not first._is_value() or any(other != first for other in others):
            raise ValueError(
                "single_grouped_weight with quantized_model_init, and a recipe by which groups have quantizers of "
                f"their own, such as {first}: one weight has one quantizer. Leave single_grouped_weight False, or give "
                "a recipe without state that is the same for all groups, such as Float8CurrentScaling"
            )


class GroupedLayer(Layer):
    """A `GroupedLayer` is the base of the grouped linears, module and operation: its `_weights` are `GroupWeights`."""

    _weights: tuple[GroupWeights, ...]
    _weight_names: tuple[str, ...]
    _bias_names: tuple[str, ...]
    _order: tuple[str, ...]

    def _init_groups(
        self, weights: tuple[GroupWeights, ...], device: torch.device, dtype: torch.dtype, delays_wgrad: bool
    ) -> None:
        """Register the parameters, set their initial values, and make the state."""
        self._weights = weights
        for group in weights:
            group.register(self, device, dtype)
        self._note_names()
        self._init_state(len(weights), device)
        if delays_wgrad:
            self.wgrad_stores = (WeightGradStore(compute_grouped_weight_gradients),)
        self.reset_parameters(defer_init=device.type == "meta")

    def _config_fields(self) -> dict[str, Any]:
        return {**super()._config_fields(), "is_grouped": True}

    def make_grouped_weights(self) -> None:
        """Join the weights of groups into one parameter, `weight`, as `single_grouped_weight` makes it from the start.

        `weight0`, `weight1`, … are no longer parameters of the module, and what was put on them is not on the new one:
        call this before an optimizer is made and before the module is sharded.
        """
        if self._weight_names == ("weight",):
            return
        old = [getattr(self, name) for name in self._weight_names]
        _check_joinable(dict(zip(self._weight_names, old, strict=True)))
        first, values, initial = self._weights[0], [weight.detach() for weight in old], _initial_values(old)
        if first.is_quantized:
            first.check_quantizers(self)
            quantizer, shapes = first.weight_quantizer(self, 0), [tuple(value.shape) for value in values]
            like = GroupedTensor.make_grouped_tensor_with_shapes(
                len(values), shapes, quantizer, values[0].device, values[0].dtype
            )
            made = stacked(values, like)
        else:
            made = torch.stack(values)
        parameter = nn.Parameter(made, old[0].requires_grad)
        if initial is not None:
            high_precision_init(parameter, initial)
        others = {name: value for name, value in self._parameters.items() if name not in self._weight_names}
        self._parameters.clear()
        self._parameters.update({"weight": parameter, **others})
        for group in self._weights:
            group.join_weight()
        self._note_names()
        first._mark(self)

    def _note_names(self) -> None:
        """Note which parameters there are, and their order."""
        self._weight_names = tuple(dict.fromkeys([name for group in self._weights for name in group.weight_names]))
        self._bias_names = tuple(dict.fromkeys([name for group in self._weights for name in group.bias_names]))
        self._order = tuple([name for name, parameter in self._parameters.items() if parameter is not None])

    def _group_parameters(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the weights and biases as autograd sees them: one for each group, or one for all."""
        weights = tuple([getattr(self, name) for name in self._weight_names])
        return weights, tuple([getattr(self, name) for name in self._bias_names])

    def _in_order(self, dws: tuple[Any, ...], dbs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients in the order of `parameters()`."""
        made = dict(zip((*self._weight_names, *self._bias_names), (*dws, *dbs), strict=False))
        return tuple([made.get(name) for name in self._order])

    def _weight_grads(self, weights: tuple[Any, ...]) -> tuple[WeightGrad, ...]:
        """Return where the gradient of each group's weight goes."""
        stacks, made = is_stack(weights, 2), []
        for gemm in range(self.num_gemms):
            wgrad = self._weight_grad(gemm, weights[0 if stacks else gemm], 0)
            wgrad.is_slice = stacks
            made.append(wgrad)
        return tuple(made)

    def _add_gradients(self, store: int, gradients: Any) -> None:
        for parameter, gradient in zip(self._group_parameters()[0], gradients, strict=True):
            accumulate(parameter, gradient)  # the one store has those of all groups

    def _split_parameters(self) -> dict[str, tuple[int, int]]:
        behind = {"weight": 1, "bias": 1}  # the dimension of groups
        return {
            name: (dim + behind.get(name, 0), stride) for name, (dim, stride) in super()._split_parameters().items()
        }

    def _gathered_weights(self) -> dict[str, int]:
        return {} if self._weight_names == ("weight",) else super()._gathered_weights()

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """Register a hook. FSDP2 does so after it has sharded a parameter; if that holds quantized weights of all
        groups, check that each rank has the same number of groups."""
        handle, weight = super().register_load_state_dict_post_hook(hook), self._parameters.get("weight")
        if weight is not None and self._weights[0].is_quantized and hasattr(weight, "placements"):
            _check_shards(weight)
        return handle

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for kind, names in (("weight", self._weight_names), ("bias", self._bias_names)):
            if names == (kind,):
                self._put_together(state_dict, f"{prefix}{kind}", getattr(self, kind))
            elif names:
                self._take_apart(state_dict, f"{prefix}{kind}", getattr(self, names[0]))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _put_together(self, state_dict: Any, key: str, like: torch.Tensor) -> None:
        """Replace the entries of one parameter for each group by that of all groups, in place. What does not fit is
        left, so that torch names it."""
        keys = [f"{key}{group}" for group in range(self.num_gemms)]
        shapes = [state_dict[each].shape for each in keys if each in state_dict]
        if key not in state_dict and shapes == [like.shape[1:]] * self.num_gemms:
            state_dict[key] = stacked([state_dict.pop(each) for each in keys], like)

    def _take_apart(self, state_dict: Any, key: str, like: torch.Tensor) -> None:
        """Replace the entry of all groups by one for each group, in place; the inverse of `_put_together`."""
        value = state_dict.get(key)
        if value is not None and value.dim() == like.dim() + 1 and f"{key}0" not in state_dict:
            for group, part in enumerate(state_dict.pop(key).unbind()):
                state_dict[f"{key}{group}"] = part


def stacked(values: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the values of groups as one tensor. Quantized values keep their bytes if the parameter that they are for,
    `like`, has the same format."""
    if not isinstance(like, GroupedTensor) or not all(isinstance(value, QuantizedTensor) for value in values):
        return torch.stack(values)
    made = torch.empty_like(like.detach())
    for member, value in zip(made.unbind(), values, strict=True):
        member.copy_(value)
    return made


def _check_joinable(weights: dict[str, torch.Tensor]) -> None:
    """Raise if these weights cannot become one parameter, or if something of them would be lost."""
    for name, weight in weights.items():
        if hasattr(weight, "placements"):
            raise ValueError(f"make_grouped_weights, and {name} is sharded: join weights before the module is sharded")
        if weight.grad is not None:
            raise ValueError(
                f"make_grouped_weights, and {name} has a gradient, which would be lost: use it, and set it to None "
                "with optimizer.zero_grad() or module.zero_grad()"
            )
    trained = {name: weight.requires_grad for name, weight in weights.items()}
    if len(set(trained.values())) > 1:
        raise ValueError(f"make_grouped_weights, and requires_grad is {trained}: one parameter has one answer")


def _initial_values(weights: list[Any]) -> torch.Tensor | None:
    """Return the values that quantized weights were made from, as one tensor, or None if they are not kept."""
    kept = [
        weight.get_high_precision_init_val() for weight in weights if hasattr(weight, "get_high_precision_init_val")
    ]
    there = [value for value in kept if value is not None]
    if there and len(there) < len(weights):
        raise ValueError(
            f"make_grouped_weights, and {len(there)} of {len(weights)} weights have the values that they were "
            "quantized from (get_high_precision_init_val): clear all of them first, or none"
        )
    return torch.stack(there) if there else None


def _check_shards(weight: Any) -> None:
    """Raise if the groups of a sharded GroupedTensor do not divide evenly over ranks; other tensors are gathered
    however they are split."""
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    count = math.prod([size for size, placement in sizes if placement.is_shard()])
    if weight.shape[0] % count or not isinstance(weight._local_tensor, GroupedTensor):
        raise ValueError(
            f"fully_shard of weight, {tuple(weight.shape)}, quantized, over {count} ranks by {weight.placements}: "
            "its groups must divide evenly, along the first dimension. Keep it in high precision (without "
            "quantized_model_init), or give single_grouped_weight=False"
        )


def _keep_part(whole: Any, group: int, value: torch.Tensor) -> None:
    """Write a group's value into this rank's shard of a DTensor."""
    local = whole.to_local()
    for chunk in whole.__create_chunk_list__():
        first, *begin = chunk.offsets
        place = tuple([slice(start, start + size) for start, size in zip(begin, local.shape[1:], strict=True)])
        if first <= group < first + local.shape[0]:
            local[group - first].copy_(value[place])
