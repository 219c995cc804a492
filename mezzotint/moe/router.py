"""A router's choice of experts: it scores logits, takes the top k, and computes the loss that balances the load.

    softmax              top k of the logits, softmax over those; with `use_pre_softmax`, softmax over all, top k of it
    sigmoid              s = 1 / (1 + e⁻ˣ), top k of s + bias, s / Σ s of those (k = 1: s itself)
    sqrtsoftplus         the same with s = √ log(1 + eˣ)

All of it is computed in FP32. Ties are resolved as `torch.topk` does.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.nn import functional

EPSILON = 1e-20  # added to a sum of scores before dividing by it


class RoutingMapFormat(IntEnum):
    """A `RoutingMapFormat` says how a routing map is stored."""

    BYTEMAP = 0  # bool [tokens, experts]
    BITMAP_U8 = 1  # uint8 [tokens, ⌈experts / 8⌉], the lowest bit first


ROUTING_MAP_FORMATS = tuple(RoutingMapFormat)


def _sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    # Below -20 log(1 + eˣ) is eˣ in FP32. Its root is written as e^(x/2), because the slope of √ is infinite at 0.
    return torch.where(x < -20.0, (x.clamp(max=-20.0) * 0.5).exp(), functional.softplus(x.clamp(min=-20.0)).sqrt())


SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _refuse_histogram(**given: Any) -> None:
    """Raise NotImplementedError if any of these is given: no histogram of scores is written."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is given: the choice of experts writes no histogram; leave it None, and count with "
                "torch.histc of the scores"
            )


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, and their probabilities.

    Args:
        logits: The logits of the router [.., experts], FP32, BF16 or FP16.
        topk: How many experts a token goes to.
        use_pre_softmax: Whether the softmax comes before the choice, over all experts, instead of after it, over the
            chosen ones.
        num_groups: The number of groups of neighbouring experts, or None.
        group_topk: From how many of these groups experts come: from the best, by the sum of a group's topk / group_topk
            largest scores. None means from all.
        scaling_factor: What the probabilities are multiplied by, or None.
        score_function: How logits become scores: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_bias: What is added to the scores [experts] for the choice, not for the probabilities; or None. It goes
            with "sigmoid" and "sqrtsoftplus".
        routing_map_format: How the routing map is stored: `RoutingMapFormat.BYTEMAP` (the default), bool [tokens,
            experts], or `RoutingMapFormat.BITMAP_U8`, eight experts in a byte; or the name of one.
        topk_indices: Experts that were chosen before, integers [tokens, topk], which replace the choice; or None.
        qb_histogram: It must be None: no histogram is written.
        qb_bin_bounds: It must be None, likewise.
        qb_histogram_mode: It must be None, likewise.

    Returns:
        The probabilities, in the shape of the logits, with 0 for experts that are not chosen; and the routing map.

    Raises:
        ValueError: If a name is unknown, or numbers and shapes do not fit each other.
        TypeError: If the dtype of the logits is another.
        NotImplementedError: If a histogram is asked for.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
        >>> choose = mz.moe.fused_topk_with_score_function
        >>> probs, routing_map = choose(logits, 1, False, None, None, None, "softmax", None)
        >>> routing_map.tolist()
        [[True, False, False], [False, True, False]]
    """
    _check(logits, topk, score_function)
    _refuse_histogram(qb_histogram=qb_histogram, qb_bin_bounds=qb_bin_bounds, qb_histogram_mode=qb_histogram_mode)
    tokens = logits.reshape(-1, logits.shape[-1])
    experts = tokens.shape[1]
    values = tokens.float()
    is_softmax = score_function == "softmax"
    if expert_bias is not None and is_softmax:
        raise ValueError("expert_bias is given with score_function='softmax': it goes with sigmoid or sqrtsoftplus")
    scores = values if is_softmax and not use_pre_softmax else SCORES[score_function](values)
    if topk_indices is None:
        wanted = scores.detach()
        if expert_bias is not None:
            _check_shape("expert_bias", expert_bias, (experts,))
            wanted = wanted + expert_bias.detach().float()
        chosen = _choose(wanted, topk, num_groups, group_topk)
    else:
        _check_shape("topk_indices", topk_indices, (tokens.shape[0], topk))
        chosen = topk_indices.long()
    probs = scores.gather(1, chosen)
    if is_softmax and not use_pre_softmax:
        probs = probs.softmax(-1)
    elif not is_softmax and topk > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + EPSILON)
    if scaling_factor is not None:
        probs = probs * scaling_factor
    spread = torch.zeros_like(values).scatter(1, chosen, probs).to(logits.dtype)
    return spread.view(logits.shape), _as_map(chosen, experts, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `fused_moe_aux_loss` needs of the logits: the routing map and scores.

    Args:
        logits: The logits of the router [.., experts], FP32, BF16 or FP16.
        topk: How many experts a token goes to.
        score_function: How logits become scores: "softmax", "sigmoid" or "sqrtsoftplus".
        routing_map_format: How the routing map is stored: `RoutingMapFormat.BYTEMAP` (the default), bool [tokens,
            experts], or `RoutingMapFormat.BITMAP_U8`, eight experts in a byte; or the name of one.

    Returns:
        The routing map of the top k, and FP32 scores in the shape of the logits, which add up to 1 for each token.

    Raises:
        ValueError: If a name is unknown, or `topk` is not among the experts.
        TypeError: If the dtype of the logits is another.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> routing_map, scores = mz.moe.fused_compute_score_for_moe_aux_loss(torch.randn(4, 8), 2, "softmax")
        >>> routing_map.sum(-1).tolist(), scores.shape
        ([2, 2, 2, 2], torch.Size([4, 8]))
    """
    _check(logits, topk, score_function)
    scores = SCORES[score_function](logits.reshape(-1, logits.shape[-1]).float())
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    chosen = scores.detach().topk(topk, -1).indices
    return _as_map(chosen, logits.shape[-1], routing_map_format), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Return the loss that balances the load of the experts, in the dtype of `probs`:

        Σ_e (Σ_t probs[t, e]) · tokens_per_expert[e] · coeff · num_experts / (topk · total_num_tokens²)

    Args:
        probs: The scores of this rank's tokens [tokens, experts].
        tokens_per_expert: How many tokens go to each expert [experts], over all tokens that the loss is over, which may
            be those of more ranks.
        total_num_tokens: How many tokens these are.
        num_experts: The number of experts.
        topk: How many experts a token goes to.
        coeff: The weight of the loss.

    Returns:
        The loss, a tensor of no dimension.

    Raises:
        ValueError: If shapes do not fit each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> routing_map, scores = mz.moe.fused_compute_score_for_moe_aux_loss(torch.randn(4, 8), 2, "softmax")
        >>> mz.moe.fused_moe_aux_loss(scores, routing_map.sum(0), 4, 8, 2, 0.01).shape
        torch.Size([])
    """
    _check_shape("probs", probs, (probs.shape[0], num_experts))
    _check_shape("tokens_per_expert", tokens_per_expert, (num_experts,))
    factor = coeff * num_experts / (topk * total_num_tokens * total_num_tokens)
    return ((probs.float().sum(0) * tokens_per_expert.float()).sum() * factor).to(probs.dtype)


def _choose(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Return the experts of each token, int64 [tokens, topk]."""
    if group_topk is None or group_topk < 1:  # other libraries write -1 or 0 for no groups
        return scores.topk(topk, -1).indices
    tokens, experts = scores.shape
    if num_groups is None or num_groups < 1 or experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}: with group_topk, give a divisor of the {experts} experts")
    if group_topk > num_groups or topk % group_topk or topk // group_topk > experts // num_groups:
        raise ValueError(
            f"group_topk is {group_topk}: give a divisor of topk={topk}, at most num_groups={num_groups}, so that "
            f"topk / group_topk experts are in a group of {experts // num_groups}"
        )
    grouped = scores.view(tokens, num_groups, experts // num_groups)
    best = grouped.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
    is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~is_open[..., None], -torch.inf).view(tokens, experts).topk(topk, -1).indices


