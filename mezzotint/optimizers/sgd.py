"""FusedSGD: it does gradient descent with momentum for plain and quantized parameters."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.optimizer import Tensors, sgd_
from mezzotint.optimizers.base import (
    FusedOptimizer,
    by_device,
    check_not_negative,
    in_fp32,
    learning_rate,
    local,
    loss_of,
    write_back,
)


class FusedSGD(FusedOptimizer):
    """This optimizer is SGD with momentum, dampening and Nesterov momentum like `torch.optim.SGD`, computed in FP32,
    for plain and quantized parameters.

    The state of a parameter with momentum is `momentum_buffer` and `step`, both FP32.

    Args:
        params: The parameters, or groups of parameters as dicts, as every optimizer of PyTorch takes them. They may be
            quantized.
        lr: The learning rate, a number or a tensor.
        momentum: The factor of the momentum. The default is 0, for none.
        dampening: How much less of the gradient goes into the momentum. The default is 0.
        weight_decay: The factor of the weight decay. The default is 0.
        nesterov: Whether it is Nesterov momentum. The default is False.
        wd_after_momentum: Whether weight decay is added to what the momentum gives instead of to the gradient. The
            default is False.
        materialize_master_grads: It is accepted and has no effect: gradients are read as they are.
        set_grad_none: A former option that gives a DeprecationWarning: give `set_to_none` to `zero_grad` instead. The
            default is None.

    Raises:
        ValueError: If a rate is negative, or `nesterov` is given without a momentum or with dampening.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(16, 16, device="cpu")
        >>> optimizer = mz.optimizers.FusedSGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.randn(4, 16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[layer.weight])
        ['momentum_buffer', 'step']
    """

    _OPTIONS = (*FusedOptimizer._OPTIONS, "materialize_master_grads", "wd_after_momentum")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov is True with momentum={momentum} and dampening={dampening}: give a momentum and no dampening"
            )
        self.wd_after_momentum = bool(wd_after_momentum)
        self.materialize_master_grads = bool(materialize_master_grads)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": bool(nesterov),
        }
        super().__init__(params, defaults, set_grad_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, also that of torch.optim.SGD."""
        super().load_state_dict(state_dict)
        for param, given in self._given_states(state_dict):
            buffer = given.get("momentum_buffer")
            self.state.pop(param, None)
            if buffer is not None:
                buffer = buffer.detach().to(param.device, torch.float32, copy=True).contiguous()
                step = torch.ones((), dtype=torch.float32, device=param.device)
                self.state[param] = {"momentum_buffer": buffer, "step": step}

    def _init_group(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, buffers: Tensors, steps: Tensors
    ) -> None:
        """Collect what a step of the group reads and writes. The compiler runs a method of this name, and does not
        trace it."""
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            params.append(local(param))
            grads.append(grad)
            if group["momentum"] == 0:
                continue
            state = self.state[param]
            if len(state) == 0:
                options: dict[str, Any] = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
                state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False, **options)
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            buffers.append(local(state["momentum_buffer"]))
            steps.append(state["step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient once, and return the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params: Tensors = []
            grads: Tensors = []
            buffers: Tensors = []
            steps: Tensors = []
            self._init_group(group, params, grads, buffers, steps)
            for at in by_device(params):
                held = ([buffers[i] for i in at], [steps[i] for i in at]) if buffers else ([], [])
                self._step_device(group, [params[i] for i in at], [grads[i] for i in at], *held)
        return loss

    def _step_device(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, buffers: Tensors, steps: Tensors
    ) -> None:
        values = in_fp32(params)
        grads = in_fp32(grads)
        lr, lr_value = learning_rate(group["lr"], params[0].device)
        rates = (lr_value, group["momentum"], group["dampening"], group["weight_decay"])
        run_op(sgd_, values, grads, buffers, steps, lr, None, *rates, group["nesterov"], self.wd_after_momentum)
        if steps:
            torch._foreach_add_(steps, 1.0)
        write_back(params, values, None)
