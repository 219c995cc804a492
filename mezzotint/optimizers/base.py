"""The base of Adam and SGD: it says which parameters they take, where gradients come from, and how values become FP32
and back.

A step computes in FP32, on the parameter itself if it is FP32, else on a copy, and writes the result back: rounded into
FP16 and BF16, quantized into quantized parameters, in place, by the quantizer that each has. Parameters that are
DTensors are updated shard by shard.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mezzotint.constants import HIGH_PRECISION
from mezzotint.tensor.quantized_tensor import QuantizedTensor


class FusedOptimizer(torch.optim.Optimizer):
    """The base of `FusedAdam` and `FusedSGD`, which handles what parameters and gradients may be."""

    use_decoupled_grad: bool = False

    _OPTIONS: ClassVar[tuple[str, ...]] = ("set_grad_none",)  # attributes that a copy of the optimizer has, too

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool | None) -> None:
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated: give set_to_none to zero_grad instead", DeprecationWarning, stacklevel=3
            )
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._OPTIONS}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():  # a state dict of another optimizer class has other options
                group.setdefault(name, value)

    def _given_states(self, state_dict: dict[str, Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Return each parameter with what a state dict has for it, as it was given, because the base class casts it to
        the parameter's dtype. A step that is saved for a group is that of each of its parameters."""
        params = [param for group in self.param_groups for param in group["params"]]
        given = []
        for group in state_dict["param_groups"]:
            step = {"step": group["step"]} if "step" in group else {}
            given += [{**step, **state_dict["state"].get(index, {})} for index in group["params"]]
        return list(zip(params, given, strict=True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in HIGH_PRECISION:
                self.param_groups.pop()
                raise TypeError(
                    f"params has one of dtype {param.dtype}: {type(self).__name__} takes float32, float16, bfloat16 "
                    "and quantized parameters; give the others to an optimizer of torch.optim"
                )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros; None means as the constructor was told, else drop."""
        if set_to_none is None:
            set_to_none = True if self.set_grad_none is None else self.set_grad_none
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is None:
                    continue
                if set_to_none:
                    param.decoupled_grad = None
                else:
                    param.decoupled_grad.zero_()

    def _gradient(self, param: Any) -> torch.Tensor | None:
        """Return the gradient of this rank's shard of the parameter, or None."""
        grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a sparse gradient, which {type(self).__name__} does "
                "not take: use torch.optim.SparseAdam, or an embedding with sparse=False"
            )
        if is_sharded(grad) and is_sharded(param) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        return local(grad)


def is_sharded(x: Any) -> bool:
    """Return whether x is a DTensor."""
    return hasattr(x, "_local_tensor")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure given to `step` computes, with gradients enabled, or None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local(x: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, and any other tensor itself."""
    # This is not `to_local()`, which is a view: a quantized shard knows the other ranks by an attribute.
    return x._local_tensor if is_sharded(x) else x


def like(value: torch.Tensor, x: Any) -> Any:
    """Return a shard as a DTensor if `x`, which it belongs to, is one."""
    if not is_sharded(x):
        return value
    place = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return type(x).from_local(value, x.device_mesh, x.placements, **place)


def is_own_master(param: torch.Tensor) -> bool:
    """Return whether a step computes on the parameter itself."""
    return not isinstance(param, QuantizedTensor) and param.dtype == torch.float32 and param.is_contiguous()


def in_fp32(tensors: list[Any]) -> list[torch.Tensor]:
    """Return the FP32, contiguous tensors that a step computes on: the tensors themselves, or copies, made at once."""
    values: list[torch.Tensor] = []
    copies, sources = [], []
    for x in tensors:
        if isinstance(x, QuantizedTensor):
            alias: Any = x.detach()
            values.append(alias.dequantize(dtype=torch.float32))
        elif is_own_master(x):
            values.append(x)
        else:
            values.append(torch.empty(x.shape, dtype=torch.float32, device=x.device))
            copies.append(values[-1])
            sources.append(x)
    if copies:
        torch._foreach_copy_(copies, sources)
    return values


def write_back(params: list[torch.Tensor], values: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
    """Write new values to the parameters that were not computed on; quantized ones do not change if `found_inf` is
    1."""
    plain, rounded = [], []
    for param, value in zip(params, values, strict=True):
        if isinstance(param, QuantizedTensor):
            param.quantize_(value, noop_flag=found_inf)
        elif not is_own_master(param):
            plain.append(param)
            rounded.append(value)
    if plain:
        torch._foreach_copy_(plain, rounded)


def by_device(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors, in one list for each device."""
    found: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.device, []).append(i)
    return list(found.values())


def learning_rate(lr: Any, device: torch.device) -> tuple[torch.Tensor | None, float]:
    """Return the learning rate as the kernels take it: (tensor on the device, 0.0) or (None, number)."""
    return (lr.to(device).view(()), 0.0) if isinstance(lr, torch.Tensor) else (None, float(lr))


def check_not_negative(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ValueError(f"{name} is {value!r}: give a number of 0 or more")
