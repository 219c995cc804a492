"""The weights and biases of groups: a parameter for each, `weight0`, `bias0`, …, or one that holds those of all.

    single_grouped_weight    weight (G, out, in)      quantized: a GroupedTensor
    single_grouped_bias      bias (G, out)

Groups are slices of it, initial values and bits those of parameters of their own. A state dict of either form loads
into the other.
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
    """Of one group of `count`; `stacks_weight`, `stacks_bias`: a slice of the parameter of all."""

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
        """The first group registers what is one parameter."""
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
        return False  # `GroupedLayer._group_parameters` has them

    def _own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value[self.group] if self.stacks.get(name, False) else value

    def _reset_plain(self, module: Any, name: str, init: Callable[[torch.Tensor], Any]) -> None:
        value = getattr(module, name).data
        if not self.stacks["weight"] or not hasattr(value, "to_local"):
            self._draw(self._own(name, value), module, init)
            return
        # A slice of a DTensor may be a copy. So each process draws all groups, as one process does, and keeps its own.
        drawn = torch.empty(value.shape[1:], dtype=value.dtype, device=value.device)
        self._draw(drawn, module, init)
        _keep_part(value, self.group, drawn)

    def _mark(self, module: Any) -> None:
        super()._mark(module)
        if self.mode is not None:
            for name in (*self.weight_names, *self.bias_names):
                parameter = getattr(module, name)
                if self.stacks.get(name, False) and hasattr(parameter, "partition_dim"):
                    parameter.partition_dim += 1  # behind that of groups

    def _reset_quantized(self, module: Any, name: str, gemm: int, init: Callable[[torch.Tensor], Any]) -> None:
        """All groups are drawn in high precision before they are quantized."""
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
        """One weight of all groups has scales of this process's parts."""
        return () if self.stacks["weight"] else super().splits(module)

    def join_weight(self) -> None:
        """Take the weight as a slice of the parameter of all groups from now on."""
        self.stacks["weight"], self.weight_names = True, ["weight"]

    def check_quantizers(self, module: Any) -> None:
        """Raise where groups have quantizers of their own, since one weight of all groups has one."""
        assert self.init_recipe is not None
        first, *others = [module._live_quantizer(self.init_recipe, group, "weight") for group in range(self.count)]
        if not first._is_value() or any(other != first for other in others):
            raise ValueError(
                "single_grouped_weight with quantized_model_init, and a recipe by which groups have quantizers of "
                f"their own, such as {first}: one weight has one quantizer. Leave single_grouped_weight False, or give "
                "a recipe without state that is the same for all groups, such as Float8CurrentScaling"
            )


class GroupedLayer(Layer):
    """Mixed into the grouped linears, module and operation: `_weights` are `GroupWeights`."""

    _weights: tuple[GroupWeights, ...]
    _weight_names: tuple[str, ...]
    _bias_names: tuple[str, ...]
    _order: tuple[str, ...]

    def _init_groups(
        self, weights: tuple[GroupWeights, ...], device: torch.device, dtype: torch.dtype, delays_wgrad: bool
    ) -> None:
        """Parameters with their initial values, and state."""
        self._weights = weights
        for group in weights:
            group.register(self, device, dtype)
        self._note_names()
        self._init_state(len(weights), device)
        if delays_wgrad:
            self.wgrad_stores = (WeightGradStore(compute_grouped_weight_gradients),)
        self.reset_parameters(defer_init=device.type == "meta")

    def make_grouped_weights(self) -> None:
        """Join the weights of groups into one parameter, `weight`, as `single_grouped_weight` makes it from the start.

        `weight0`, `weight1`, … are no parameters of the module any more, and what was put on them is not on the new
        one: do it before an optimizer is made and before the module is sharded.
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
        """Weights and biases as autograd sees them: of each group, or one of all."""
        weights = tuple([getattr(self, name) for name in self._weight_names])
        return weights, tuple([getattr(self, name) for name in self._bias_names])

    def _in_order(self, dws: tuple[Any, ...], dbs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients in the order of `parameters()`."""
        made = dict(zip((*self._weight_names, *self._bias_names), (*dws, *dbs), strict=False))
        return tuple([made.get(name) for name in self._order])

    def _weight_grads(self, weights: tuple[Any, ...]) -> tuple[WeightGrad, ...]:
        """Where the gradient of each group's weight goes."""
        stacks, made = is_stack(weights, 2), []
        for gemm in range(self.num_gemms):
            wgrad = self._weight_grad(gemm, weights[0 if stacks else gemm], 0)
            wgrad.is_slice = stacks
            made.append(wgrad)
        return tuple(made)

    def _add_gradients(self, store: int, gradients: Any) -> None:
        for parameter, gradient in zip(self._group_parameters()[0], gradients, strict=True):
            accumulate(parameter, gradient)  # the one store has those of all

    def _split_parameters(self) -> dict[str, tuple[int, int]]:
        behind = {"weight": 1, "bias": 1}  # the dimension of groups
        return {
            name: (dim + behind.get(name, 0), stride) for name, (dim, stride) in super()._split_parameters().items()
        }

    def _gathered_weights(self) -> dict[str, int]:
        return {} if self._weight_names == ("weight",) else super()._gathered_weights()

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """FSDP2 has cut a parameter: of groups in one, each process must have as many as the others."""
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
        """Entries of a parameter for each group → the one of all. What does not fit is left for torch to name."""
        keys = [f"{key}{group}" for group in range(self.num_gemms)]
        shapes = [state_dict[each].shape for each in keys if each in state_dict]
        if key not in state_dict and shapes == [like.shape[1:]] * self.num_gemms:
            state_dict[key] = stacked([state_dict.pop(each) for each in keys], like)

    def _take_apart(self, state_dict: Any, key: str, like: torch.Tensor) -> None:
        """The inverse."""
        value = state_dict.get(key)
        if value is not None and value.dim() == like.dim() + 1 and f"{key}0" not in state_dict:
            for group, part in enumerate(state_dict.pop(key).unbind()):
                state_dict[f"{key}{group}"] = part


def stacked(values: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Values of groups as one tensor. Quantized ones keep their bytes where the parameter that they are for has the
    same format."""
    if not isinstance(like, GroupedTensor) or not all(isinstance(value, QuantizedTensor) for value in values):
        return torch.stack(values)
    made = torch.empty_like(like.detach())
    for member, value in zip(made.unbind(), values, strict=True):
        member.copy_(value)
    return made


def _check_joinable(weights: dict[str, torch.Tensor]) -> None:
    """Raise where one parameter cannot be what these are, or where something of them would be lost."""
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
    """Return the values that quantized weights were made from, as one tensor; None where they are not kept."""
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
    """Of a GroupedTensor; others are gathered however they are cut."""
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    count = math.prod([size for size, placement in sizes if placement.is_shard()])
    if weight.shape[0] % count or not isinstance(weight._local_tensor, GroupedTensor):
        raise ValueError(
            f"fully_shard of weight, {tuple(weight.shape)}, quantized, over {count} processes by {weight.placements}: "
            "its groups must divide evenly, along the first dimension. Keep it in high precision (without "
            "quantized_model_init), or give single_grouped_weight=False"
        )


def _keep_part(whole: Any, group: int, value: torch.Tensor) -> None:
    """Write a group's value into what this process has of it in a DTensor."""
    local = whole.to_local()
    for chunk in whole.__create_chunk_list__():
        first, *begin = chunk.offsets
        place = tuple([slice(start, start + size) for start, size in zip(begin, local.shape[1:], strict=True)])
        if first <= group < first + local.shape[0]:
            local[group - first].copy_(value[place])
