"""Cross entropy of logits, which is computed in FP32 whatever their dtype.

    loss = (1 - e) · (log Σ exp(x) - x[target]) + e · (log Σ exp(x) - mean(x))        e: label smoothing
    dx   = softmax(x) - (1 - e) · onehot(target) - e / V

Only the logits are saved: backward computes the softmax again. If the vocabulary is split over ranks, each has columns
of the logits, and they exchange the largest value of each row, and its sums.
"""

import warnings
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mezzotint.comm.collectives import all_reduce, all_reduce_max
from mezzotint.comm.groups import rank_in, world_size


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, smoothing: float, ignored: int, group: Any
    ) -> torch.Tensor:
        value = x.float()
        counts = target != ignored
        if group is None:
            index = torch.where(counts, target, 0)[:, None]
            here = counts
            total, chosen = value.logsumexp(-1), value.gather(1, index)[:, 0]
            mean = value.mean(-1) if smoothing > 0.0 else None
        else:
            local = target - rank_in(group) * x.shape[-1]
            here = counts & (local >= 0) & (local < x.shape[-1])
            index = torch.where(here, local, 0)[:, None]
            total, chosen, mean = _exchange(value, index, here, smoothing > 0.0, group)
        loss = total - chosen
        if mean is not None:
            loss = loss * (1.0 - smoothing) + (total - mean) * smoothing
        ctx.save_for_backward(x, index, here, counts, total)
        ctx.smoothing, ctx.classes = smoothing, x.shape[-1] * (1 if group is None else world_size(group))
        return torch.where(counts, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, index, here, counts, total = ctx.saved_tensors
        scale = torch.where(counts, grads[0], 0.0)[:, None]
        slope = torch.exp(x.float() - total[:, None])
        if ctx.smoothing > 0.0:
            slope = slope - ctx.smoothing / ctx.classes
        slope = slope.scatter_add(1, index, torch.where(here, ctx.smoothing - 1.0, 0.0)[:, None])
        return (slope * scale).to(x.dtype), None, None, None, None


def _exchange(
    value: torch.Tensor, index: torch.Tensor, here: torch.Tensor, has_mean: bool, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log Σ exp, the target's logit and the mean of each row, over the columns of all ranks.

    `here` says whether the target is among this rank's columns, in column `index`.
    """
    top = all_reduce_max(value.amax(-1), group)
    top = torch.where(torch.isfinite(top), top, 0.0)
    sums = [torch.exp(value - top[:, None]).sum(-1), torch.where(here, value.gather(1, index)[:, 0], 0.0)]
    if has_mean:
        sums.append(value.sum(-1))
    summed = all_reduce(torch.stack(sums), group)
    mean = summed[2] / (value.shape[-1] * world_size(group)) if has_mean else None
    return top + torch.log(summed[0]), summed[1], mean


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of each token in FP32, also for a vocabulary that is split over ranks.

    A target of `ignore_idx` has loss and gradient 0; the mean is over all tokens, including those. The gradient has the
    dtype of `inp`.

    Args:
        inp: The logits [.., V], or with a group this rank's share of them [.., V / ranks], in the order of ranks.
        target: The ids of the right tokens in the whole vocabulary [..].
        label_smoothing: How much of the probability is spread over all tokens, from 0 (the default) to less than 1.
        reduce_loss: Whether the mean is returned instead of the loss of each token. The default is False.
        dist_process_group: The process group whose ranks share the vocabulary, or None; all get the same loss.
        ignore_idx: The target that is ignored. The default is -100.
        is_cg_capturable: It is accepted and changes nothing: a CUDA graph can always capture this.

    Returns:
        The loss of each token [..], or with `reduce_loss` the mean.

    Raises:
        ValueError: If shapes do not fit each other, or `label_smoothing` is out of range.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> logits, target = torch.randn(4, 16), torch.tensor([0, 5, 15, -100])
        >>> mz.parallel_cross_entropy(logits, target).shape
        torch.Size([4])
    """
    if _input is not None:
        warnings.warn("_input of parallel_cross_entropy is called inp", DeprecationWarning, stacklevel=2)
        inp = _input
    if inp.shape[:-1] != target.shape:
        raise ValueError(f"inp has shape {tuple(inp.shape)}, target {tuple(target.shape)}: target must be inp's less V")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: give 0 or more, less than 1")
    is_split = dist_process_group is not None and world_size(dist_process_group) > 1
    group = dist_process_group if is_split else None
    loss = _CrossEntropy.apply(inp.reshape(-1, inp.shape[-1]), target.reshape(-1), label_smoothing, ignore_idx, group)
    return loss.mean() if reduce_loss else loss.reshape(target.shape)
