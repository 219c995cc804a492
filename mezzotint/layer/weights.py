"""The weight and bias of one GEMM: a `Weights` makes them, whole, or split into named parts of one buffer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mezzotint.comm.agreement import check_agreed, without_addresses
from mezzotint.comm.gradients import local_shard
from mezzotint.comm.groups import rank_in, shard_size
from mezzotint.functional.linear import MainGrad
from mezzotint.layer.bind import of_tensor
from mezzotint.layer.parameters import (
    PlaceParameter,
    default_init,
    forked_rng,
    high_precision_init,
    local_features,
    replace_parameter,
    resolve_device,
    split_names,
)
from mezzotint.recipe import Rules, slot
from mezzotint.region import current_state
from mezzotint.tensor.float8 import Float8Quantizer
from mezzotint.tensor.partition import Split, join_shards, quantize_shard
from mezzotint.tensor.quantized_tensor import QuantizedTensor
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tracing import traced_as


def like_parameter(part: torch.Tensor, parameter: Any) -> Any:
    """Return this rank's shard of a gradient as a DTensor like its parameter."""
    whole = type(parameter).from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole.detach()


@torch.no_grad()
def accumulate(parameter: Any, gradient: torch.Tensor | None) -> None:
    """Add to the gradient of a parameter, as autograd does."""
    if gradient is not None and parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _check_same(name: str, quantizer: Any, splits: tuple[Split, ...]) -> None:
    """Check that all shards of a weight have one format: with different ones a rank would wait for amaxes that do not
    come."""
    for split in splits:
        check_agreed(split.group, **{f"the quantizer of {name}": without_addresses(quantizer)})


def one_below_other(parts: Sequence[torch.Tensor]) -> Any:
    """Return the parts of a weight, or of a bias, one below the other; None if there are none."""
    if len(parts) > 1:
        return torch.cat(list(parts))
    return parts[0] if parts else None


def _attributes(module: Any, names: Sequence[str]) -> Any:
    return one_below_other([getattr(module, name) for name in names])


@traced_as(_attributes)
def named(module: Any, names: Sequence[str]) -> Any:
    """Return the parameters of these names, one below the other; None if there are no names."""
    if len(names) == 1:  # `nn.Module` looks for an attribute in Python, after all else has failed
        found = module._parameters.get(names[0])
        return getattr(module, names[0]) if found is None else found
    return _attributes(module, names)


