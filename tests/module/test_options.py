"""What the options of a module do: dtypes, what is given back, weights in parts, initial values."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.layer import parameters
from mezzotint.recipe import QuantizerRole
from tests.recipes import GROUPS, IN, MODULES, OPTIONS, OUT, RECIPES, assert_equal, gradient, make, run, sample, step
from tests.recipes import STATE as BUFFERS

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
WITH_NORM = ["layernorm_linear", "layernorm_mlp"]


# Dtypes


BUILDS: dict[str, Any] = {
    "Linear": lambda **options: mz.Linear(32, 32, **options),
    "LayerNormLinear": lambda **options: mz.LayerNormLinear(32, 32, **options),
    "LayerNormMLP": lambda **options: mz.LayerNormMLP(32, 64, **options),
    "GroupedLinear": lambda **options: mz.GroupedLinear(2, 32, 32, **options),
    "LayerNorm": lambda **options: mz.LayerNorm(32, **options),
    "RMSNorm": lambda **options: mz.RMSNorm(32, **options),
    "MultiheadAttention": lambda **options: mz.MultiheadAttention(32, 2, input_layernorm=True, **options),
    "TransformerLayer": lambda **options: mz.TransformerLayer(32, 64, 2, **options),
}
over_builds = pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))


@over_builds
@pytest.mark.parametrize("names", [("dtype",), ("params_dtype",), ("dtype", "params_dtype")], ids=" ".join)
def test_dtype_is_params_dtype(build: Any, names: tuple[str, ...]) -> None:
    module = build(device="cpu", **dict.fromkeys(names, torch.bfloat16))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


@over_builds
def test_two_dtypes(build: Any) -> None:
    message = r"params_dtype is torch.float32, dtype torch.bfloat16: they are two names of one thing; give one"
    with pytest.raises(ValueError, match=message):
        build(device="cpu", params_dtype=torch.float32, dtype=torch.bfloat16)


@over_builds
def test_a_module_computes_in_the_dtype_of_its_input(build: Any) -> None:
    """As the docstring of `Linear` says: BF16 out of FP32 parameters, whose gradients are FP32."""
    module = build(device="cpu", dtype=torch.float32)
    inputs = [torch.randn(8, 4, 32).bfloat16()]
    inputs += [[16, 16]] if isinstance(module, mz.GroupedLinear) else []
    y = module(*inputs)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}


# Bias given back


@over_modules
@over_recipes
def test_return_bias(name: str, recipe: str) -> None:
    """The output is that without a bias, and the bias comes beside it, in the dtype of the output."""
    module = make(name, return_bias=True)
    plain = copy.deepcopy(module)
    last = [key for key in dict(module.named_parameters()) if key.startswith(("bias", "fc2_bias"))]
    plain.return_bias = False
    for key in last:
        getattr(plain, key).data.zero_()
    result, leaf = run(module, sample(), RECIPES[recipe])
    expected = step(plain, sample(), RECIPES[recipe])
    y, bias = result
    assert torch.equal(y, expected["output"])
    biases = bias if name == "grouped_linear" else [bias]
    assert len(biases) == len(last) == (GROUPS if name == "grouped_linear" else 1)
    for got, key in zip(biases, last, strict=True):
        assert torch.equal(got, getattr(module, key))
    torch.manual_seed(1)  # as `step` does
    gradient(y).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected["input"])
    assert all(getattr(module, key).grad is None for key in last)
    (biases[0] * 2).sum().backward()
    assert torch.equal(getattr(module, last[0]).grad, torch.full_like(biases[0], 2))


@over_modules
def test_return_bias_without_a_bias(name: str) -> None:
    y, bias = run(make(name, return_bias=True, bias=False), sample(), None)[0]
    assert bias is None
    assert y.shape == (40, IN if name == "layernorm_mlp" else OUT)


def test_return_bias_in_the_dtype_of_the_output() -> None:
    module = make("linear", return_bias=True, params_dtype=torch.float32)
    y, bias = module(sample())
    assert y.dtype == bias.dtype == torch.bfloat16


# The norm's output given back


@pytest.mark.parametrize("option", ["return_layernorm_output", "return_layernorm_output_gathered"])
@pytest.mark.parametrize("name", WITH_NORM)
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8", "custom"])
def test_return_layernorm_output(name: str, recipe: str, option: str) -> None:
    """What the norm would give, and a gradient that comes from there too."""
    check_norm_output(name, recipe, {option: True})


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_return_layernorm_output_and_recompute(recipe: str) -> None:
    check_norm_output("layernorm_mlp", recipe, {"return_layernorm_output": True, "checkpoint": True})


def check_norm_output(name: str, recipe: str, options: dict[str, Any]) -> None:
    module = make(name, **options)
    rms = name == "layernorm_mlp"
    norm = (mz.RMSNorm if rms else mz.LayerNorm)(IN, **OPTIONS)
    plain = make(name)
    with torch.no_grad():
        norm.weight.copy_(module.layer_norm_weight)
        if not rms:
            norm.bias.copy_(module.layer_norm_bias)
    weights = torch.randn(40, IN, generator=torch.Generator().manual_seed(5)).bfloat16()
    (y, norm_out), leaf = run(module, sample(), RECIPES[recipe])
    (gradient(y) + (norm_out * weights).sum()).backward()
    # The same in two parts, whose gradients are summed where the norm's output branches.
    x = sample().requires_grad_()
    out = norm(x)
    assert torch.equal(norm_out, out)
    expected = step(plain, sample(), RECIPES[recipe])
    assert torch.equal(y, expected["output"])
    out.backward(weights)
    assert leaf.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(leaf.grad, expected["input"] + x.grad, rtol=0.03, atol=0.03)
    total = expected["layer_norm_weight"] + norm.weight.grad
    torch.testing.assert_close(module.layer_norm_weight.grad, total, rtol=0.03, atol=0.3)
    for key, parameter in module.named_parameters():
        if not key.startswith("layer_norm"):
            assert torch.equal(parameter.grad, expected[key]), key


@pytest.mark.parametrize("name", WITH_NORM)
@pytest.mark.parametrize("recipe", ["none", "delayed", "nvfp4"])
def test_a_gradient_of_the_norm_output_alone(name: str, recipe: str) -> None:
    module = make(name, return_layernorm_output=True)
    (_, norm_out), leaf = run(module, sample(), RECIPES[recipe])
    norm_out.float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.any() or name == "layernorm_linear"  # the gradient of a sum over a LayerNorm is nearly nothing
    assert module.layer_norm_weight.grad.any()
    for key, parameter in module.named_parameters():
        if not key.startswith("layer_norm"):
            assert not parameter.grad.any(), key


@pytest.mark.parametrize("name", WITH_NORM)
def test_everything_given_back(name: str) -> None:
    module = make(name, return_bias=True, return_layernorm_output=True)
    y, bias, norm_out = module(sample())
    assert y.shape == (40, OUT if name == "layernorm_linear" else IN)
    assert bias.shape == y.shape[1:]
    assert norm_out.shape == (40, IN)


# One weight in parts


PARTS = {"query": 24, "key": 16, "value": 8}


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (("query", "key", "value"), [16, 16, 16]),
        (["query_", "key_", "value_"], [16, 16, 16]),
        (PARTS, [24, 16, 8]),
        ({"query_": 24, "key": 24}, [24, 24]),
        (("only",), [48]),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", [mz.Linear, mz.LayerNormLinear])
def test_parts_are_the_whole(cls: Any, parts: Any, sizes: list[int], bias: bool) -> None:
    torch.manual_seed(0)
    split = cls(IN, OUT, parameters_split=parts, bias=bias, **OPTIONS)
    whole = cls(IN, OUT, bias=bias, **OPTIONS)
    names = [part.removesuffix("_") for part in parts]
    kinds = ("weight", "bias") if bias else ("weight",)
    own = {f"{part}_{kind}" for part in names for kind in kinds}
    assert {key for key, _ in split.named_parameters() if not key.startswith("layer_norm")} == own
    assert [getattr(split, f"{part}_weight").shape[0] for part in names] == sizes
    assert not hasattr(split, "weight")
    with torch.no_grad():
        for kind in kinds:
            getattr(whole, kind).copy_(torch.cat([getattr(split, f"{part}_{kind}") for part in names]))
    for recipe in ("none", "delayed", "mxfp8"):
        got, expected = step(split, sample(), RECIPES[recipe]), step(whole, sample(), RECIPES[recipe])
        for kind in kinds:
            joined = [got.pop(f"{part}_{kind}") for part in names]
            assert [part.shape[0] for part in joined] == sizes
            got[kind] = torch.cat(joined)
        assert_equal(got, expected)


def test_parts_are_slices_of_one_buffer() -> None:
    module = mz.Linear(IN, OUT, parameters_split=PARTS, **OPTIONS)
    first, second = module.query_weight, module.key_weight
    assert second.data_ptr() == first.data_ptr() + first.numel() * first.element_size()


def test_parts_have_delayed_gradients() -> None:
    immediate = mz.Linear(IN, OUT, parameters_split=PARTS, **OPTIONS)
    delayed = mz.Linear(IN, OUT, parameters_split=PARTS, delay_wgrad_compute=True, **OPTIONS)
    delayed.load_state_dict(immediate.state_dict())
    expected = step(immediate, sample(), RECIPES["mxfp8"])
    for _ in range(2):
        y, _ = run(delayed, sample(), RECIPES["mxfp8"])
        gradient(y).backward()
        delayed.backward_dw()
    for part in PARTS:
        assert torch.equal(getattr(delayed, f"{part}_weight").grad, 2 * expected[f"{part}_weight"])


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (("a", "b", "c", "d", "e"), ValueError, r"parameters_split has 5 names for 48 features: give a dict of sizes"),
        ({"a": 16, "b": 16}, ValueError, r"parameters_split is {'a': 16, 'b': 16}: the sizes must add up to 48"),
        ({"a": 64, "b": -16}, ValueError, r"parameters_split\['b'\] is -16: give a positive int"),
        ("qkv", TypeError, r"parameters_split is 'qkv': give a tuple of names or a dict"),
    ],
)
@pytest.mark.parametrize("cls", [mz.Linear, mz.LayerNormLinear])
def test_wrong_parts(cls: Any, parts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(IN, OUT, parameters_split=parts, **OPTIONS)


def test_parts_of_a_quantized_weight_are_refused() -> None:
    quantized = mz.quantized_model_init(recipe=RECIPES["mxfp8"])
    with quantized, pytest.raises(ValueError, match=r"parameters_split with quantized_model_init: .*has no parts"):
        mz.Linear(IN, OUT, parameters_split=PARTS, **OPTIONS)


# Saving the input as it came


@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
@over_recipes
def test_save_original_input(name: str, recipe: str) -> None:
    """Quantizing it again in backward gives the bytes that forward had."""
    module, plain = make(name, save_original_input=True), make(name)
    for seed in range(3):
        x = sample(seed=seed) * (seed + 1)
        assert_equal(step(module, x, RECIPES[recipe]), step(plain, x, RECIPES[recipe]))
    for each, saves in ((module, True), (plain, recipe == "none")):
        y, leaf = run(each, sample(), RECIPES[recipe])
        node = y.grad_fn
        while not hasattr(node, "saved_tensors"):  # a view of the matrix
            node = node.next_functions[0][0]
        assert any(tensor.data_ptr() == leaf.data_ptr() for tensor in node.saved_tensors) == saves


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_inputs_are_safe_to_quantize_again(recipe: str) -> None:
    chosen = RECIPES[recipe]
    assert chosen is not None
    quantizer = chosen.quantizer(QuantizerRole("linear", "input"))
    assert isinstance(quantizer, recipes.DelayedScalingRequest) or quantizer.is_requantization_safe()


# Initial values


def test_default_init() -> None:
    torch.manual_seed(0)
    module = mz.LayerNormMLP(256, 512, device="cpu")
    for weight in (module.fc1_weight, module.fc2_weight):
        assert weight.std().item() == pytest.approx(0.023, rel=0.02)
        assert weight.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert not module.fc1_bias.any()
    assert not module.fc2_bias.any()
    assert (module.layer_norm_weight == 1).all()
    assert not module.layer_norm_bias.any()
    grouped = mz.GroupedLinear(2, 64, 64, device="cpu")
    assert not torch.equal(grouped.weight0, grouped.weight1)


@over_modules
def test_init_method(name: str) -> None:
    shapes: list[tuple[int, ...]] = []

    def fill(weight: torch.Tensor) -> None:
        shapes.append(tuple(weight.shape))
        weight.fill_(len(shapes))

    module = MODULES[name](init_method=fill)
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    assert shapes == [tuple(weight.shape) for weight in weights]
    for i, weight in enumerate(weights):
        assert (weight == i + 1).all()
    with mz.quantized_model_init(recipe=RECIPES["current"]):
        module = MODULES[name](init_method=lambda weight: weight.fill_(2.0))
    assert all((p.dequantize() == 2).all() for p in module.parameters() if p.dim() == 2)


def test_output_layer_init_method() -> None:
    module = MODULES["layernorm_mlp"](
        init_method=lambda w: w.fill_(1.0), output_layer_init_method=lambda w: w.fill_(2.0)
    )
    assert (module.fc1_weight == 1).all()
    assert (module.fc2_weight == 2).all()
    module = MODULES["layernorm_mlp"](output_layer_init_method=lambda w: w.fill_(2.0))
    assert module.fc1_weight.std() > 0
    assert (module.fc2_weight == 2).all()


class Tracker:
    """As the one of tensor parallelism: states by name."""

    def __init__(self) -> None:
        self.forks: list[Any] = []

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        self.forks.append(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(77)
            yield


@over_modules
def test_rng_tracker(name: str) -> None:
    """Weights come from the tracker's generator; the global one does not move."""
    tracker = Tracker()
    has_name = name in ("linear", "grouped_linear")
    options = {"rng_tracker_name": "experts"} if has_name else {}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    module = MODULES[name](get_rng_state_tracker=lambda: tracker, **options)
    assert torch.equal(torch.get_rng_state(), before)
    gemms = module.num_gemms
    assert tracker.forks == ["experts" if has_name else "model-parallel-rng"] * gemms
    weight = next(parameter for parameter in module.parameters() if parameter.dim() == 2)
    torch.manual_seed(77)
    assert torch.equal(weight, parameters.default_init(torch.empty_like(weight)))


