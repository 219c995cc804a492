"""Cross entropy of logits, in FP32 whatever their dtype.

    loss = (1 - e) · (log Σ exp(x) - x[target]) + e · (log Σ exp(x) - mean(x))        e: label smoothing
    dx   = softmax(x) - (1 - e) · onehot(target) - e / V

Only the logits are saved: the gradient computes the softmax again.
"""

import warnings
from typing import Any

import torch


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, smoothing: float, ignored: int) -> torch.Tensor:
        value = x.float()
        counts = target != ignored
        index = torch.where(counts, target, 0)[:, None]
        total = value.logsumexp(-1)
        loss = total - value.gather(1, index)[:, 0]
        if smoothing > 0.0:
            loss = loss * (1.0 - smoothing) + (total - value.mean(-1)) * smoothing
        ctx.save_for_backward(x, index, counts, total)
        ctx.smoothing = smoothing
        return torch.where(counts, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, index, counts, total = ctx.saved_tensors
        scale = torch.where(counts, grads[0], 0.0)[:, None]
        slope = torch.exp(x.float() - total[:, None])
        if ctx.smoothing > 0.0:
            slope = slope - ctx.smoothing / x.shape[-1]
        slope = slope.scatter_add(1, index, torch.full_like(total[:, None], ctx.smoothing - 1.0))
        return (slope * scale).to(x.dtype), None, None, None


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
    """Logits inp [.., V] and target ids [..] → FP32 loss of each token [..], or their mean with `reduce_loss`.

    A target of `ignore_idx` has loss and gradient 0; the mean is over all tokens, those too. The gradient has inp's
    dtype. `_input` is the former name of `inp`; `is_cg_capturable` changes nothing, it always is.
    """
    if _input is not None:
        warnings.warn("_input of parallel_cross_entropy is called inp", DeprecationWarning, stacklevel=2)
        inp = _input
    if dist_process_group is not None and torch.distributed.get_world_size(dist_process_group) > 1:
        raise NotImplementedError(
            f"dist_process_group has {torch.distributed.get_world_size(dist_process_group)} processes: logits that are "
            "split over processes are not there yet; gather them, and leave it None"
        )
    if inp.shape[:-1] != target.shape:
        raise ValueError(f"inp has shape {tuple(inp.shape)}, target {tuple(target.shape)}: target must be inp's less V")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: give 0 or more, less than 1")
    loss = _CrossEntropy.apply(inp.reshape(-1, inp.shape[-1]), target.reshape(-1), label_smoothing, ignore_idx)
    return loss.mean() if reduce_loss else loss.reshape(target.shape)
