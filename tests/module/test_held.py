"""What a module holds for backward: no more in any recipe than `nn.Linear` does in BF16."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from tests.recipes import EVERY_RECIPE


def held_bytes(module: torch.nn.Module, chosen: Any, tokens: int, features: int) -> int:
    """Return the bytes of what one forward saves, beside parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(tokens, features, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if chosen is None:
            y = module(x)
        else:
            with mz.autocast(recipe=chosen):
                y = module(x)
    y.sum().backward()
    return sum(found.values())


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_no_more_than_in_bf16(name: str) -> None:
    """Of fewer tokens than there are features, where a copy of the weight would be more than the input."""
    tokens, features = 128, 512
    plain = torch.nn.Linear(features, features, dtype=torch.bfloat16)
    ours = mz.Linear(features, features, params_dtype=torch.bfloat16, device="cpu")
    assert held_bytes(ours, EVERY_RECIPE[name], tokens, features) <= held_bytes(plain, None, tokens, features)
