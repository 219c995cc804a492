"""One step of Adam and of SGD: PyTorch's fused kernels update many contiguous FP32 tensors of one device.

    Adam   m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²,  p -= lr · (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)
           weight decay λ: decoupled p *= 1 - lr · λ before, else g += λ p before
    SGD    g += λ p,  b = μ b + (1 - dampening) g (first step: b = g),  p -= lr · b (Nesterov: g + μ b; μ = 0: g)
           weight decay after the momentum: p *= 1 - lr · λ before instead, which is p -= lr · (b + λ p)
           b is 0 before the first step; dampening needs to know how many there were, in `steps`

Where the one-element FP32 `found_inf` is 1, nothing changes.

They are leaf ops because the compiler cannot functionalize the fused kernels: their schema says that they write a list
which is given empty. So eager and compiled code run the same kernel.
"""

from typing import Any

import torch

from mezzotint.kernels._lib import leaf

Tensors = list[torch.Tensor]


def _adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    lr: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    lr_value: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    if not bias_correction:  # 1 - βᵗ is 1 then
        steps = [torch.full_like(steps[0], torch.inf)] * len(steps)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr_value if lr is None else lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )


def _sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    steps: Tensors,
    lr: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    lr_value: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
) -> None:
    rate: Any = lr_value if lr is None else lr
    if wd_after_momentum and weight_decay != 0:
        torch._foreach_mul_(params, _unless(found_inf, 1 - rate * weight_decay, 1.0))
        weight_decay = 0.0
    if momentum != 0 and dampening != 0:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
        torch._foreach_mul_(buffers, _unless(found_inf, momentum, 1.0))
        for buffer, grad, step in zip(buffers, grads, steps, strict=True):
            kept = torch.where(step > 0, 1.0 - dampening, 1.0)
            # grad · 0 would not be 0: nothing may change because a gradient is not finite.
            buffer.add_(grad * kept if found_inf is None else torch.where(found_inf == 1, 0.0, grad * kept))
        grads, buffers, momentum, dampening, weight_decay = buffers, [], 0.0, 0.0, 0.0
    torch._fused_sgd_(
        params,
        grads,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,
        dampening=dampening,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        found_inf=found_inf,
    )


def _unless(found_inf: torch.Tensor | None, value: Any, otherwise: float) -> Any:
    return value if found_inf is None else torch.where(found_inf == 1, otherwise, value).view(())


def _join(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the FP32 master of a BF16 parameter and its int16 remainder: the bits of the first · 2¹⁶ + the second."""
    return ((param.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


# This is a leaf op, because Inductor cannot give a view of other bits to an op that writes to it.
join_master = leaf(
    "join_master(Tensor param, Tensor remainder) -> Tensor",
    fake=lambda param, remainder: torch.empty_like(remainder, dtype=torch.float32),
    cpu=_join,
)
adam_ = leaf(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] steps,"
    " Tensor? lr, Tensor? found_inf, float lr_value, float beta1, float beta2, float eps, float weight_decay,"
    " bool decoupled, bool bias_correction) -> ()",
    fake=lambda *arguments: None,
    cpu=_adam,
)
sgd_ = leaf(
    "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffers, Tensor[] steps, Tensor? lr, Tensor? found_inf,"
    " float lr_value, float momentum, float dampening, float weight_decay, bool nesterov, bool wd_after_momentum)"
    " -> ()",
    fake=lambda *arguments: None,
    cpu=_sgd,
)
