"""GroupedLinear with one parameter for all groups, against one with a parameter for each: the same bits."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint.functional.grouped_linear import group_tensors
from tests.quantizer_formats import assert_same_bytes
from tests.recipes import GROUPS, OPTIONS, RECIPES, VARIANTS, assert_equal, gradient, run, sample, splits, step

# And what changes what backward reads.
ALL = {**RECIPES, **{name: VARIANTS[name] for name in ("current-high_precision", "rowwise-wgrad", "mxfp8-dequantized")}}
WITHOUT_STATE = [name for name in RECIPES if name not in ("none", "delayed")]
ONE = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS = {"both": ONE, "weight": {"single_grouped_weight": True}, "bias": {"single_grouped_bias": True}}
OUT, IN = 48, 64


def layer(groups: int = GROUPS, init: Any = None, **options: Any) -> Any:
    """The same initial values, and biases, in every form."""
    torch.manual_seed(0)
    with mz.quantized_model_init(enabled=init is not None, recipe=init):
        made = mz.GroupedLinear(groups, IN, OUT, **{**OPTIONS, **options})
    if made.use_bias and not made._parameters["bias" if made._bias_names == ("bias",) else "bias0"].is_meta:
        with torch.no_grad():
            for group, value in enumerate(torch.randn(groups, OUT)):
                group_tensors(made._group_parameters()[1], 1)[group].copy_(value)
    return made


def joined(found: dict[str, Any], groups: int = GROUPS) -> dict[str, Any]:
    """With those of all groups as one, whatever form they came in."""
    made = dict(found)
    for kind in ("weight", "bias"):
        each = [made.pop(f"{kind}{group}") for group in range(groups) if f"{kind}{group}" in made]
        if each:
            made[kind] = None if each[0] is None else torch.stack(each)
    return {name: made[name] for name in sorted(made)}


def weights(module: Any) -> list[Any]:
    """Of each group."""
    return list(group_tensors(tuple([p.detach() for p in module._group_parameters()[0]]), 2))


# Forward, gradients, state


@pytest.mark.parametrize("recipe", ALL)
def test_the_bits_of_a_parameter_for_each(recipe: str) -> None:
    module, each = layer(**ONE), layer()
    assert list(dict(module.named_parameters())) == ["weight", "bias"]
    assert (module.weight.shape, module.bias.shape) == ((GROUPS, OUT, IN), (GROUPS, OUT))
    for seed in range(2):
        actual, expected = (step(m, sample(seed=seed), ALL[recipe]) for m in (module, each))
        assert_equal(joined(actual), joined(expected))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    options = {"params_dtype": torch.float32}
    module, each = layer(**FORMS[form], **options), layer(**options)
    x = sample(dtype=torch.float32)
    assert_equal(joined(step(module, x, RECIPES["mxfp8"])), joined(step(each, x, RECIPES["mxfp8"])))


@pytest.mark.parametrize("form", FORMS)
def test_one_group(form: str) -> None:
    found = []
    for options in (FORMS[form], {}):
        module = layer(1, **options)
        with mz.autocast(recipe=RECIPES["current"]):
            y = module(sample(), [40])
        gradient(y).backward()
        found.append(joined({"y": y, **{name: p.grad for name, p in module.named_parameters()}}, 1))
    assert_equal(*found)


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("recipe", "quantized", "fused"),
    [
        ("delayed", False, True),
        ("current-high_precision", False, False),
        ("mxfp8", True, False),
    ],
)
def test_compiled(recipe: str, quantized: bool, fused: bool) -> None:
    init = ALL[recipe] if quantized else None
    module = layer(2, init, fuse_wgrad_accumulation=fused, **ONE)
    each = layer(2, init, fuse_wgrad_accumulation=fused)
    for m in (module, each):
        for weight in m._group_parameters()[0]:
            weight.main_grad = torch.ones(weight.shape) if fused else None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for seed in range(2):
        actual = step(module, sample(seed=seed), ALL[recipe], compiled)
        assert_equal(joined(actual, 2), joined(step(each, sample(seed=seed), ALL[recipe]), 2))
    assert counter.frame_count == 1
    if fused:
        assert torch.equal(module.weight.main_grad, torch.stack([each.weight0.main_grad, each.weight1.main_grad]))


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_is_written_as_one(recipe: str) -> None:
    module = layer(bias=False, **ONE)
    loss = gradient(run(module, sample(), RECIPES[recipe])[0])
    with Called() as called:
        loss.backward()
    assert "mezzotint::grouped_gemm" in called.names
    assert not {"aten::cat", "aten::stack"} & set(called.names)
    assert (module.weight.grad.shape, module.weight.grad.is_contiguous()) == (module.weight.shape, True)


def test_groups_are_slices() -> None:
    module = layer(**ONE)
    for place, slice_ in enumerate(group_tensors((module.weight,), 2)):
        assert slice_.data_ptr() == module.weight[place].data_ptr()
        assert not slice_.requires_grad


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_micro_batches(recipe: str) -> None:
    module, each = layer(**ONE), layer()
    for seed in range(4):
        kwargs = {"is_first_microbatch": seed % 2 == 0}
        actual, expected = (step(m, sample(seed=seed), RECIPES[recipe], **kwargs) for m in (module, each))
        assert_equal(joined(actual), joined(expected))
        with torch.no_grad():  # what is kept does not see it
            for parameter in (*module.parameters(), *each.parameters()):
                parameter.mul_(1.5)
    assert recipe == "none" or all(kept is not None for kept in module._workspaces)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen(frozen: str) -> None:
    module, each = layer(**ONE), layer()
    for m in (module, each):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    actual = joined(step(module, sample(), RECIPES["mxfp8"]))
    assert_equal(actual, joined(step(each, sample(), RECIPES["mxfp8"])))
    assert actual[frozen] is None


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_main_grad(overwrites: bool, delayed: bool) -> None:
    found = []
    for options in (ONE, {}):
        module = layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed, **options)
        for weight in module._group_parameters()[0]:
            weight.main_grad, weight.overwrite_main_grad = torch.ones(weight.shape), overwrites
        gradient(run(module, sample(), RECIPES["mxfp8"])[0]).backward()
        if delayed:
            module.backward_dw()
        assert all(weight.grad is None for weight in module._group_parameters()[0])
        found.append({name: p.main_grad for name, p in module.named_parameters() if "weight" in name})
    assert_equal(joined(found[0]), joined(found[1]))


def test_delayed_weight_gradients_add_up() -> None:
    module, each = layer(delay_wgrad_compute=True, **ONE), layer()
    for seed in range(2):
        gradient(run(module, sample(seed=seed), RECIPES["mxfp8"])[0]).backward()
        gradient(run(each, sample(seed=seed), RECIPES["mxfp8"])[0]).backward()
    assert module.weight.grad is None
    module.backward_dw()
    module.backward_dw()
    assert torch.equal(module.weight.grad, torch.stack([w.grad for w in each._group_parameters()[0]]))


def test_return_bias() -> None:
    module = layer(return_bias=True, **ONE)
    _, biases = module(sample(), splits(40))
    assert torch.equal(torch.stack(biases), module.bias)
    sum((place + 1) * bias.sum() for place, bias in enumerate(biases)).backward()
    assert torch.equal(module.bias.grad, torch.arange(1, GROUPS + 1).bfloat16()[:, None].expand(GROUPS, OUT))


# Making one


def test_meta_device() -> None:
    for init in (None, RECIPES["mxfp8"]):
        module, there = layer(init=init, device="meta", **ONE), layer(init=init, **ONE)
        assert module.weight.is_meta
        torch.manual_seed(0)
        module.reset_parameters()
        for value, other in zip(weights(module), weights(there), strict=True):
            assert torch.equal(value.dequantize(), other.dequantize()) if init else torch.equal(value, other)
        assert not module.bias.any()


@pytest.mark.parametrize(("mode", "shape", "dim"), [("column", (3, 24, 64), 1), ("row", (3, 48, 32), 2)])
def test_part_of_a_weight(mode: str, shape: tuple[int, ...], dim: int) -> None:
    module = layer(bias=False, parallel_mode=mode, tp_size=2, **ONE)
    module.reset_parameters()
    assert (tuple(module.weight.shape), module.weight.partition_dim) == (shape, dim)


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"single_grouped_weight with quantized_model_init.*Float8Quantizer"):
        layer(init=RECIPES["delayed"], **ONE)
    with pytest.raises(ValueError, match=r"fuse_wgrad_accumulation needs weight\.main_grad"):
        layer(fuse_wgrad_accumulation=True, **ONE)(sample(), splits(40))


# Joined after the module was made


@pytest.mark.parametrize("recipe", WITHOUT_STATE)
@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
def test_joined_later(recipe: str, is_quantized: bool) -> None:
    init = RECIPES[recipe] if is_quantized else None
    module, expected = layer(init=init), layer(init=init, single_grouped_weight=True)
    before = step(module, sample(), RECIPES[recipe])
    module.make_grouped_weights()
    assert list(dict(module.named_parameters())) == list(dict(expected.named_parameters()))
    for value, other in zip(weights(module), weights(expected), strict=True):
        assert_same_bytes(value, other) if is_quantized else torch.testing.assert_close(value, other, rtol=0, atol=0)
    assert_equal(joined(step(module, sample(), RECIPES[recipe])), joined(before))
    module.load_state_dict(expected.state_dict())
    parameter = module.weight
    module.make_grouped_weights()  # joined already
    assert module.weight is parameter


def test_joined_later_in_delayed_scaling() -> None:
    module, expected = layer(), layer(single_grouped_weight=True)
    for each in (module, expected):
        step(each, sample(), RECIPES["delayed"])
    module.make_grouped_weights(defer_init=True)
    assert len(list(module.parameters())) == 2 * GROUPS
    module.make_grouped_weights()
    actual, wanted = (step(each, sample(seed=1), RECIPES["delayed"]) for each in (module, expected))
    assert_equal(joined(actual), joined(wanted))


def test_values_from_before_quantization_are_joined() -> None:
    options: dict[str, Any] = {"enabled": True, "recipe": RECIPES["mxfp8"], "preserve_high_precision_init_val": True}
    torch.manual_seed(0)
    with mz.quantized_model_init(**options):
        module, cleared = (mz.GroupedLinear(GROUPS, IN, OUT, **OPTIONS) for _ in range(2))
    values = [getattr(module, f"weight{group}").get_high_precision_init_val() for group in range(GROUPS)]
    module.make_grouped_weights()
    assert torch.equal(module.weight.get_high_precision_init_val(), torch.stack(values))
    cleared.weight0.clear_high_precision_init_val()
    with pytest.raises(ValueError, match=f"{GROUPS - 1} of {GROUPS} weights have the values"):
        cleared.make_grouped_weights()


def test_not_joined() -> None:
    with pytest.raises(ValueError, match=r"such as Float8Quantizer.*one weight has one quantizer"):
        layer(init=RECIPES["delayed"]).make_grouped_weights()
    module = layer()
    module.weight1.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad is .*'weight1': False"):
        module.make_grouped_weights()
    module = layer()
    module.weight0.grad = torch.zeros_like(module.weight0)
    with pytest.raises(ValueError, match="weight0 has a gradient, which would be lost"):
        module.make_grouped_weights()
    assert len(list(module.parameters())) == 2 * GROUPS


@pytest.mark.compile
def test_a_graph_sees_that_weights_were_joined() -> None:
    module, eager = layer(), layer()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        expected = eager(sample(), splits(40))
        assert torch.equal(compiled(sample(), splits(40)), expected)
        module.make_grouped_weights()
        with torch.no_grad():
            module.weight.zero_()
            for group in range(GROUPS):
                module.weight[group].copy_(getattr(eager, f"weight{group}"))
        assert torch.equal(compiled(sample(), splits(40)), expected)


# State dicts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_state_dicts_of_other_forms(form: str, recipe: str) -> None:
    """Nested, strict, with delayed scaling's state, there and back."""
    first, second = (nn.Sequential(layer(**options)) for options in ({}, FORMS[form]))
    step(first[0], sample(), RECIPES[recipe])
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    state = first.state_dict()
    second.load_state_dict(state)
    assert set(state) == set(first.state_dict())  # what is given is not written to
    expected = step(first[0], sample(seed=1), RECIPES[recipe])
    assert_equal(joined(step(second[0], sample(seed=1), RECIPES[recipe])), joined(expected))
    third = nn.Sequential(layer(device="meta"))
    third.load_state_dict(second.state_dict(), assign=True)
    assert_equal(dict(third.named_parameters()), dict(first.named_parameters()))


