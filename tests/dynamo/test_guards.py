"""Guards: how many a compiled model has for each module of ours, and that all that may change is among them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import mezzotint as mz
from mezzotint import ops, recipe

pytestmark = pytest.mark.compile

FIXED = 220  # of a graph, whatever is in it
# Of each further module in a graph.
MODULES: dict[str, tuple[Any, int, int]] = {
    "linear": (lambda: mz.Linear(32, 32), 30, 40),
    "converted_linear": (lambda: mz.convert(nn.Linear(32, 32), filter=lambda module, name: True), 18, 26),
    "layernorm_linear": (lambda: mz.LayerNormLinear(32, 32), 45, 45),
    "layernorm_mlp": (lambda: mz.LayerNormMLP(32, 64), 45, 45),
    "transformer_layer": (lambda: mz.TransformerLayer(32, 64, 2), 140, 140),
    "operations": (lambda: ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.Linear(64, 32)), 80, 95),
}


def count_guards(model: nn.Module, x: torch.Tensor) -> int:
    found: list[int] = []

    def count(guards: Any) -> list[bool]:
        found.append(len(guards))
        return [True] * len(guards)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": count})
    compiled(x)
    assert len(found) == 1
    return found[0]


@pytest.mark.cover(0)
@pytest.mark.parametrize("chosen", [recipe.MXFP8BlockScaling(), recipe.DelayedScaling()], ids=["mxfp8", "delayed"])
@pytest.mark.parametrize("name", MODULES)
def test_a_further_module_has_few(name: str, chosen: recipe.Recipe) -> None:
    """Five in a row against four: what one adds, and what is there once."""
    make, most, most_delayed = MODULES[name]
    x = torch.randn(16, 2, 32, requires_grad=True)
    with mz.autocast(recipe=chosen):
        four, five = [count_guards(nn.Sequential(*[make() for _ in range(n)]), x) for n in (4, 5)]
    assert five - four <= (most_delayed if chosen.delayed() else most)
    assert four - 4 * (five - four) <= FIXED


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("chosen", [None, recipe.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("name", MODULES)
def test_an_unchanged_module_needs_no_evaluation(name: str, chosen: recipe.Recipe | None) -> None:
    """All guards of a model's modules are on values that PyTorch knows to be immutable. torch 2.11 then evaluates none
    of them until something is assigned to a module. (Delayed scaling assigns in each step.)"""

    def nodes(node: Any) -> Any:
        yield node
        children = node.get_child_managers() if hasattr(node, "get_child_managers") else []
        if isinstance(node, torch._C._dynamo.guards.DictGuardManager):
            children = [value for _, value in node.get_key_value_managers().values() if value is not None]
        for child in children:
            yield from nodes(child)

    model = Stack(MODULES[name][0](), MODULES[name][0]())
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True),
        mz.autocast(enabled=chosen is not None, recipe=chosen),
    ):
        torch.compile(model, fullgraph=True, backend="eager")(torch.randn(16, 2, 32, requires_grad=True))
    (entry,) = _debug_get_cache_entry_list(Stack.forward.__code__)
    ours = type(model.layers[0])
    safe = [node.is_tag_safe() for node in nodes(entry.guard_manager.root) if node.get_type_of_guarded_value() is ours]
    assert safe == [True] * len(model.layers)


@pytest.mark.parametrize("chosen", [recipe.MXFP8BlockScaling(), recipe.DelayedScaling()], ids=["mxfp8", "delayed"])
def test_a_gradient_that_goes_to_main_grad_has_few(chosen: recipe.Recipe) -> None:
    """Beside those of the weight and its `main_grad` a module with one has no more than others."""

    def make(count: int) -> nn.Module:
        made = nn.Sequential(*[mz.Linear(32, 32, fuse_wgrad_accumulation=True) for _ in range(count)])
        for parameter in made.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        return made

    x = torch.randn(16, 2, 32, requires_grad=True)
    with mz.autocast(recipe=chosen):
        two, three = count_guards(make(2), x), count_guards(make(3), x)
    assert three - two <= 60
    assert two - 2 * (three - two) <= FIXED


def test_an_option_that_a_graph_assigns() -> None:
    """The module has the configuration that follows from it, in the graph and after it."""
    module = mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(16, 32).bfloat16()

    def run(saves: bool) -> torch.Tensor:
        module.save_original_input = saves
        y: torch.Tensor = module(x)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for saves in (False, True, False):
        with mz.autocast(recipe=recipe.Float8CurrentScaling()):
            y = compiled(saves)
            assert module.save_original_input is module._config.saves_original_input is saves
            assert torch.equal(y, module(x))


def test_what_may_change_is_looked_at() -> None:
    """The recipe, whether it is in force, shapes, and a module's options; an equal recipe makes no new graph."""
    graphs: list[int] = []
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = mz.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph

    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    current, coarse = recipe.Float8CurrentScaling(), recipe.Float8CurrentScaling(use_power_2_scales=True)

    def run(chosen: recipe.Recipe | None, rows: int = 16) -> int:
        x = torch.randn(rows, 32).bfloat16().requires_grad_()
        other = x.detach().clone().requires_grad_()
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            y, want = compiled(x), module(other)
        y.float().square().sum().backward()
        want.float().square().sum().backward()
        assert torch.equal(y, want)
        assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
        return len(graphs)

    assert run(current) == 1
    assert run(recipe.Float8CurrentScaling()) == 1
    assert run(coarse) == 2
    assert run(None) == 3
    assert run(current, 24) == 4
    module.save_original_input = True
    assert run(current) == 5
    module.save_original_input = False
    assert run(current) == 5
