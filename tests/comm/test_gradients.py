"""`reduce_gradients`: which gradients are summed, and by how many collectives. Another process is played."""

from typing import Any

import pytest
import torch
from torch import nn

from mezzotint.comm import gradients
from mezzotint.distributed import reduce_gradients


def make() -> nn.ParameterDict:
    """Parameters with all kinds of gradients; `sequence_parallel` but for one."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(4)) for name in ("grad", "main", "both", "none", "other")})
    for name, parameter in model.items():
        parameter.sequence_parallel = name != "other"
    for name in ("grad", "both", "other"):
        model[name].grad = torch.full((4,), 2.0)
    for name in ("main", "both"):
        model[name].main_grad = torch.full((4,), 3.0, dtype=torch.float64)
    return model


def values(model: nn.ParameterDict) -> dict[str, list[Any]]:
    found = {}
    for name, parameter in model.items():
        held = (parameter.grad, getattr(parameter, "main_grad", None))
        found[name] = [None if each is None else each.tolist()[0] for each in held]
    return found


def test_which_gradients_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main_grad` where there is one, in place, and then not `grad`, which the optimizer does not read."""
    sizes = []

    def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        assert group == "group"
        sizes.append((x.numel(), x.dtype))
        return x * 10

    monkeypatch.setattr(gradients, "all_reduce", all_reduce)
    monkeypatch.setattr(gradients, "world_size", lambda group: 2)
    model = make()
    held = model["both"].main_grad
    reduce_gradients(model, "group")
    assert values(model) == {
        "grad": [20.0, None],
        "main": [None, 30.0],
        "both": [2.0, 30.0],
        "none": [None, None],
        "other": [2.0, None],
    }
    assert model["both"].main_grad is held
    assert sorted(sizes, key=lambda size: size[0]) == [(4, torch.float32), (8, torch.float64)]


def test_one_process_has_all() -> None:
    model = make()
    reduce_gradients(model, None)
    assert values(model) == values(make())
