"""Mixtures of experts: the router chooses experts for each token, the permutation sorts tokens by expert, and the
exchange sends them to the ranks that hold the experts."""

from mezzotint.moe.exchange import Exchange, combine, dispatch, plan_exchange
from mezzotint.moe.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from mezzotint.moe.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

__all__ = [
    "Exchange",
    "combine",
    "dispatch",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "plan_exchange",
]