@over_modules
def test_params_dtype(name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert {p.dtype for p in MODULES[name](params_dtype=dtype).parameters()} == {dtype}
    torch.set_default_dtype(torch.float16)
    try:
        assert {p.dtype for p in MODULES[name](params_dtype=None).parameters()} == {torch.float16}
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in MODULES[name](params_dtype=None).parameters()} == {torch.float32}
    module = MODULES[name](params_dtype=None)
    assert all(getattr(module, key).dtype == torch.float32 for key in BUFFERS)


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As given; else torch's default, and a GPU before the CPU where there is one."""
    assert parameters.resolve_device("meta") == torch.device("meta")
    assert parameters.resolve_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parameters.resolve_device(None) == torch.device("cpu")
    for cls in (mz.Linear, mz.LayerNormLinear, mz.LayerNormMLP):
        assert {p.device.type for p in cls(8, 8).parameters()} == {"cpu"}
    with torch.device("meta"):
        for module in (mz.Linear(8, 8), mz.LayerNormMLP(8, 8), mz.GroupedLinear(2, 8, 8), mz.LayerNorm(8)):
            assert {p.device.type for p in module.parameters()} == {"meta"}
        assert {p.device.type for p in mz.Linear(8, 8, device="cpu").parameters()} == {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parameters.resolve_device(None) == torch.device("cuda")
    assert parameters.resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", WITH_NORM)
def test_zero_centered_gamma(name: str, normalization: str) -> None:
    """gamma is stored minus one: 0 at the start, where it is 1 otherwise, and the numbers are the same."""
    options = {"normalization": normalization, "params_dtype": torch.float32}
    torch.manual_seed(0)
    centered = MODULES[name](zero_centered_gamma=True, **options)
    torch.manual_seed(0)
    plain = MODULES[name](**options)
    assert not centered.layer_norm_weight.any()
    assert (plain.layer_norm_weight == 1).all()
    assert (centered.layer_norm_bias is None) == (normalization == "RMSNorm")
    with torch.no_grad():
        centered.layer_norm_weight.add_(0.25)
        plain.layer_norm_weight.add_(0.25)
    x = sample(dtype=torch.float32)
    assert_equal(step(centered, x, None), step(plain, x, None))


def test_eps_reaches_the_norm() -> None:
    x = sample(dtype=torch.float32) * 0.01
    for name in WITH_NORM:
        small, large = (make(name, eps=eps, params_dtype=torch.float32)(x) for eps in (1e-5, 1.0))
        assert not torch.allclose(small, large, rtol=0.1)
    norm = mz.LayerNorm(IN, eps=0.5, device="cpu")
    torch.testing.assert_close(norm(x), F.layer_norm(x, (IN,), eps=0.5))


# The configuration: what a plan, and so a graph, goes by


@over_modules
def test_an_assignment_to_what_the_configuration_reads_renews_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attribute that it is made of is watched: a plan of an attribute that is not would be stale."""
    module: Any = make(name)
    read: set[str] = set()

    def record(self: Any, attribute: str) -> Any:
        if attribute in object.__getattribute__(self, "__dict__"):
            read.add(attribute)
        return object.__getattribute__(self, attribute)

    with monkeypatch.context() as patch:
        patch.setattr(type(module), "__getattribute__", record, raising=False)
        before = module._make_config()
    assert before == module._config
    assert {"num_gemms", "return_bias", "save_original_input"} < read <= module._CONFIGURED
    module.return_bias = not module.return_bias
    assert module._config != before
    module.fast_setattr("return_bias", not module.return_bias)
    assert module._config == before


@pytest.mark.parametrize(
    "made",
    [
        lambda: mz.Linear(IN, OUT, device="cpu"),
        lambda: mz.DotProductAttention(2, 16),
        lambda: mz.TransformerLayer(32, 64, 2, device="cpu"),
    ],
)
def test_a_pickle_holds_no_name_of_this_process(made: Any) -> None:
    """Configurations have names, by which graphs know them, and which each process gives itself."""
    module = made()
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert other._config == module._config
        assert other._config_name == module._config_name
    assert not {"_config", "_config_name"} & module.__getstate__().keys()
