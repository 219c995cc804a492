"""How many graphs: whole ones, one for repeated steps, bounded where something changes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint import recipe as recipes
from tests.recipes import MODULES, RECIPES, assert_equal, gradient, make, run, sample, step, twins

pytestmark = pytest.mark.compile

over_modules = pytest.mark.parametrize("name", MODULES)
over_some = pytest.mark.parametrize("recipe", ["delayed", "none", "current", "mxfp8", "nvfp4"])


def compiled(module: Any, **options: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend("aot_eager")
    counters.clear()
    return torch.compile(module, fullgraph=True, backend=counter, **options), counter


@pytest.mark.cover(0)
@over_some
@over_modules
def test_micro_batches_have_two_graphs(name: str, recipe: str) -> None:
    eager, module = twins(name)
    call, counter = compiled(module)
    for seed, first in enumerate((True, False, False, True, False)):
        x = sample(seed=seed)
        got = step(module, x, RECIPES[recipe], call, is_first_microbatch=first)
        assert_equal(got, step(eager, x, RECIPES[recipe], is_first_microbatch=first))
    assert counter.frame_count == (1 if recipe == "none" else 2)
    assert not counters["graph_break"]


@pytest.mark.cover(0)
@over_some
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp"])
def test_five_batch_sizes_have_two_graphs(name: str, recipe: str) -> None:
    eager, module = twins(name)
    call, counter = compiled(module)
    for seed, rows in enumerate((16, 40, 33, 96, 7)):
        x = sample(rows, seed)
        assert_equal(step(module, x, RECIPES[recipe], call), step(eager, x, RECIPES[recipe]))
    assert counter.frame_count <= 2


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp"])
def test_five_batch_sizes_of_blocks_have_two_graphs(name: str) -> None:
    """Up to 128 tokens are one block, and a size of 1 has a graph of its own; beyond there is one for all."""
    eager, module = twins(name)
    call, counter = compiled(module)
    for seed, rows in enumerate((136, 160, 300, 257, 129)):
        x = sample(rows, seed)
        assert_equal(step(module, x, RECIPES["block"], call), step(eager, x, RECIPES["block"]))
    assert counter.frame_count <= 2


EPSILONS = {
    f"{name}-epsilon": cls(fp8_quant_fwd_inp=recipes.QParams(amax_epsilon=0.1))
    for name, cls in (
        ("current", recipes.Float8CurrentScaling),
        ("rowwise", recipes.Float8RowwiseScaling),
        ("block", recipes.Float8BlockScaling),
    )
}


@pytest.mark.parametrize("recipe", [*RECIPES, *EPSILONS])
def test_symbolic_sizes_from_the_start(recipe: str) -> None:
    """`dynamic=True`, which makes symbols of floats and ints that are read, too: options of a recipe stay constants."""
    chosen = EPSILONS[recipe] if recipe in EPSILONS else RECIPES[recipe]
    eager, module = twins("linear")
    call, counter = compiled(module, dynamic=True)
    for seed, rows in enumerate((40, 56, 33)):
        x = sample(rows, seed)
        assert_equal(step(module, x, chosen, call), step(eager, x, chosen))
    assert counter.frame_count == 1


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_five_routings_have_two_graphs(recipe: str) -> None:
    """Groups whose sizes change from step to step."""
    eager, module = twins("grouped_linear")
    call, counter = compiled(module)
    for seed, sizes in enumerate(([16, 8, 24], [20, 12, 16], [30, 10, 8], [9, 35, 4], [17, 11, 20])):
        x = sample(48, seed)
        results = []
        for target, owner in ((module, call), (eager, eager)):
            leaf = x.clone().requires_grad_()
            with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                y = owner(leaf, sizes)
            gradient(y).backward()
            results.append({"output": y.detach(), "input": leaf.grad, "weight": target.weight1.grad.clone()})
            target.zero_grad()
        assert_equal(results[0], results[1])
    assert counter.frame_count <= 2


@pytest.mark.cover(0)
@over_some
@over_modules
def test_train_eval_train(name: str, recipe: str) -> None:
    eager, module = twins(name)
    call, counter = compiled(module)
    for seed in range(3):
        x = sample(seed=seed)
        assert_equal(step(module, x, RECIPES[recipe], call), step(eager, x, RECIPES[recipe]))
        module.eval(), eager.eval()
        with torch.no_grad():
            assert torch.equal(run(module, x, RECIPES[recipe], call)[0], run(eager, x, RECIPES[recipe])[0])
        module.train(), eager.train()
    assert counter.frame_count <= 3


def test_an_equal_recipe_is_no_new_graph_and_another_one_is() -> None:
    eager, module = twins("linear")
    call, counter = compiled(module)
    x = sample()
    expected = [1, 1, 2, 2, 3, 4, 4]
    for chosen, graphs in zip(
        (
            recipes.Float8CurrentScaling(),
            recipes.Float8CurrentScaling(),
            recipes.Float8CurrentScaling(use_power_2_scales=True),
            dataclasses.replace(
                recipes.Float8CurrentScaling(),
                use_power_2_scales=True,
                fp8_quant_fwd_inp=None,
                fp8_quant_fwd_weight=None,
                fp8_quant_bwd_grad=None,
            ),
            recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
            recipes.Float8CurrentScaling(fp8_gemm_fprop=recipes.MMParams(True)),
            recipes.Float8CurrentScaling(),
        ),
        expected,
        strict=True,
    ):
        assert_equal(step(module, x, chosen, call), step(eager, x, chosen))
        assert counter.frame_count == graphs, chosen


@pytest.mark.slow
def test_requires_grad_may_change() -> None:
    eager, module = twins("layernorm_mlp")
    call, counter = compiled(module)
    for frozen in ((), ("fc1_weight", "fc1_bias"), (), ("layer_norm_weight",)):
        for target in (module, eager):
            for key, parameter in target.named_parameters():
                parameter.requires_grad_(key not in frozen)
        x = sample()
        assert_equal(step(module, x, RECIPES["mxfp8"], call), step(eager, x, RECIPES["mxfp8"]))
    assert counter.frame_count <= 4


class Nested(nn.Module):
    """Regions inside the compiled function, with recipes made inside and outside of it."""

    def __init__(self, outside: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = make("layernorm_linear"), make("linear", bias=False), make("linear")
        with torch.no_grad():
            self.second.weight.mul_(0.5)
        self.up = mz.Linear(48, 64, params_dtype=torch.bfloat16, device="cpu")
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mz.autocast(recipe=self.outside):
            a = self.first(x)
            with mz.autocast(recipe=recipes.MXFP8BlockScaling()):
                b = self.second(x)
                with mz.autocast(enabled=False):
                    c = self.up(a)
            return self.third(c) + b


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4", "custom"])
def test_regions_inside_the_compiled_function(recipe: str) -> None:
    torch.manual_seed(0)
    eager, module = Nested(RECIPES[recipe]), Nested(RECIPES[recipe])
    module.load_state_dict(eager.state_dict())
    call, counter = compiled(module)
    for seed in range(3):
        x = sample(seed=seed)
        torch.manual_seed(seed)
        results = []
        for target, owner in ((module, call), (eager, eager)):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(seed)
            y = owner(leaf)
            gradient(y).backward()
            grads = {key: parameter.grad.clone() for key, parameter in target.named_parameters()}
            scales = {f"scale {key}": part.scale_fwd.clone() for key, part in target.named_children()}
            scales |= {f"grad scale {key}": part.scale_bwd.clone() for key, part in target.named_children()}
            results.append({"output": y.detach(), "input": leaf.grad, **grads, **scales})
            target.zero_grad()
        assert_equal(*results)
    assert counter.frame_count == 1
    if recipe == "delayed":
        assert eager.first.scale_fwd[0] != 1
        assert eager.second.scale_fwd[0] == 1


def test_two_factories_inside_one_function() -> None:
    """Each region has the quantizers of its own instance."""
    linear = make("linear")
    one = recipes.CustomRecipe(mz.custom_recipes.nvfp4_factory)
    two = recipes.CustomRecipe(mz.custom_recipes.high_precision_factory)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with mz.autocast(recipe=one):
            a = linear(x)
        with mz.autocast(recipe=two):
            b = linear(x)
        return a, b

    x = sample()
    expected = both(x)
    got = compiled(both)[0](x)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert not torch.equal(got[0], got[1])


@pytest.mark.cover(0)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("microbatches", [(None, None), (True, False)], ids=["batches", "microbatches"])
def test_a_stack_of_layers_compiled_one_by_one(microbatches: tuple[bool | None, ...]) -> None:
    """Layers share their code: a region that counts its modules must not make a graph for each of them, nor may what a
    layer keeps from one micro-batch to the next."""
    layers = nn.ModuleList([make("layernorm_mlp") for _ in range(6)])
    eager = nn.ModuleList([make("layernorm_mlp") for _ in range(6)])
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    for seed, first in enumerate(microbatches):
        results = []
        for stack in (layers, eager):
            x = sample(seed=seed).requires_grad_()
            with mz.autocast(recipe=RECIPES["delayed"]):
                y = x
                for layer in stack:
                    y = y + layer(y, is_first_microbatch=first)
            gradient(y).backward()
            results.append({"output": y.detach(), "input": x.grad})
            results[-1] |= {f"scale {i}": layer.scale_fwd.clone() for i, layer in enumerate(stack)}
            stack.zero_grad()
        assert_equal(*results)
    assert counter.frame_count <= (2 if microbatches[0] is None else 4)


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_checkpoint_inside_the_compiled_function(recipe: str) -> None:
    eager, module = twins("layernorm_mlp")

    def call(x: torch.Tensor) -> Any:
        return mz.checkpoint(module, x, use_reentrant=False)

    whole, counter = compiled(call)
    for seed in range(2):
        x = sample(seed=seed)
        assert_equal(step(module, x, RECIPES[recipe], whole), step(eager, x, RECIPES[recipe]))
    assert counter.frame_count == 1


def test_checkpoint_of_delayed_scaling_inside_says_what_to_do() -> None:
    module = make("linear")
    call, _ = compiled(lambda x: mz.checkpoint(module, x))
    with pytest.raises(Exception, match=r"outside of torch\.compile"), mz.autocast(recipe=RECIPES["delayed"]):
        call(sample().requires_grad_())


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp", "grouped_linear"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_main_grad(name: str, recipe: str) -> None:
    eager, module = twins(name, fuse_wgrad_accumulation=True)
    for target in (eager, module):
        for parameter in target.parameters():
            if parameter.dim() == 2:
                parameter.main_grad = torch.zeros(parameter.shape)
    call, counter = compiled(module)
    for seed in range(3):
        x = sample(seed=seed)
        assert_equal(step(module, x, RECIPES[recipe], call), step(eager, x, RECIPES[recipe]))
    for (key, got), expected in zip(module.named_parameters(), eager.parameters(), strict=True):
        if got.dim() == 2:
            assert got.main_grad.any() or key == "weight1"
            assert torch.equal(got.main_grad, expected.main_grad)
    assert counter.frame_count == 1


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "nvfp4", "custom"])
def test_quantized_weights(recipe: str) -> None:
    with mz.quantized_model_init(recipe=RECIPES[recipe]):
        torch.manual_seed(0)
        eager = MODULES["layernorm_mlp"]()
        torch.manual_seed(0)
        module = MODULES["layernorm_mlp"]()
    call, counter = compiled(module)
    for seed in range(2):
        x = sample(seed=seed)
        assert_equal(step(module, x, RECIPES[recipe], call), step(eager, x, RECIPES[recipe]))
    assert counter.frame_count == 1


def test_delayed_weight_gradients_say_why_they_do_not_compile() -> None:
    call, _ = compiled(make("linear", delay_wgrad_compute=True))
    with pytest.raises(Exception, match="delay_wgrad_compute"):
        call(sample().requires_grad_())


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_output(recipe: str) -> None:
    eager, module = twins("linear")
    call, _ = compiled(module)
    with mz.autocast(recipe=RECIPES[recipe]):
        got, expected = call(sample(), fp8_output=True), eager(sample(), fp8_output=True)
    assert isinstance(got, mz.QuantizedTensor)
    assert torch.equal(got.dequantize(), expected.dequantize())