@pytest.mark.parametrize(
    ("given", "loading", "message"),
    [
        ({}, {"groups": 2, **ONE}, r'Unexpected key\(s\) in state_dict: "weight2", "bias2"'),
        (ONE, {"groups": 2}, r'Unexpected key\(s\) in state_dict: "weight2", "bias2"'),
        ({}, {"groups": 4, **ONE}, r'Missing key\(s\) in state_dict: "weight", "bias"'),
        ({"params_dtype": torch.float32, **ONE}, {"groups": 4, **ONE}, r"size mismatch for weight"),
    ],
)
def test_state_dicts_that_do_not_fit(given: Any, loading: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        layer(**loading).load_state_dict(layer(**given).state_dict())


# Quantized: a GroupedTensor


@pytest.mark.parametrize("recipe", WITHOUT_STATE)
def test_quantized(recipe: str) -> None:
    """Bytes of initial values and after two steps, and bits of what is computed with them."""
    chosen = ALL[recipe]
    module, each = layer(init=chosen, **ONE), layer(init=chosen)
    assert type(module.weight) is mz.GroupedTensor
    fused = [mz.optimizers.FusedAdam(m.parameters(), lr=0.1) for m in (module, each)]
    torchs = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, each)]
    for seed, optimizers in enumerate((fused, torchs)):
        found = []
        for m, optimizer in zip((module, each), optimizers, strict=True):
            y, x = run(m, sample(seed=seed), chosen)
            gradient(y).backward()
            found.append(joined({"y": y, "x": x.grad, **{name: p.grad for name, p in m.named_parameters()}}))
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(*found)
        for member, weight in zip(weights(module), weights(each), strict=True):
            assert_same_bytes(member, weight)


def test_quantized_copies_and_state_dicts() -> None:
    init = RECIPES["nvfp4"]
    with mz.quantized_model_init(recipe=init, preserve_high_precision_init_val=True):
        torch.manual_seed(0)
        module = mz.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=True, **OPTIONS)
    plain = layer(bias=False, **ONE)
    assert torch.equal(module.weight.get_high_precision_init_val(), plain.weight)
    module.weight.main_grad = torch.ones(1)
    twin = copy.deepcopy(module)
    assert twin.weight.main_grad is not module.weight.main_grad
    assert twin.weight.rowwise_data.data_ptr() != module.weight.rowwise_data.data_ptr()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    each = layer(init=init, bias=False)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *each.parameters()):
            parameter.zero_()
    each.load_state_dict(state)
    twin.load_state_dict(each.state_dict())  # bytes, there and back
    for found in (twin, each):
        for member, weight in zip(weights(found), weights(module), strict=True):
            assert_same_bytes(member, weight)
    twin.load_state_dict(plain.state_dict())  # values are quantized
    assert_same_bytes(weights(twin)[1], weights(module)[1])
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight, module.weight.dequantize())