def _as_map(chosen: torch.Tensor, experts: int, wanted: RoutingMapFormat | int | str) -> torch.Tensor:
    made = torch.zeros(chosen.shape[0], experts, dtype=torch.bool, device=chosen.device).scatter(1, chosen, True)
    if _map_format(wanted) == RoutingMapFormat.BYTEMAP:
        return made
    bits = functional.pad(made.to(torch.uint8), (0, -experts % 8)).view(made.shape[0], -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=chosen.device)).sum(-1, dtype=torch.uint8)


def _map_format(wanted: RoutingMapFormat | int | str) -> RoutingMapFormat:
    for known in ROUTING_MAP_FORMATS:  # the compiler of torch 2.11 cannot iterate over an enum
        if wanted == known or (isinstance(wanted, str) and wanted.upper() == known.name):
            return known
    raise ValueError(f"routing_map_format is {wanted!r}: give 'bytemap' or 'bitmap_u8'")


def _check(logits: torch.Tensor, topk: int, score_function: str) -> None:
    if score_function not in SCORES:
        raise ValueError(f"score_function is {score_function!r}: give one of {', '.join(SCORES)}")
    if not logits.is_floating_point() or logits.dtype == torch.float64:
        raise TypeError(f"logits are {logits.dtype}: give FP32, BF16 or FP16")
    if logits.dim() < 1 or not 1 <= topk <= logits.shape[-1]:
        raise ValueError(f"topk is {topk}, logits have shape {tuple(logits.shape)}: choose 1 expert or more, of them")


def _check_shape(name: str, given: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(given.shape)}: give {shape}")
