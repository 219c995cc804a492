"""This module has the mixture of experts that replaces a layer's MLP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mezzotint.comm.groups import local_size
from mezzotint.module.grouped_linear import GroupedLinear
from mezzotint.module.norm import RMSNorm
from mezzotint.moe.exchange import Exchange, combine, dispatch, plan_exchange
from mezzotint.moe.permutation import moe_permute, moe_unpermute
from mezzotint.moe.router import fused_topk_with_score_function
from mezzotint.ops import SwiGLU


class Experts(nn.Module):
    """These experts apply a SwiGLU MLP of its own to each group of rows."""

    def __init__(
        self,
        count: int,
        hidden: int,
        ffn: int,
        init_method: Callable[[torch.Tensor], Any],
        output_init_method: Callable[[torch.Tensor], Any],
        made: dict[str, Any],
    ) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(count, hidden, 2 * ffn, bias=False, init_method=init_method, **made)
        self.activation = SwiGLU()
        self.fc2 = GroupedLinear(count, ffn, hidden, bias=False, init_method=output_init_method, **made)

    def forward(
        self, x: torch.Tensor, m_splits: tuple[int, ...], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        x = self.activation(self.fc1(x, m_splits, is_first_microbatch))
        return self.fc2(x, m_splits, is_first_microbatch)


class Mixture(nn.Module):
    """A `Mixture` applies RMSNorm, a router in FP32, and `topk` of `experts` SwiGLU MLPs to each token: x [.., hidden]
    → (y of the same shape, None). The None is in the place of the bias that an MLP leaves to be added.

    Each rank of `group` has a share of the experts. Nothing balances the load.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        topk: int,
        *,
        group: Any,
        init_method: Callable[[torch.Tensor], Any],
        output_init_method: Callable[[torch.Tensor], Any],
        exchange: Callable[[torch.Tensor, int, Any], Exchange] = plan_exchange,
        **made: Any,
    ) -> None:
        """Build the router and this rank's experts; `exchange` decides which rank sends what, and `made`
        has device and params_dtype."""
        super().__init__()
        self.topk, self.group, self.exchange = topk, group, exchange
        local = local_size("experts", experts, group)
        self.norm = RMSNorm(hidden, **made)
        self.router = nn.Linear(hidden, experts, bias=False, device=made["device"], dtype=made["params_dtype"])
        self.experts = Experts(local, hidden, ffn, init_method, output_init_method, made)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, None]:
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        logits = functional.linear(tokens.float(), self.router.weight.float())
        probs, mask = fused_topk_with_score_function(logits, self.topk, False, None, None, None, "softmax", None)
        rows, row_id_map = moe_permute(tokens, mask, tokens.shape[0] * self.topk)
        exchange = self.exchange(mask.sum(0), rows.shape[0], self.group)
        y = self.experts(dispatch(rows, exchange, self.group), exchange.m_splits, is_first_microbatch)
        return moe_unpermute(combine(y, exchange, self.group), row_id_map, probs).view(x.shape), None
