"""`skip_own_guards`: fewer looks at what never changes, the same looks at what may."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.dynamo import skip_own_guards

pytestmark = pytest.mark.compile


def test_what_may_change_is_still_looked_at() -> None:
    """The recipe, whether it is in force, a module's options, shapes; an equal recipe makes no new graph."""
    kept: list[tuple[int, int]] = []

    def noted(guards: Any) -> list[bool]:
        stays = skip_own_guards(guards)
        kept.append((sum(stays), len(stays)))
        return stays

    torch._dynamo.reset()
    torch.manual_seed(0)
    module = mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    compiled = torch.compile(lambda x: module(x), fullgraph=True, dynamic=False, options={"guard_filter_fn": noted})
    current, coarse = recipe.Float8CurrentScaling(), recipe.Float8CurrentScaling(use_power_2_scales=True)

    def run(chosen: Any, rows: int = 16) -> None:
        x = torch.randn(rows, 32).bfloat16().requires_grad_()
        other = x.detach().clone().requires_grad_()
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            y, want = compiled(x), module(other)
        y.float().square().sum().backward()
        want.float().square().sum().backward()
        assert torch.equal(y, want)
        assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]

    graphs = []
    for chosen, rows in ((current, 16), (recipe.Float8CurrentScaling(), 16), (coarse, 16), (None, 16), (current, 24)):
        run(chosen, rows)
        graphs.append(len(kept))
    assert graphs == [1, 1, 2, 3, 4]
    assert all(stays < 0.5 * there for stays, there in (kept[0], kept[1]))
