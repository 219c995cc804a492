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
    """A `MultiTensorApply` calls a function over lists of tensors with its chunk size. `multi_tensor_applier` is one.

    Args:
        chunk_size: The first argument of the functions that it calls, a positive int. None of those that are here reads
            it.

    Raises:
        ValueError: If it is no positive int.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_applier, multi_tensor_l2norm
        >>> norm, _ = multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1), [[torch.ones(4)]])
        >>> torch.equal(norm, torch.tensor([2.0]))
        True
    """

    def __init__(self, chunk_size: int) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}: give a positive int")
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Compute output = input · scale in FP32 for each pair of tensors, and write it in the output's dtype.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed. It is set to 1 if an input is not finite.
        tensor_lists: The two lists [inputs, outputs].
        scale: The factor.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_scale
        >>> given, out = [torch.ones(4)], [torch.empty(4)]
        >>> multi_tensor_scale(1024, torch.zeros(1), [given, out], 0.5)
        >>> torch.equal(out[0], torch.full((4,), 0.5))
        True
    """
    _scale(noop_flag, tensor_lists, scale)


@torch.no_grad()
def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Do what `multi_tensor_scale` does, with a scale on the device.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed. It is set to 1 if an input is not finite.
        tensor_lists: The two lists [inputs, outputs].
        scale: The factor, a tensor of one element.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_scale_tensor
        >>> given, out = [torch.ones(4)], [torch.empty(4)]
        >>> multi_tensor_scale_tensor(1024, torch.zeros(1), [given, out], torch.tensor([0.5]))
        >>> torch.equal(out[0], torch.full((4,), 0.5))
        True
    """
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
    """Return the L2 norm of all tensors as one vector.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element, which is set to 1 if the norm is not finite.
        tensor_lists: The one list [tensors].
        per_tensor: Whether the norm of each tensor is returned as well. The default is False.

    Returns:
        The norm, FP32 [1]; and with `per_tensor` that of each tensor, FP32 [n], else an empty tensor.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_l2norm
        >>> total, each = multi_tensor_l2norm(1024, torch.zeros(1), [[torch.ones(4), torch.ones(9)]], per_tensor=True)
        >>> torch.equal(each, torch.tensor([2.0, 3.0]))
        True
    """
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
    """Return the norms of tensor · `inv_scale`, like `multi_tensor_l2norm`; the tensors stay as they are.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element, which is set to 1 if the norm is not finite.
        tensor_lists: The one list [tensors].
        inv_scale: The factor, a tensor of one element.
        per_tensor: Whether the norm of each tensor is returned as well. The default is False.

    Returns:
        The norm, FP32 [1]; and with `per_tensor` that of each tensor, FP32 [n], else an empty tensor.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_unscale_l2norm
        >>> total, _ = multi_tensor_unscale_l2norm(1024, torch.zeros(1), [[torch.ones(4)]], torch.tensor([0.5]))
        >>> torch.equal(total, torch.tensor([1.0]))
        True
    """
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
    """Do a step of Adam or AdamW on lists of tensors, in place.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed.
        tensor_lists: The lists [gradients, parameters, exp_avg, exp_avg_sq], or these and one of FP32 masters.
        lr: The learning rate, a number or a tensor.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        epsilon: A small number that is added to the denominator.
        step: The number of the step, from 1.
        mode: 1 for AdamW, 0 for Adam.
        bias_correction: Whether the moments are divided by 1 - beta^step: 1 or 0.
        weight_decay: The factor of the weight decay.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_adam
        >>> grads, params = [torch.ones(4)], [torch.ones(4)]
        >>> lists = [grads, params, [torch.zeros(4)], [torch.zeros(4)]]
        >>> multi_tensor_adam(1024, torch.zeros(1), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        >>> bool((params[0] < 1).all())
        True
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
    """Do what `multi_tensor_adam` does with learning rate and step on the device, for CUDA graphs.

    `multi_tensor_adam_capturable_master` is another name of this function, for lists with masters.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed.
        tensor_lists: The lists [gradients, parameters, exp_avg, exp_avg_sq], or these and one of FP32 masters.
        lr: The learning rate, a tensor.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        epsilon: A small number that is added to the denominator.
        step: The number of the step, from 1, as a tensor.
        mode: 1 for AdamW, 0 for Adam.
        bias_correction: Whether the moments are divided by 1 - beta^step: 1 or 0.
        weight_decay: The factor of the weight decay.
        inv_scale: A tensor of one element by which gradients are multiplied.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_adam_capturable
        >>> grads, params = [torch.ones(4)], [torch.ones(4)]
        >>> lists = [grads, params, [torch.zeros(4)], [torch.zeros(4)]]
        >>> rate, step, one = torch.tensor(0.1), torch.tensor(1), torch.ones(1)
        >>> multi_tensor_adam_capturable(1024, torch.zeros(1), lists, rate, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, one)
        >>> bool((params[0] < 1).all())
        True
    """
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
    """Do a step of Adam or AdamW on FP32 masters, and quantize them to FP8 codes by given scales.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed.
        tensor_lists: The lists [gradients, FP8 codes, exp_avg, exp_avg_sq, FP32 masters, scale, amax, scale_inv]; amax
            becomes a running maximum, and scale_inv 1 / scale.
        lr: The learning rate, a number or a tensor.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        epsilon: A small number that is added to the denominator.
        step: The number of the step, from 1.
        mode: 1 for AdamW, 0 for Adam.
        bias_correction: Whether the moments are divided by 1 - beta^step: 1 or 0.
        weight_decay: The factor of the weight decay.
        fp8_dtype: The element type of the codes, a `DType`.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> from mezzotint.optimizers import multi_tensor_adam_fp8
        >>> grads, codes, masters = [torch.ones(16)], [torch.zeros(16, dtype=torch.uint8)], [torch.ones(16)]
        >>> moments = [[torch.zeros(16)], [torch.zeros(16)]]
        >>> scales = [[torch.ones(1)], [torch.zeros(1)], [torch.ones(1)]]
        >>> lists = [grads, codes, *moments, masters, *scales]
        >>> e4m3 = mz.DType.kFloat8E4M3
        >>> multi_tensor_adam_fp8(1024, torch.zeros(1), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0, e4m3)
        >>> bool(codes[0].any()), bool((masters[0] < 1).all())
        (True, True)
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
    """Do a step of SGD on lists of tensors, in place.

    Args:
        chunk_size: It is accepted for the signature's sake and has no effect; `multi_tensor_applier` gives it.
        noop_flag: A tensor of one element: if it is 1, nothing is changed.
        tensor_lists: The lists [gradients, parameters, momentum buffers], or these and one of copies of the parameters
            in another dtype.
        wd: The factor of the weight decay.
        momentum: The factor of the momentum.
        dampening: How much less of the gradient goes into the momentum.
        lr: The learning rate.
        nesterov: Whether it is Nesterov momentum.
        first_run: Whether the buffers hold nothing yet.
        wd_after_momentum: Whether weight decay is added to what the momentum gives instead of to the gradient.
        scale: The factor of the gradients.

    Raises:
        ValueError: If the flag has not one element, or the lists do not fit each other.

    Example:
        >>> import torch
        >>> from mezzotint.optimizers import multi_tensor_sgd
        >>> params = [torch.ones(4)]
        >>> lists = [[torch.ones(4)], params, [torch.zeros(4)]]
        >>> multi_tensor_sgd(1024, torch.zeros(1), lists, 0.0, 0.0, 0.0, 0.5, False, True, False, 1.0)
        >>> torch.equal(params[0], torch.full((4,), 0.5))
        True
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