class Weights:
    """A `Weights` holds the names of a GEMM's parameters on a module, and how they are made. `prefix` is "fc1_", or ""
    for `weight`, `bias`."""

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        bias: bool,
        parameters_split: Any,
        init_method: Callable[[torch.Tensor], Any] | None,
        suffix: str = "",
        *,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        stride: int = 1,
    ) -> None:
        """Create the description of a weight; `in_features` and `out_features` are those of the whole. `stride` says
        how many weights it holds, one below the other; every rank has its shard of each."""
        self.stride, self.is_placed = stride, False
        self.in_features, self.out_features = in_features, out_features
        self.parts = split_names(parameters_split, out_features)
        self.sizes = list(self.parts.values()) or [out_features]
        self._take_part(parallel_mode, tp_size)
        if self.parts:
            self.weight_names = [f"{part}_weight" for part in self.parts]
            self.bias_names = [f"{part}_bias" for part in self.parts] if bias else []
        else:
            self.weight_names = [f"{prefix}weight{suffix}"]
            self.bias_names = [f"{prefix}bias{suffix}"] if bias else []
        self.init_method = init_method
        self.tracker: Callable[[], Any] | None = None
        self.tracker_name: str | None = None
        state = current_state()
        self.is_quantized, self.init_recipe = state.init_enabled, state.init_recipe
        self.preserves = state.preserves_init
        self.is_trained = torch.is_grad_enabled()  # else no backward reads the column-wise copy of a weight
        if self.is_quantized and self.parts:
            raise ValueError(
                "parameters_split with quantized_model_init: a quantized weight has no parts; leave it out. Query, key "
                "and value of MultiheadAttention and TransformerLayer are such parts: give fuse_qkv_params=True"
            )

    def _take_part(self, mode: str | None, tp_size: int) -> None:
        """Replace the sizes of the whole by those of this rank's shard."""
        self.mode, self.tp_size = mode, tp_size
        self.in_features, self.out_features = local_features(mode, tp_size, self.in_features, self.out_features)
        if mode == "column":
            named = zip(self.parts or ("out_features",), self.sizes, strict=True)
            stride = self.stride
            self.sizes = [stride * shard_size(f"the size of {name}", size // stride, tp_size) for name, size in named]
            self.parts = dict(zip(self.parts, self.sizes, strict=False))

    def check_split(self, mode: str, tp_size: int) -> None:
        """Raise if the whole parameters cannot be split like this."""
        if self.is_quantized:
            raise ValueError(
                "a weight of quantized_model_init cannot be split: make the modules with tp_group, or in high precision"
            )
        local_features(mode, tp_size, self.in_features, self.out_features)
        for size in self.sizes if mode == "column" else ():
            shard_size("a part's rows", size // self.stride, tp_size)

    def split_over(self, module: Any, mode: str, tp_size: int, place: PlaceParameter) -> None:
        """Replace the whole parameters by what `place` makes of them: DTensors, of which this rank has its shard."""
        self._take_part(mode, tp_size)
        dim = 0 if mode == "column" else 1
        for name in self.weight_names:
            setattr(module, name, place(getattr(module, name), dim, self.stride if dim == 0 else 1))
        for name in self.bias_names:
            setattr(module, name, place(getattr(module, name), None if dim else 0, self.stride))
        self.is_placed = True
        module._configure()

    def register(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Register uninitialized parameters; parts are slices of one buffer."""
        whole = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        for name, part in zip(self.weight_names, whole.split(self.sizes), strict=True):
            module.register_parameter(name, nn.Parameter(part))
        if not self.bias_names and not self.parts:
            module.register_parameter(self.weight_names[0].replace("weight", "bias"), None)
        whole = torch.empty(self.out_features if self.bias_names else 0, device=device, dtype=dtype)
        for name, part in zip(self.bias_names, whole.split(self.sizes) if self.bias_names else (), strict=True):
            module.register_parameter(name, nn.Parameter(part))
        self._mark(module)

    def reset(self, module: Any, gemm: int) -> None:
        """Set the initial values; parameters on the meta device become new tensors on the default device."""
        init = default_init if self.init_method is None else self.init_method
        if self.is_placed:
            raise RuntimeError("reset_parameters after parallelize_module: draw initial values first, then split them")
        for name in (*self.weight_names, *self.bias_names):
            parameter = getattr(module, name)
            if self.is_quantized and hasattr(parameter, "to_local"):  # FSDP2 would not know the new parameter
                raise RuntimeError(
                    f"reset_parameters after fully_shard, and {name} is quantized: draw initial values first"
                )
            if parameter.is_meta:
                value = torch.empty_like(parameter, device=resolve_device(None))
                setattr(module, name, nn.Parameter(value, parameter.requires_grad))
        with torch.no_grad(), forked_rng(self.tracker, self.tracker_name):
            for name in self.weight_names:
                if self.is_quantized and not self.is_ruled_out(module, gemm):
                    self._reset_quantized(module, name, gemm, init)
                else:
                    self._reset_plain(module, name, init)
            for name in self.bias_names:
                getattr(module, name).data.zero_()
        self._mark(module)

    def _own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this GEMM's part of a parameter, or of another tensor of its shape."""
        return value

    def _reset_plain(self, module: Any, name: str, init: Callable[[torch.Tensor], Any]) -> None:
        self._draw(getattr(module, name).data, module, init)

    def _draw(self, value: torch.Tensor, module: Any, init: Callable[[torch.Tensor], Any]) -> None:
        """Draw initial values into `value`. A shard is cut out of the whole weight, so that ranks with one seed have
        the same weights as one rank alone. With a tracker, which has a generator of its own for each rank, and before
        there is a group, `value` itself is drawn."""
        if self.mode is None or self.tp_size == 1 or module.tp_group is None or self.tracker is not None:
            init(value)
            return
        dim = 0 if self.mode == "column" else 1
        shape = list(value.shape)
        shape[dim] *= self.tp_size
        whole = torch.empty(shape, dtype=value.dtype, device=value.device)
        init(whole)
        pieces = whole.chunk(self.stride, dim)
        value.copy_(torch.cat([piece.chunk(self.tp_size, dim)[rank_in(module.tp_group)] for piece in pieces], dim))

    def _mark(self, module: Any) -> None:
        """Set upstream's attributes, which tell how a parameter is split, and which gradients come from some tokens
        only."""
        if self.mode is None:
            return
        for name in (*self.weight_names, *self.bias_names):
            parameter = getattr(module, name)
            if self.mode == "row" and name in self.bias_names:
                parameter.sequence_parallel = module.sequence_parallel
                continue
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 0 if self.mode == "column" else 1
            parameter.partition_stride = self.stride

    def _reset_quantized(self, module: Any, name: str, gemm: int, init: Callable[[torch.Tensor], Any]) -> None:
        old = getattr(module, name)
        value = torch.empty(old.shape, dtype=old.dtype, device=old.device)
        self._draw(value, module, init)
        quantizer = self.weight_quantizer(module, gemm)
        splits = self.splits(module)
        _check_same(name, quantizer, splits)
        made, _ = quantize_shard(value, quantizer, splits, is_parameter=True)
        if not isinstance(made, torch.Tensor):
            raise TypeError(
                f"quantized_model_init, and {type(quantizer).__name__}.quantize of {name} gave "
                f"{type(made).__name__}, which is no tensor and so no parameter: build the module outside of "
                "quantized_model_init, where its weights are quantized when they are used"
            )
        parameter = replace_parameter(module, name, made)
        if self.preserves:
            high_precision_init(parameter, value)

    def weight_quantizer(self, module: Any, gemm: int) -> Quantizer:
        """Return the quantizer of a weight that a module keeps quantized. It is row-wise only in a module that was made
        under `torch.no_grad()`, for inference."""
        assert self.init_recipe is not None
        quantizer = module._live_quantizer(self.init_recipe, gemm, "weight")
        return quantizer if self.is_trained else quantizer.with_usage(rowwise=True, columnwise=False)

    def is_ruled_out(self, module: Any, gemm: int) -> bool:
        """Return whether rules leave a weight in high precision that would otherwise be kept quantized."""
        return isinstance(self.init_recipe, Rules) and of_tensor(module, self.init_recipe, gemm, "weight") is None

    def check_rule(self, module: Any, gemm: int, name: str, rules: Rules, recipe: Any) -> None:
        """Raise a ValueError if these rules made a weight that is kept quantized under another name than its module has
        in the model, and have another recipe for that name."""
        weight: Any = module._parameters.get(self.weight_names[0])
        if not self.is_quantized or self.init_recipe != rules or weight is None or weight.is_meta:
            return
        asked = None if recipe is None else recipe.of(gemm, "weight")
        made = of_tensor(module, self.init_recipe, gemm, "weight")
        if asked != made:
            raise ValueError(
                f"the weight of {name!r} was made in quantized_model_init under the name {module._name!r}, for which "
                "the rules have another recipe: make the module with name=, its path in the model"
            )

    def splits(self, module: Any) -> tuple[Split, ...]:
        """Return how the weight is split, which a quantized one must know; the tuple is empty before there is a
        group."""
        if self.mode is None or self.tp_size == 1 or module.tp_group is None:
            return ()
        return (Split(0 if self.mode == "column" else 1, module.tp_group),)

    def share(self, module: Any) -> None:
        """Tell quantized weights how they are split if they do not know it: after another group was set, or a state
        dict loaded. This is a collective. A weight that FSDP2 has sharded is told when it is gathered."""
        splits = self.splits(module)
        for name in self.weight_names if self.is_quantized else ():
            weight = getattr(module, name)
            if not isinstance(weight, QuantizedTensor) or weight.is_meta or weight._splits == splits:
                continue
            quantizer = weight._quantizer
            if quantizer is not None and not quantizer.is_custom():
                _check_same(name, quantizer, splits)
                with torch.no_grad():
                    join_shards(weight, splits)

    def tie(self, module: Any, gemm: int) -> None:
        """Make the quantizer of a weight that delayed scaling keeps quantized use the module's own scales and
        history."""
        for name in self.weight_names:
            weight: Any = module._parameters.get(name)
            weight = getattr(weight, "_local_tensor", weight)
            quantizer = weight._quantizer if isinstance(weight, QuantizedTensor) else None
            if isinstance(quantizer, Float8Quantizer) and weight.device == module.scale_fwd.device:
                i, made = slot(gemm, "weight"), quantizer.copy()  # another module may hold the same object
                made.scale, made.amax = module.scale_fwd[i : i + 1], module.amax_history_fwd[0, i : i + 1]
                weight._quantizer = made

    def is_plain(self) -> bool:
        """Return whether the weight is a parameter of the module as it is, or several, one below the other."""
        return not self.is_placed

    def weight(self, module: nn.Module) -> torch.Tensor:
        """Return the weight (out, in), differentiably."""
        if not self.is_placed:
            return named(module, self.weight_names)
        return one_below_other([local_shard(getattr(module, name)) for name in self.weight_names])

    def bias(self, module: Any) -> Any:
        """Return the bias [out], or None."""
        if not self.is_placed:
            return named(module, self.bias_names)
        group = module.tp_group if module.sequence_parallel and self.mode == "row" else None  # added to own tokens only
        return one_below_other([local_shard(getattr(module, name), group) for name in self.bias_names])

    def main_grads(self, module: nn.Module) -> tuple[MainGrad, ...]:
        """Return the tensors to which the gradients of the weight, or of its parts, are added."""
        found = []
        for name, rows in zip(self.weight_names, self.sizes, strict=True):
            weight = getattr(module, name)
            into = getattr(weight, "main_grad", None) if weight.requires_grad else None
            into = local_shard(into) if self.is_placed and hasattr(into, "to_local") else into
            if into is None and weight.requires_grad:
                raise ValueError(f"fuse_wgrad_accumulation needs {name}.main_grad, a tensor to add into: set it first")
            into = into if into is None else self._own(name, into)
            found.append(MainGrad(rows, into, bool(getattr(weight, "overwrite_main_grad", False))))
        return tuple(found)

    def tell_added(self, module: nn.Module) -> bool:
        """Mark the parameters that want to be told that `main_grad` has their gradient, and return whether there are
        any. Megatron's data parallelism asks for it (`grad_added_to_main_grad`), and waits for each to get some `grad`,
        which it throws away."""
        told = False
        for name in self.weight_names if torch.is_grad_enabled() else ():
            weight = getattr(module, name)
            if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = told = True
        return told

    def add_gradient(self, module: nn.Module, gradient: torch.Tensor | None) -> None:
        """Add the weight's gradient to that of its parameter, or of its parts."""
        if gradient is None:  # it went to `main_grad`
            return
        for name, part in zip(self.weight_names, gradient.split(self.sizes), strict=True):
            weight = getattr(module, name)
            accumulate(weight, like_parameter(part, weight) if self.is_placed else part)
