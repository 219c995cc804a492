"""Functions over lists of tensors: they are called as `multi_tensor_applier(multi_tensor_scale, noop_flag, [inputs,
outputs], 0.5)`.

Each takes (chunk_size, noop_flag, tensor_lists, ...). `chunk_size` is accepted and not used: PyTorch's kernels for
lists have their own. `noop_flag` has one element of any dtype: if it is 1, no tensor changes; scales and norms set it
to 1 if they meet an infinity or a NaN. All stays on the device: the host waits for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mezzotint.constants import DType
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.float8 import float8_quantize_scaled
from mezzotint.kernels.optimizer import adam_, sgd_

Lists = Sequence[Sequence[torch.Tensor]]


class MultiTensorApply:
    """A `MultiTensorApply` calls a function over lists with its chunk size."""

    def __init__(self, chunk_size: int) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}: give a positive int")
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Compute output = input · scale in FP32 for `tensor_lists` [inputs, outputs], and write it in the output's
    dtype."""
    _scale(noop_flag, tensor_lists, scale)


@torch.no_grad()
def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Do what `multi_tensor_scale` does, with a scale of one element on the device."""
    _scale(noop_flag, tensor_lists, scale.float().view(()))


def _scale(noop_flag: torch.Tensor, tensor_lists: Lists, scale: Any) -> None:
    inputs, outputs = _checked(noop_flag, tensor_lists, 2)
    skip = _skip(noop_flag)
    values = [x.float() for x in inputs]
    _mark(noop_flag, values)
    for output, value in zip(outputs, values, strict=True):
        _round([value * scale], [output], skip)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors as one vector, FP32 [1], and with `per_tensor` that of each, FP32 [n], else an
    empty tensor. `tensor_lists` is [tensors]."""
    (tensors,) = _checked(noop_flag, tensor_lists, 1)
    return _norms(noop_flag, [x.float() for x in tensors], bool(per_tensor))


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of tensor · `inv_scale` (one element), like `multi_tensor_l2norm`; the tensors stay as they
    are."""
    (tensors,) = _checked(noop_flag, tensor_lists, 1)
    factor = inv_scale.float().view(())
    return _norms(noop_flag, [x.float() * factor for x in tensors], bool(per_tensor))


def _norms(noop_flag: torch.Tensor, values: list[torch.Tensor], per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    empty = torch.empty(0, dtype=torch.float32, device=noop_flag.device)
    if not values:
        return empty.new_zeros(1), empty
    norms = torch.stack(list(torch._foreach_norm(values)))
    total = norms.norm().view(1)
    _mark(noop_flag, [total])
    return total, norms if per_tensor else empty


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Do a step of Adam on `tensor_lists` [gradients, parameters, exp_avg, exp_avg_sq], or these and FP32 masters.

    `mode` is 1 for AdamW, 0 for Adam. `step` counts from 1.
    """
    _adam(noop_flag, tensor_lists, lr, (beta1, beta2, epsilon, weight_decay), step, mode, bias_correction, None)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Do what `multi_tensor_adam` does with learning rate and step on the device, and gradients multiplied by
    `inv_scale`."""
    _adam(noop_flag, tensor_lists, lr, (beta1, beta2, epsilon, weight_decay), step, mode, bias_correction, inv_scale)


# This one is given five lists instead of four.
multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: DType,
) -> None:
    """Do a step of Adam on [gradients, FP8 codes, exp_avg, exp_avg_sq, FP32 masters, scale, amax, scale_inv].

    Masters are updated, and quantized by the given scales; amax is a running maximum, scale_inv = 1 / scale.
    """
    grads, codes, exp_avgs, exp_avg_sqs, masters, scales, amaxes, inverses = _checked(noop_flag, tensor_lists, 8)
    rates = (beta1, beta2, epsilon, weight_decay)
    _adam(noop_flag, [grads, masters, exp_avgs, exp_avg_sqs], lr, rates, step, mode, bias_correction, None)
    skip = _skip(noop_flag)
    for code, master, scale, amax, inverse in zip(codes, masters, scales, amaxes, inverses, strict=True):
        data, scale_inv, seen = float8_quantize_scaled(master, scale.view(1), int(fp8_dtype), True, False)
        code.view(torch.uint8).copy_(torch.where(skip, code.view(torch.uint8), data))
        inverse.copy_(torch.where(skip, inverse, scale_inv.view(inverse.shape)))
        amax.copy_(torch.where(skip, amax, torch.maximum(amax, seen.view(amax.shape))))


def _adam(
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float | torch.Tensor,
    rates: tuple[float, float, float, float],
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    inv_scale: torch.Tensor | None,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs, *masters = _checked(noop_flag, tensor_lists, 4, 5)
    if not params:
        return
    if mode not in (0, 1):
        raise ValueError(f"mode is {mode!r}: give 1 for AdamW, 0 for Adam")
    factor = None if inv_scale is None else inv_scale.float().view(())
    grads = [grad.float().contiguous() if factor is None else grad.float().contiguous() * factor for grad in grads]
    values = [_fp32(x) for x in (masters[0] if masters else params)]
    ms, vs = [_fp32(x) for x in exp_avgs], [_fp32(x) for x in exp_avg_sqs]
    device = params[0].device
    count = torch.as_tensor(step, dtype=torch.float32, device=device).view(())
    rate = torch.as_tensor(lr, dtype=torch.float32, device=device).view(()) if isinstance(lr, torch.Tensor) else None
    beta1, beta2, epsilon, weight_decay = rates
    numbers = (0.0 if rate is not None else float(lr), beta1, beta2, epsilon, weight_decay)
    found_inf = _skip(noop_flag).to(device, torch.float32).view(1)
    flags = (mode == 1, bool(bias_correction))
    run_op(adam_, values, grads, ms, vs, [count] * len(values), rate, found_inf, *numbers, *flags)
    _put(values, masters[0] if masters else params)
    _put(ms, exp_avgs)
    _put(vs, exp_avg_sqs)
    if masters:
        _round(values, params, _skip(noop_flag))


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Do a step of SGD on [gradients, parameters, momentum buffers], or these and copies of the parameters in another
    dtype.

    Gradients are multiplied by `scale`. `first_run` says that the buffers hold nothing yet.
    """
    grads, params, buffers, *copies = _checked(noop_flag, tensor_lists, 3, 4)
    if not params:
        return
    skip = _skip(noop_flag)
    values, held = [_fp32(x) for x in params], [_fp32(x) for x in buffers]
    if first_run:
        for buffer in held:
            buffer.copy_(torch.where(skip, buffer, 0.0))
    grads = [grad.float().contiguous() * scale for grad in grads]
    device = params[0].device
    count = torch.full((), 0.0 if first_run else 1.0, dtype=torch.float32, device=device)
    found_inf = skip.to(device, torch.float32).view(1)
    numbers = (float(lr), momentum, dampening, wd)
    used = held if momentum != 0 else []
    steps = [count] * len(used)
    run_op(sgd_, values, grads, used, steps, None, found_inf, *numbers, bool(nesterov), bool(wd_after_momentum))
    _put(values, params)
    _put(held, buffers)
    if copies:
        _round(values, copies[0], skip)


