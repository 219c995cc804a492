"""A quantized tensor that is written between forward and backward: backward says so, as of any tensor.

Autograd counts writes into a tensor. What a forward saves of a quantized one are its buffers, so those must count.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import QuantizedTensor
from mezzotint.tensor.quantize import update_quantized
from tests.recipes import IN, OUT, RECIPES, make, run, sample

Write = Callable[[Any], Any]

QUANTIZED = [name for name in RECIPES if name != "none"]
over_recipes = pytest.mark.parametrize("recipe", QUANTIZED)


def ones(w: torch.Tensor) -> torch.Tensor:
    return torch.ones(w.shape, dtype=w.dtype)


def stepped(make_optimizer: Callable[..., torch.optim.Optimizer]) -> Write:
    def step(w: Any) -> None:
        w.grad = ones(w)
        make_optimizer([w], lr=0.5).step()
        w.grad = None

    return step


WRITES: dict[str, Write] = {
    "copy_": lambda w: w.copy_(ones(w)),
    "copy_ of its form": lambda w: w.copy_(w.detach().clone()),
    "add_": lambda w: w.add_(1.0),
    "zero_": lambda w: w.zero_(),
    "an item": lambda w: w.__setitem__(0, 2.0),
    "_foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "detach": lambda w: w.detach().zero_(),
    "data": lambda w: w.data.zero_(),
    "a view": lambda w: w.view(2, -1, w.shape[-1]).zero_(),
    "quantize_": lambda w: w.quantize_(ones(w)),
    "update_quantized": lambda w: w._quantizer.update_quantized(ones(w), w),
    "quantize(out=)": lambda w: w._quantizer.quantize(ones(w), out=w),
    "copy_from_storage": lambda w: w.copy_from_storage(w.detach().clone()),
    "SGD": stepped(torch.optim.SGD),
    "AdamW": stepped(torch.optim.AdamW),
    "FusedAdam": stepped(mz.optimizers.FusedAdam),
}


def quantized(name: str, recipe: str, **options: Any) -> Any:
    with mz.quantized_model_init(recipe=RECIPES[recipe]):
        return make(name, **options)


def assert_refuses(y: torch.Tensor, write: Callable[[], Any], label: str) -> None:
    """Backward of y, after the write, raises what autograd raises of a plain tensor."""
    with torch.no_grad():
        write()
    raised = ""
    try:
        y.float().sum().backward()
    except RuntimeError as error:
        raised = str(error)
    assert "modified by an inplace operation" in raised, f"{label}: backward went on with other weights than forward's"


@over_recipes
def test_a_weight_written_between_forward_and_backward_is_refused(recipe: str) -> None:
    module, x = quantized("linear", recipe), sample()
    for label, write in WRITES.items():
        y, _ = run(module, x, RECIPES[recipe])
        assert_refuses(y, lambda write=write: write(module.weight), label)
    y, _ = run(module, x, RECIPES[recipe])
    assert_refuses(y, lambda: module.load_state_dict(quantized("linear", recipe).state_dict()), "load_state_dict")


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "delayed"])
def test_the_same_of_a_compiled_forward(recipe: str) -> None:
    module, x = quantized("linear", recipe), sample()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for label in ("copy_", "add_", "quantize_", "SGD", "FusedAdam"):
        y, _ = run(module, x, RECIPES[recipe], call=compiled)
        assert_refuses(y, lambda label=label: WRITES[label](module.weight), label)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["zero_", "add_", "copy_"])
def test_the_same_of_a_compiled_write(name: str) -> None:
    module = quantized("linear", "mxfp8")
    write = torch.compile(WRITES[name], backend="aot_eager", fullgraph=True)
    y, _ = run(module, sample(), RECIPES["mxfp8"])
    assert_refuses(y, lambda: write(module.weight), name)


@pytest.mark.parametrize("name", ["layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_every_weight_of_a_module_counts(name: str) -> None:
    module = quantized(name, "mxfp8")
    weights = {key: p for key, p in module.named_parameters() if isinstance(p, QuantizedTensor)}
    assert weights
    for key, weight in weights.items():
        y, _ = run(module, sample(), RECIPES["mxfp8"])
        assert_refuses(y, lambda weight=weight: weight.zero_(), key)


def test_the_weight_of_an_operation_counts() -> None:
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        op = mz.ops.Linear(IN, OUT, dtype=torch.bfloat16, device="cpu")
    y, _ = run(op, sample(), RECIPES["mxfp8"])
    assert_refuses(y, lambda: op.weight.zero_(), "ops.Linear")


GROUP_WRITES: dict[str, Write] = {
    "zero_": lambda w: w.zero_(),
    "copy_ of its form": lambda w: w.copy_(w.detach().clone()),
    "quantize_": lambda w: w.quantize_(ones(w)),
    "quantize": lambda w: w.quantize([ones(w)[0]] * 3),
    "a member": lambda w: w.split_into_quantized_tensors()[0].zero_(),
    "unbind": lambda w: w.unbind()[0].zero_(),
}


def test_one_weight_of_all_groups_counts_and_so_do_its_members() -> None:
    module = quantized("grouped_linear", "mxfp8", single_grouped_weight=True)
    for label, write in GROUP_WRITES.items():
        y, _ = run(module, sample(), RECIPES["mxfp8"])
        assert_refuses(y, lambda write=write: write(module.weight), label)


@pytest.mark.parametrize("name", ["zero_", "quantize_", "update_quantized", "copy_from_storage", "FusedAdam"])
def test_a_tensor_that_autograd_saved_itself_counts(name: str) -> None:
    """`x * w` saves the tensor, not its buffers."""
    weight = quantized("linear", "mxfp8").weight
    x = torch.ones(OUT, IN, dtype=torch.bfloat16, requires_grad=True)
    assert_refuses(x * weight, lambda: WRITES[name](weight), name)


def test_a_group_that_autograd_saved_itself_counts() -> None:
    weight = quantized("grouped_linear", "mxfp8", single_grouped_weight=True).weight
    x = torch.ones(weight.shape, dtype=torch.bfloat16, requires_grad=True)
    for label in ("zero_", "quantize_", "quantize"):
        assert_refuses(x * weight, lambda label=label: GROUP_WRITES[label](weight), label)


def test_a_view_that_was_saved_counts_what_is_written_to_the_whole() -> None:
    weight = quantized("linear", "mxfp8").weight.detach()
    kept = weight.view(2, -1, IN)
    before = {name: buffer._version for name, buffer in kept._buffers()}
    weight.zero_()
    assert all(buffer._version > before[name] for name, buffer in kept._buffers())


def test_a_write_under_no_tracking_is_none_of_autograds_business() -> None:
    """Tensors that were made in inference mode have no counter."""
    with torch.inference_mode():
        made = mz.MXFP8Quantizer(mz.DType.kFloat8E4M3).quantize(torch.ones(32, 32))
        made.quantize_(torch.zeros(32, 32))
        update_quantized(torch.full((32, 32), 2.0), made, made._quantizer)
        made.add_(1.0)
    assert torch.equal(made.dequantize(), torch.full((32, 32), 3.0))


def test_a_weight_that_backward_does_not_read_may_be_written() -> None:
    """Without a gradient of the input; `nn.Linear` allows it, too."""
    module = quantized("linear", "mxfp8")
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        y = module(sample())
    with torch.no_grad():
        module.weight.zero_()
    y.sum().backward()
    assert module.weight.grad is not None


@over_recipes
def test_a_microbatch_that_quantizes_again_leaves_the_earlier_ones_theirs(recipe: str) -> None:
    """The workspace of a first microbatch is a new one: backward of the last step's is still of its weights."""
    module, x = make("linear"), sample()
    chosen = RECIPES[recipe]
    expected, leaf = run(module, x, chosen, is_first_microbatch=True)
    expected.float().sum().backward()
    other = make("linear")
    first, early = run(other, x, chosen, is_first_microbatch=True)
    with torch.no_grad():
        other.weight.zero_()
    run(other, x, chosen, is_first_microbatch=True)
    first.float().sum().backward()
    assert torch.equal(early.grad, leaf.grad)
