"""`torch.export` takes modules whole: one graph of our operators, which serves other numbers of tokens and routings."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import ops
from mezzotint.dynamo import decompositions
from tests.recipes import RECIPES

WIDTH = 32
Inputs = tuple[torch.Tensor, ...]


class Region(nn.Module):
    """A module in its autocast region: what an exported program knows of recipes is what the region said."""

    def __init__(self, module: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.module, self.recipe = module, recipe

    def forward(self, *inputs: torch.Tensor) -> Any:
        with mz.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(*inputs)


def tokens(count: int, *more: int) -> torch.Tensor:
    return torch.randn(count, *more, WIDTH, generator=torch.Generator().manual_seed(count))


# A module, and its inputs for that many tokens.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "linear": (lambda: mz.Linear(WIDTH, WIDTH), lambda n: (tokens(n),)),
    "layernorm_mlp": (lambda: mz.LayerNormMLP(WIDTH, WIDTH, activation="swiglu"), lambda n: (tokens(n),)),
    "grouped_linear": (
        lambda: mz.GroupedLinear(3, WIDTH, WIDTH),
        lambda n: (tokens(n), torch.tensor([n // 3, 0, n - n // 3])),
    ),
    "operations": (
        lambda: ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.SwiGLU()),
        lambda n: (tokens(n),),
    ),
    "layer": (lambda: mz.TransformerLayer(WIDTH, WIDTH, 4), lambda n: (tokens(n, 2),)),
}


def exported(module: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """For any number of tokens."""
    dynamic = ({0: torch.export.Dim("tokens", min=2, max=512)}, *[None] * (len(inputs) - 1))
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes={"inputs": dynamic})


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "recipe"),
    [*[("linear", recipe) for recipe in RECIPES], *[(name, "mxfp8") for name in MODULES if name != "linear"]],
)
def test_exported(name: str, recipe: str) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = Region(make().eval(), RECIPES[recipe])
    program = exported(module, inputs(8))
    with torch.no_grad():
        for count in (8, 13):
            assert torch.equal(program.module()(*inputs(count)), module(*inputs(count)))
    assert any(str(node.target).startswith("mezzotint") for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by torch 2.11's own load
def test_saved_and_loaded() -> None:
    module, file = Region(mz.Linear(WIDTH, WIDTH), RECIPES["mxfp8"]), io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (tokens(8),)), file)
        file.seek(0)
        assert torch.equal(torch.export.load(file).module()(tokens(8)), module(tokens(8)))


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        ("linear", "none", torch.float32),
        ("linear", "block", torch.bfloat16),
        ("layernorm_mlp", "none", torch.bfloat16),
        ("layernorm_mlp", "mxfp8", torch.float32),
        ("operations", "none", torch.float32),
        ("operations", "delayed", torch.bfloat16),
        ("layer", "none", torch.float32),
        ("layer", "current", torch.bfloat16),
    ],
)
def test_in_operators_of_pytorch(name: str, recipe: str, dtype: torch.dtype) -> None:
    """Nothing of ours is left in the program, and the bits are those of the module."""

    def given(count: int) -> Inputs:
        return tuple([x.to(dtype) if x.is_floating_point() else x for x in inputs(count)])

    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = Region(make().eval().to(dtype), RECIPES[recipe])
    program = exported(module, given(8)).run_decompositions(decompositions())
    assert "mezzotint" not in str(program.graph)  # nor as an argument of an operator that stands for writes
    with torch.no_grad():
        for count in (8, 13):
            assert torch.equal(program.module()(*given(count)), module(*given(count)))


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_groups_of_given_sizes_in_operators_of_pytorch(recipe: str) -> None:
    module, given = mz.GroupedLinear(3, WIDTH, WIDTH).eval(), (tokens(8), [3, 0, 5])
    with torch.no_grad(), mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        program = torch.export.export(module, given).run_decompositions(decompositions())
        assert torch.equal(program.module()(*given), module(*given))
    assert not [node for node in program.graph.nodes if "mezzotint" in str(node.target)]


def test_groups_whose_sizes_are_values() -> None:
    make, inputs = MODULES["grouped_linear"]
    program = exported(Region(make().eval(), None), inputs(8))
    with pytest.raises(ValueError, match=r"mezzotint\.grouped_gemm.*the sizes of groups as a list"):
        program.run_decompositions(decompositions())
