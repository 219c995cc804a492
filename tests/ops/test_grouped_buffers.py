"""ops.GroupedLinear that writes into tensors of the caller's: the bits of one that makes its own."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import ops
from tests.recipes import RECIPES, gradient, sample

GROUPS, WIDTH, HIDDEN, ROWS = 2, 64, 48, [11, 29]
SHAPES = {"grad of x": WIDTH, "hidden": 2 * HIDDEN, "grad of activation": HIDDEN, "y": WIDTH}


def experts() -> ops.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, WIDTH, 2 * HIDDEN, **options),
        ops.SwiGLU(),
        ops.GroupedLinear(GROUPS, HIDDEN, WIDTH, **options),
    )


def buffers() -> dict[str, torch.Tensor]:
    return {name: torch.full((40, width), float("nan"), dtype=torch.bfloat16) for name, width in SHAPES.items()}


def keywords(given: dict[str, torch.Tensor]) -> dict[int, Any]:
    return {
        0: {"output": given["hidden"], "grad_input": given["grad of x"]},
        2: {"output": given["y"], "grad_input": given["grad of activation"]},
    }


def step(call: Any, recipe: str, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = sample(sum(ROWS)).requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = call(x, ROWS, ROWS, **kwargs)
    gradient(y).backward()
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])  # one by one, and fused
def test_the_buffers_have_the_results(recipe: str) -> None:
    given = buffers()
    y, dx = step(experts(), recipe)
    written, dx_written = step(experts(), recipe, op_kwargs=keywords(given))
    assert written.data_ptr() == given["y"].data_ptr()
    assert torch.equal(given["y"], y.detach())
    assert torch.equal(given["grad of x"], dx)
    assert torch.equal(dx_written, dx)
    hidden = experts()[0]
    with torch.no_grad(), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        assert torch.equal(given["hidden"], hidden(sample(sum(ROWS)), ROWS))
    assert not given["grad of activation"].isnan().any()


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_compiled(recipe: str) -> None:
    eager, given = buffers(), buffers()
    step(experts(), recipe, op_kwargs=keywords(eager))
    step(torch.compile(experts(), backend="aot_eager", fullgraph=True), recipe, op_kwargs=keywords(given))
    for name, value in eager.items():
        assert torch.equal(given[name], value), name


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_a_buffer_that_does_not_fit(recipe: str) -> None:
    short = torch.empty(39, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="output is"):
        step(experts(), recipe, op_kwargs={2: {"output": short}})
    with pytest.raises(ValueError, match="grad_input is"):
        step(experts(), recipe, op_kwargs={0: {"grad_input": short}})
    with pytest.raises(TypeError, match="output is list"):
        step(experts(), recipe, op_kwargs={2: {"output": [1]}})
    with pytest.raises(TypeError, match="it takes is_first_microbatch, output and grad_input"):
        step(experts(), recipe, op_kwargs={2: {"out": short}})