def _checked(noop_flag: torch.Tensor, tensor_lists: Lists, *counts: int) -> list[list[torch.Tensor]]:
    if not isinstance(noop_flag, torch.Tensor) or noop_flag.numel() != 1:
        raise ValueError(f"noop_flag is {noop_flag!r}: give a tensor of one element, 0, or 1 for nothing to do")
    if len(tensor_lists) not in counts:
        raise ValueError(f"tensor_lists has {len(tensor_lists)} lists: expected {' or '.join(map(str, counts))}")
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"tensor_lists has lists of {lengths} tensors: expected the same number in each")
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in tensor_lists[:5]]
    for i, of_one in enumerate(zip(*shapes, strict=True)):
        if len(set(of_one)) > 1:
            raise ValueError(f"tensor_lists has shapes {of_one} at {i}: expected the same in each list")
    return [list(tensors) for tensors in tensor_lists]


def _skip(noop_flag: torch.Tensor) -> torch.Tensor:
    """Return whether nothing is to change, bool []."""
    return noop_flag.view(()) == 1


def _mark(noop_flag: torch.Tensor, values: list[torch.Tensor]) -> None:
    """Set the flag to 1 if one of the values is not finite."""
    for value in values:
        found = torch.logical_not(value.isfinite().all()).to(noop_flag.device)
        noop_flag.copy_(torch.where(found, torch.ones_like(noop_flag), noop_flag))


def _fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x in FP32 and contiguous; without a copy if it is so already."""
    return x.detach().float().contiguous()


def _put(values: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy values back to the tensors that they came from."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor.data_ptr() != value.data_ptr():
            tensor.copy_(value)


def _round(values: list[torch.Tensor], tensors: list[torch.Tensor], skip: torch.Tensor) -> None:
    """Write FP32 values to tensors, rounded to their dtype, unless `skip`."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(torch.where(skip, tensor, value.to(tensor.dtype)))
