"""What each option of a module does, and what is refused: constructors, forward, roles, a user's own quantizer."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.custom_recipes.gemm import GEMMType, MMParams
from mezzotint.layer import parameters
from mezzotint.module.base import TransformerEngineBaseModule
from mezzotint.recipe import CustomRecipe, DelayedScaling, QuantizerRole
from mezzotint.region import current_state
from tests.quantizer_formats import FORMATS, assert_same_bytes
from tests.recipes import (
    GROUPS,
    IN,
    MODULES,
    OPTIONS,
    OUT,
    RECIPES,
    assert_equal,
    forward_arguments,
    gradient,
    make,
    run,
    sample,
    splits,
    step,
)
from tests.recipes import STATE as BUFFERS

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
QUANTIZED = [name for name in RECIPES if name != "none"]
WITH_NORM = ["layernorm_linear", "layernorm_mlp"]

# Signatures, as upstream has them but for the device, and torch's name of `params_dtype`, last and by name

EMPTY = inspect.Parameter.empty
UB = ["ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]


def signature(text: str, **defaults: Any) -> list[tuple[str, Any]]:
    """Names in order; a default is None unless it is said."""
    return [(name, defaults.get(name)) for name in text.split()]


CONSTRUCTORS: dict[type, list[tuple[str, Any]]] = {
    mz.Linear: signature(
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type save_original_input name dtype",
        in_features=EMPTY,
        out_features=EMPTY,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        return_bias=False,
        delay_wgrad_compute=False,
        save_original_input=False,
        **dict.fromkeys(UB, False),
    ),
    mz.LayerNormLinear: signature(
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker init_method bias normalization return_bias params_dtype parallel_mode "
        "return_layernorm_output return_layernorm_output_gathered parameters_split zero_centered_gamma device "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type name dtype",
        in_features=EMPTY,
        out_features=EMPTY,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        zero_centered_gamma=False,
        delay_wgrad_compute=False,
        **dict.fromkeys(UB, False),
    ),
    mz.LayerNormMLP: signature(
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group tp_size "
        "init_method bias normalization activation activation_params output_layer_init_method "
        "fuse_wgrad_accumulation params_dtype return_layernorm_output return_layernorm_output_gathered seq_length "
        "micro_batch_size set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type checkpoint dtype",
        hidden_size=EMPTY,
        ffn_hidden_size=EMPTY,
        eps=1e-5,
        sequence_parallel=False,
        return_bias=False,
        tp_size=1,
        bias=True,
        normalization="LayerNorm",
        activation="gelu",
        fuse_wgrad_accumulation=False,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        set_parallel_mode=False,
        zero_centered_gamma=False,
        delay_wgrad_compute=False,
        checkpoint=False,
        **dict.fromkeys(UB, False),
    ),
    mz.GroupedLinear: signature(
        "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device "
        "ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute save_original_input single_grouped_weight "
        "single_grouped_bias name use_grouped_tensor dtype",
        num_gemms=EMPTY,
        in_features=EMPTY,
        out_features=EMPTY,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        return_bias=False,
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
    ),
    mz.LayerNorm: signature(
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size kwargs",
        eps=1e-5,
        zero_centered_gamma=False,
        kwargs=EMPTY,
    ),
    mz.RMSNorm: signature(
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size kwargs",
        eps=1e-5,
        zero_centered_gamma=False,
        kwargs=EMPTY,
    ),
    mz.Fp8Padding: signature("num_gemms align_size", num_gemms=EMPTY),
    mz.Fp8Unpadding: signature("num_gemms align_size", num_gemms=EMPTY),
    TransformerEngineBaseModule: signature("name"),
}
METHODS: dict[Any, list[tuple[str, Any]]] = {
    mz.Linear.forward: signature("inp is_first_microbatch fp8_output fp8_grad", fp8_output=False, fp8_grad=False),
    mz.LayerNormLinear.forward: signature(
        "inp is_first_microbatch fp8_output fp8_grad", fp8_output=False, fp8_grad=False
    ),
    mz.LayerNormMLP.forward: signature("inp is_first_microbatch"),
    mz.GroupedLinear.forward: signature("inp m_splits is_first_microbatch out dgrad_out", m_splits=EMPTY),
    mz.Fp8Padding.forward: signature("inp m_splits", m_splits=EMPTY),
    mz.Fp8Unpadding.forward: signature("inp m_splits", m_splits=EMPTY),
    TransformerEngineBaseModule.adjust_amax_history_length: signature("length fwd", length=EMPTY),
    TransformerEngineBaseModule.get_quantizer_roles: signature("fwd num_quantizers", fwd=EMPTY),
    TransformerEngineBaseModule.init_fp8_meta_tensors: signature("recipe", recipe=EMPTY),
    TransformerEngineBaseModule.get_fp8_meta_tensors: [],
    TransformerEngineBaseModule.reset_fp8_meta_tensors: signature("fp8_meta_tensors"),
    TransformerEngineBaseModule.get_extra_state: [],
    TransformerEngineBaseModule.set_extra_state: signature("state", state=EMPTY),
    TransformerEngineBaseModule.set_tensor_parallel_group: signature("tp_group", tp_group=EMPTY),
    TransformerEngineBaseModule.init_fp8_metadata: signature("num_gemms", num_gemms=1),
    TransformerEngineBaseModule.reset_parameters: signature("defer_init", defer_init=False),
    TransformerEngineBaseModule.register_wgrad_accumulation_and_reduce_hooks: signature(
        "wgrad_accumulation_and_reduce_hook", wgrad_accumulation_and_reduce_hook=EMPTY
    ),
    TransformerEngineBaseModule.need_backward_dw: [],
    TransformerEngineBaseModule.backward_dw: [],
}


@pytest.mark.parametrize("cls", CONSTRUCTORS, ids=lambda cls: cls.__name__)
def test_constructor(cls: type) -> None:
    assert [(p.name, p.default) for p in inspect.signature(cls).parameters.values()] == CONSTRUCTORS[cls]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_method(method: Any) -> None:
    """What is ours alone is private, and given by name."""
    _, *rest = inspect.signature(method).parameters.values()
    rest = [p for p in rest if not (p.name.startswith("_") and p.kind is p.KEYWORD_ONLY)]
    expected = METHODS[method]
    if method.__name__ == "forward":
        expected = [("inp", EMPTY), *expected[1:]]
    assert [(p.name, p.default) for p in rest] == expected


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


# Quantized tensors at the boundary

BOUNDARY = {
    "delayed": mz.Float8Tensor,
    "current": mz.Float8Tensor,
    "rowwise": mz.Float8RowwiseTensor,
    "block": mz.Float8BlockwiseQTensor,
    "mxfp8": mz.MXFP8Tensor,
    "nvfp4": mz.NVFP4Tensor,
    "custom": mz.HybridQuantizedTensor,
}


@pytest.mark.parametrize("recipe", BOUNDARY)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_quantized_output(name: str, recipe: str) -> None:
    """The output, quantized by the output's quantizer; gradients as without."""
    module, plain = make(name), make(name)
    expected = step(plain, sample(), RECIPES[recipe])
    y, leaf = run(module, sample(), RECIPES[recipe], fp8_output=True)
    assert type(y) is BOUNDARY[recipe]
    assert y.dtype == torch.bfloat16
    assert y.get_usages() == {"rowwise": True, "columnwise": False}
    quantizer = plain.quantizers["scaling_fwd"][2].with_usage(rowwise=True, columnwise=False)
    if recipe == "delayed":
        quantizer = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), quantizer.dtype, columnwise=False)
    assert_same_bytes(y.detach(), quantizer.quantize(expected["output"]))
    torch.manual_seed(1)
    gradient(y.dequantize()).backward()
    got = {"input": leaf.grad, **{key: parameter.grad for key, parameter in module.named_parameters()}}
    assert_equal(got, {key: expected[key] for key in got})


@pytest.mark.parametrize("recipe", BOUNDARY)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_quantized_gradient(name: str, recipe: str) -> None:
    module, plain = make(name), make(name)
    expected = step(plain, sample(), RECIPES[recipe])
    y, leaf = run(module, sample(), RECIPES[recipe], fp8_grad=True)
    assert torch.equal(y, expected["output"])
    (dx,) = torch.autograd.grad(gradient(y), leaf)
    gradient_class = mz.MXFP8Tensor if recipe == "custom" else BOUNDARY[recipe]
    assert type(dx) is gradient_class
    quantizer = plain.quantizers["scaling_bwd"][1].with_usage(rowwise=True, columnwise=False)
    if recipe == "delayed":
        quantizer = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), quantizer.dtype, columnwise=False)
    if recipe == "nvfp4":  # rounds stochastically: near
        torch.testing.assert_close(dx.dequantize(), expected["input"], rtol=0.5, atol=0.1)
    else:
        assert_same_bytes(dx, quantizer.quantize(expected["input"]))


def test_delayed_scaling_of_the_boundary() -> None:
    """Output and gradient of the input have slots of their own, which learn."""
    module, plain = make("linear"), make("linear")
    seen: dict[str, list[float]] = {"output": [], "input": []}
    for seed in range(3):
        scale = module.scale_fwd[2].item()
        y, leaf = run(module, sample(seed=seed), RECIPES["delayed"], fp8_output=True, fp8_grad=True)
        (dx,) = torch.autograd.grad(y, leaf, sample(width=OUT))
        expected, leaf = run(plain, sample(seed=seed), RECIPES["delayed"])
        expected.backward(sample(width=OUT))
        for key, tensor in (("output", expected), ("input", leaf.grad)):
            assert tensor is not None
            seen[key].append(tensor.detach().abs().max().item())
        assert y._scale_inv.item() == pytest.approx(1 / scale)
        assert module.amax_history_fwd[:4, 2].tolist() == [0.0] * (3 - seed) + seen["output"]
        assert module.scale_fwd[2].item() == pytest.approx(448 / max(seen["output"]))
        # The gradient of the input is quantized after the update at the end of the backward that made it.
        before = seen["input"][:-1]
        assert module.scale_bwd[1].item() == pytest.approx(57344 / max(before) if before else 1.0)
        assert dx._scale_inv.item() == pytest.approx(1 / module.scale_bwd[1].item())
        assert module.amax_history_bwd[0, 1].item() == seen["input"][-1]


def test_a_quantized_output_is_not_counted_twice() -> None:
    """`checkpoint` runs the module again: the amax of its output has been entered before."""
    module, twin = make("linear"), make("linear")
    for seed in range(3):
        x = sample(seed=seed) * (3 - seed)
        step(twin, x, RECIPES["delayed"], fp8_output=True)
        step(module, x, RECIPES["delayed"], lambda x: mz.checkpoint(module, x, None, True, use_reentrant=True))
        assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_the_boundary_needs_a_recipe(name: str, option: str) -> None:
    module = make(name)
    for region in (mz.autocast(enabled=False), mz.autocast(enabled=False, recipe=RECIPES["mxfp8"])):
        with region, pytest.raises(ValueError, match=r"fp8_output and fp8_grad need a recipe: .*inside autocast"):
            module(sample().requires_grad_(), **{option: True})


@pytest.mark.parametrize("fmt", ["float8_current", "float8_block_1d", "mxfp8", "nvfp4", "hybrid", "identity"])
@over_modules
def test_quantized_input(name: str, fmt: str) -> None:
    """As what it stands for, and its gradient goes to what it was made of."""
    module, twin = make(name), make(name)
    x = sample().requires_grad_()
    quantized = FORMATS[fmt].make().quantize(x)
    assert isinstance(quantized, mz.QuantizedTensor)
    expected = step(twin, quantized.detach().dequantize(), RECIPES["current"])
    with mz.autocast(recipe=RECIPES["current"]):
        y = module(quantized, *forward_arguments(module, x))
    assert torch.equal(y, expected["output"])
    gradient(y).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected["input"])


def test_a_quantized_output_is_an_input() -> None:
    first, second = make("linear"), mz.Linear(OUT, IN, **OPTIONS)
    x = sample().requires_grad_()
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        y = second(first(x, fp8_output=True))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert first.weight.grad.any()


# Weights kept over micro-batches


def kept(module: Any) -> tuple[Any, ...]:
    assert module._workspaces is not None
    return module._workspaces


@over_modules
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_first_microbatch(name: str, recipe: str) -> None:
    module, x = make(name), sample()
    arguments = forward_arguments(module, x)
    with mz.autocast(recipe=RECIPES[recipe]):
        module(x, *arguments)
        assert module._workspaces is None  # None keeps nothing
        module(x, *arguments, is_first_microbatch=True)
        first = kept(module)
        assert len(first) == module.num_gemms
        before = module(x, *arguments, is_first_microbatch=False)
        assert all(a is b for a, b in zip(kept(module), first, strict=True))
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3)
        assert torch.equal(module(x, *arguments, is_first_microbatch=False), before)  # what was kept
        fresh = module(x, *arguments)
        assert not torch.equal(fresh, before)
        assert all(a is b for a, b in zip(kept(module), first, strict=True))  # None leaves it alone
        assert torch.equal(module(x, *arguments, is_first_microbatch=False), before)
        again = module(x, *arguments, is_first_microbatch=True)
        assert torch.equal(again, fresh)
        assert not any(a is b for a, b in zip(kept(module), first, strict=True))
        assert all(not isinstance(w, torch.Tensor) for w in kept(module))  # plain holders, outside of autograd


@over_modules
def test_a_workspace_that_does_not_do_is_made_anew(name: str) -> None:
    """False without one; with one of another recipe; with one that lacks a direction. Each is a miss, which is kept."""
    module, x = make(name), sample()
    arguments = forward_arguments(module, x)

    def call(recipe: str, grad: bool = True) -> torch.Tensor:
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad), mz.autocast(recipe=RECIPES[recipe]):
            return module(leaf, *arguments, is_first_microbatch=False)

    seen = []
    for recipe, grad in (("mxfp8", False), ("mxfp8", True), ("current", True), ("nvfp4", True), ("mxfp8", True)):
        fresh = run(make(name), x, RECIPES[recipe])[0]
        assert torch.equal(call(recipe, grad), fresh)
        seen.append(kept(module))
        assert torch.equal(call(recipe, grad), fresh)
        assert all(a is b for a, b in zip(kept(module), seen[-1], strict=True))
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert not any(a is b for a, b in zip(one, other, strict=True))
    # One with both directions serves a call without gradients.
    call("mxfp8", False)
    assert all(a is b for a, b in zip(kept(module), seen[-1], strict=True))


def test_a_kept_weight_has_the_scale_that_it_was_kept_with() -> None:
    """Delayed scaling updates in between; a miss with False, too, quantizes as True did."""
    recipe, module = RECIPES["delayed"], make("linear")
    step(module, sample(), recipe)
    scale = module.scale_fwd[1].item()
    step(module, sample(), recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(5)
    step(module, sample(), recipe)  # the scale of the weight follows it
    assert module.scale_fwd[1].item() != scale
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / scale)
    module._workspaces = None
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / scale)


@pytest.mark.parametrize("forget", ["load_state_dict", "reset_fp8_meta_tensors"])
def test_what_drops_kept_weights_drops_their_scale(forget: str) -> None:
    recipe, module = RECIPES["delayed"], make("linear")
    for first in (None, True, None):
        step(module, sample(), recipe, is_first_microbatch=first)
    state = make("linear").state_dict() | {"_extra_state": torch.full((5, 5), 7.0)}
    module.load_state_dict(state) if forget == "load_state_dict" else module.reset_fp8_meta_tensors()
    expected = module.scale_fwd[1].item()
    step(module, sample(), recipe, is_first_microbatch=False)
    assert kept(module)[0]._scale_inv.item() == pytest.approx(1 / expected)


def test_quantized_weights_need_no_workspace() -> None:
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        module = MODULES["linear"]()
    step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True)
    assert module._workspaces in (None, (None,))


# Gradients into main_grad


def with_main_grad(name: str, value: float = 0.0, **options: Any) -> Any:
    module = make(name, fuse_wgrad_accumulation=True, **options)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.full(parameter.shape, value)
    return module


@over_modules
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("delays", [False, True])
def test_overwrite_main_grad(name: str, recipe: str, delays: bool) -> None:
    """Written, not added to, where the weight says so; NaN that was there goes."""
    added = with_main_grad(name, delay_wgrad_compute=delays)
    step(added, sample(), RECIPES[recipe])
    module = with_main_grad(name, float("nan"), delay_wgrad_compute=delays)
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    for weight in weights:
        weight.overwrite_main_grad = True
    for _ in range(2):
        step(module, sample(), RECIPES[recipe])
    if delays:
        added.backward_dw()
        module.backward_dw()
        module.backward_dw()
    for weight, other in zip(weights, (p for p in added.parameters() if p.dim() == 2), strict=True):
        assert torch.equal(weight.main_grad, other.main_grad)
        assert weight.grad is None


@pytest.mark.parametrize("which", [0, 1])
def test_overwrite_one_of_the_groups(which: int) -> None:
    expected, module = with_main_grad("grouped_linear"), with_main_grad("grouped_linear", 100.0)
    getattr(module, f"weight{which}").overwrite_main_grad = True
    sizes = [10, 10, 20]
    for each in (expected, module):
        each(sample(), sizes).sum().backward()
    for i in range(GROUPS):
        wanted = getattr(expected, f"weight{i}").main_grad + (0.0 if i == which else 100.0)
        torch.testing.assert_close(getattr(module, f"weight{i}").main_grad, wanted)


def test_main_grad_with_a_frozen_group() -> None:
    module, expected = with_main_grad("grouped_linear"), with_main_grad("grouped_linear")
    module.weight1.requires_grad_(False)
    for each in (expected, module):
        each(sample(), [10, 10, 20]).sum().backward()
    assert not module.weight1.main_grad.any()
    for i in (0, 2):
        assert torch.equal(getattr(module, f"weight{i}").main_grad, getattr(expected, f"weight{i}").main_grad)


@over_modules
def test_missing_main_grad(name: str) -> None:
    module = make(name, fuse_wgrad_accumulation=True)
    message = r"fuse_wgrad_accumulation needs \w*weight0?.main_grad, a tensor to add into: set it first"
    with pytest.raises(ValueError, match=message):
        run(module, sample(), None)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    run(module, sample(), None)  # nobody asks for it


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


# Norms on their own


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 4)])
@pytest.mark.parametrize("rms", [False, True])
def test_norms_over_several_dimensions(shape: tuple[int, ...], rms: bool) -> None:
    """Parameters of that shape, as torch has them."""
    module = (mz.RMSNorm if rms else mz.LayerNorm)(shape, device="cpu")
    other = (nn.RMSNorm if rms else nn.LayerNorm)(shape, eps=1e-5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    module.load_state_dict(other.state_dict(), strict=True)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for norm in (module, other):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        (y * weights).sum().backward()
        results.append((y.detach(), leaf.grad, *(parameter.grad for parameter in norm.parameters())))
    for got, expected in zip(*results, strict=True):
        assert got is not None
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make_call", "error", "message"),
    [
        (lambda: mz.LayerNorm(), ValueError, r"normalized_shape is None: give the size of the last dimension"),
        (lambda: mz.LayerNorm(()), ValueError, r"normalized_shape is \(\): give the size"),
        (lambda: mz.RMSNorm((4, 0)), ValueError, r"normalized_shape\[1\] is 0: give a positive int"),
        (lambda: mz.LayerNorm(8, elementwise_affine=False), TypeError, r"LayerNorm got \['elementwise_affine'\]"),
        (lambda: mz.LayerNorm(8, device="cpu")([1.0]), TypeError, r"inp is list: give a torch.Tensor"),
        (lambda: mz.LayerNorm(8, device="cpu")(torch.ones(3, 4)), ValueError, r"shape \(3, 4\): its last .* must be 8"),
        (
            lambda: mz.RMSNorm((4, 8), device="cpu")(torch.ones(8, 4, 2, 8)),
            ValueError,
            r"inp has shape \(8, 4, 2, 8\): its last dimensions must be \(4, 8\)",
        ),
        (
            lambda: mz.RMSNorm((4, 8), device="cpu")(torch.ones(8)),
            ValueError,
            r"inp has shape \(8,\): its last dimensions must be \(4, 8\)",
        ),
        (
            lambda: mz.LayerNorm(8, device="cpu")(torch.ones(3, 8, dtype=torch.int32)),
            TypeError,
            r"inp has dtype torch.int32: modules take float32, float16 or bfloat16",
        ),
    ],
)
def test_refused_by_norms(make_call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_call()


def test_norms_take_upstreams_names() -> None:
    assert mz.LayerNorm(hidden_size=8, device="cpu").weight.shape == (8,)
    assert mz.LayerNorm(8, dtype=torch.float16, device="cpu").weight.dtype == torch.float16
    assert mz.LayerNorm(8, params_dtype=torch.bfloat16, device="cpu", sm_margin=3).weight.dtype == torch.bfloat16
    assert mz.LayerNorm(8, device="cpu", sm_margin=3).bwd_ln_sm_margin == 3
    norm = mz.RMSNorm(8, device="cpu", sm_margin={"forward": 1, "backward": 2})
    assert (norm.fwd_rmsnorm_sm_margin, norm.bwd_rmsnorm_sm_margin, norm.inf_rmsnorm_sm_margin) == (1, 2, 0)


# Activations


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _clamped(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> torch.Tensor:
    a, gate = x.chunk(2, -1)
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (gate.clamp(-limit, limit) + glu_linear_offset)


def _situ(x: torch.Tensor, beta1: float = 4.0, beta2: float = 25.0) -> torch.Tensor:
    a, gate = x.chunk(2, -1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(gate / beta2)


def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of the first half, times the second."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a, gate = x.chunk(2, -1)
        return activation(a) * gate

    return function


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": _gelu,
    "geglu": gated(_gelu),
    "glu": gated(torch.sigmoid),
    "qgelu": _qgelu,
    "qgeglu": gated(_qgelu),
    "relu": F.relu,
    "reglu": gated(F.relu),
    "srelu": _srelu,
    "sreglu": gated(_srelu),
    "silu": F.silu,
    "swiglu": gated(F.silu),
    "clamped_swiglu": _clamped,
    "situglu": _situ,
}
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")


def check_activation(name: str, **params: float) -> None:
    torch.manual_seed(0)
    module = mz.LayerNormMLP(
        IN, OUT, activation=name, activation_params=params or None, init_method=nn.init.xavier_normal_, device="cpu"
    )
    assert module.fc1_weight.shape == ((1 if name in PLAIN else 2) * OUT, IN)
    assert module.fc2_weight.shape == (IN, OUT)
    x = sample(dtype=torch.float32) * 3
    got = step(module, x, None)
    leaf = x.clone().requires_grad_()
    p = dict(module.named_parameters())
    hidden = F.layer_norm(leaf, (IN,), p["layer_norm_weight"], p["layer_norm_bias"])
    hidden = ACTIVATIONS[name](F.linear(hidden * 1.0, p["fc1_weight"], p["fc1_bias"]), **params)
    y = F.linear(hidden, p["fc2_weight"], p["fc2_bias"])
    gradient(y).backward()
    expected = {"output": y.detach(), "input": leaf.grad, **{key: value.grad for key, value in p.items()}}
    for key, value in expected.items():
        assert value is not None
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    check_activation(name)


@pytest.mark.parametrize(
    "params",
    [{"limit": 0.5}, {"alpha": 3.0}, {"glu_linear_offset": 0.0}, {"limit": 1.0, "alpha": 0.5, "glu_linear_offset": -1}],
    ids=str,
)
def test_activation_params(params: dict[str, float]) -> None:
    check_activation("clamped_swiglu", **params)


# What is refused


def layer(cls: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: cls(*args, **{**OPTIONS, **options})


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "features": (layer(mz.Linear, 0, 4), ValueError, r"in_features is 0: give a positive int"),
    "out-features": (layer(mz.Linear, 4, -1), ValueError, r"out_features is -1: give a positive int"),
    "float-features": (layer(mz.LayerNormLinear, 4.0, 4), ValueError, r"in_features is 4.0: give a positive int"),
    "hidden": (layer(mz.LayerNormMLP, None, 4), ValueError, r"hidden_size is None: give a positive int"),
    "ffn": (layer(mz.LayerNormMLP, 4, 0), ValueError, r"ffn_hidden_size is 0: give a positive int"),
    "gemms": (layer(mz.GroupedLinear, 0, 4, 4), ValueError, r"num_gemms is 0: give a positive int"),
    "activation": (
        layer(mz.LayerNormMLP, 8, 8, activation="swish"),
        ValueError,
        r"activation is 'swish': give one of gelu, .*clamped_swiglu",
    ),
    "activation-params": (
        layer(mz.LayerNormMLP, 8, 8, activation="clamped_swiglu", activation_params={"beta": 1.0}),
        ValueError,
        r"activation_params has beta: clamped_swiglu takes limit, alpha, glu_linear_offset",
    ),
    "no-activation-params": (
        layer(mz.LayerNormMLP, 8, 8, activation_params={"limit": 1.0}),
        ValueError,
        r"activation_params has limit: gelu takes none",
    ),
    "normalization": (
        layer(mz.LayerNormLinear, 8, 8, normalization="BatchNorm"),
        ValueError,
        r"normalization is 'BatchNorm': give 'LayerNorm' or 'RMSNorm'",
    ),
    "mlp-normalization": (
        layer(mz.LayerNormMLP, 8, 8, normalization="layernorm"),
        ValueError,
        r"normalization is 'layernorm': give",
    ),
}
SIZES = {mz.Linear: (8, 8), mz.LayerNormLinear: (8, 8), mz.LayerNormMLP: (8, 8), mz.GroupedLinear: (2, 8, 8)}
# What a module may be asked for that is not there.
ABSENT: dict[str, tuple[Any, type[Exception], str]] = {
    "parallel_mode": ("columns", ValueError, r"parallel_mode is 'columns': give None, 'column' or 'row'"),
    "tp_size": (0, ValueError, r"tp_size is 0: give the number of processes, 1 or more"),
    "symmetric_ar_type": ("two_shot", NotImplementedError, r"symmetric_ar_type='two_shot': .*leave it off"),
    **{ub: (True, NotImplementedError, rf"{ub}=True: there are no .*; leave it off\. .* torch\.compile") for ub in UB},
}


@pytest.mark.parametrize(
    ("cls", "option"),
    [(cls, option) for cls in SIZES for option in ABSENT if option in inspect.signature(cls).parameters],
)
def test_absent(cls: Any, option: str) -> None:
    value, error, message = ABSENT[option]
    with pytest.raises(error, match=message):
        cls(*SIZES[cls], **{option: value}, **OPTIONS)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make_module, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make_module()


def test_what_asks_for_nothing_is_accepted() -> None:
    for mode in (None, "column", "row"):
        mz.Linear(8, 8, parallel_mode=mode, tp_size=1, ub_name="qkv", **OPTIONS)
    mz.LayerNormMLP(8, 8, set_parallel_mode=True, seq_length=4, micro_batch_size=2, **OPTIONS)
    mz.GroupedLinear(2, 8, 8, use_grouped_tensor=False, **OPTIONS)


@over_modules
def test_refused_inputs(name: str) -> None:
    module = make(name)
    arguments = ([10, 10, 20],) if name == "grouped_linear" else ()
    for wrong, error, message in (
        ([[1.0] * IN], TypeError, r"inp is list: give a torch.Tensor"),
        (torch.ones(40, IN + 1), ValueError, rf"inp has shape \(40, {IN + 1}\): its last dimension must be {IN}"),
        (torch.tensor(1.0), ValueError, rf"inp has shape \(\): its last dimension must be {IN}"),
        (torch.ones(40, IN, dtype=torch.int64), TypeError, r"inp has dtype torch.int64: modules take float32"),
        (torch.ones(40, IN, dtype=torch.float64), TypeError, r"inp has dtype torch.float64: modules take float32"),
    ):
        with pytest.raises(error, match=message):
            module(wrong, *arguments)


# Groups


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([20, 20], r"m_splits has 2 entries: this module has 3 groups"),
        ([10, 10, 10, 10], r"m_splits has 4 entries: this module has 3 groups"),
        ([10, 10, 10], r"m_splits adds up to 30, inp has 40 rows: they must be equal"),
        (torch.tensor([10, 10, 21]), r"m_splits adds up to 41, inp has 40 rows: they must be equal"),
    ],
    ids=str,
)
def test_wrong_splits(sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grouped_linear")(sample(), sizes)


@pytest.mark.parametrize("sizes", [[-1, 41, 0], [10.0, 10.0, 20.0], 40], ids=str)
def test_splits_that_are_no_sizes(sizes: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="m_splits"):
        make("grouped_linear")(sample(), sizes)


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("shape", [(40,), (2, 20)])
def test_given_buffers(recipe: str, shape: tuple[int, ...]) -> None:
    module, twin = make("grouped_linear"), make("grouped_linear")
    x = sample().view(*shape, IN)
    expected = step(twin, x, RECIPES[recipe], lambda x, *_: twin(x, splits(40)))
    out = torch.full((*shape, OUT), float("nan"), dtype=torch.bfloat16)
    dgrad_out = torch.full((*shape, IN), float("nan"), dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = module(leaf, splits(40), out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(out.detach(), expected["output"])
    gradient(y).backward()
    assert torch.equal(dgrad_out, expected["input"])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected["input"])
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[key]), key


def test_a_given_buffer_serves_again() -> None:
    module, out = make("grouped_linear"), torch.empty(40, OUT, dtype=torch.bfloat16)
    for seed in range(2):
        module(sample(seed=seed), splits(40), out=out).float().sum().backward()
    assert not out.requires_grad


@pytest.mark.parametrize("shape", [(2, 40, OUT), (40, OUT)])
def test_a_wrong_buffer(shape: tuple[int, ...]) -> None:
    out = torch.empty(shape, dtype=torch.bfloat16 if len(shape) == 3 else torch.float16)
    with pytest.raises((ValueError, TypeError), match="out"):
        make("grouped_linear")(sample(), splits(40), out=out)


# Padding


@pytest.mark.parametrize("align", [1, 8, 16, 32])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_round_trip(align: int, as_tensor: bool) -> None:
    sizes = [3, 0, 16, 21]
    x = sample(40).requires_grad_()
    given: Any = torch.tensor(sizes) if as_tensor else sizes
    padded, padded_sizes = mz.Fp8Padding(4, align)(x, given)
    assert padded_sizes == [-(-size // align) * align for size in sizes]
    assert padded.shape == (sum(padded_sizes), IN)
    for part, whole, size in zip(padded.split(padded_sizes), x.split(sizes), sizes, strict=True):
        assert torch.equal(part[:size], whole)
        assert not part[size:].any()
    back = mz.Fp8Unpadding(4, align)(padded, given)
    assert torch.equal(back, x)
    (back * torch.arange(40)[:, None]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(40)[:, None].expand(40, IN).to(x.dtype))


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("delayed", 16), ("current", 16), ("rowwise", 16), ("block", 16), ("mxfp8", 32), ("nvfp4", 128), ("custom", 128)],
)
def test_padding_as_the_recipe_asks(recipe: str, size: int) -> None:
    padding, unpadding = mz.Fp8Padding(2), mz.Fp8Unpadding(2)
    x = sample(40)
    with mz.autocast(recipe=RECIPES[recipe]):
        padded, sizes = padding(x, [1, 39])
        assert sizes == [size, -(-39 // size) * size]
        assert torch.equal(unpadding(padded, [1, 39]), x)
    with mz.autocast(recipe=RECIPES["mxfp8"]):  # the one in force, at each call
        assert padding(x, [8, 32])[1] == [32, 32]


def test_nothing_to_pad() -> None:
    x = sample(48)
    padded, sizes = mz.Fp8Padding(2, 16)(x, [16, 32])
    assert padded is x
    assert sizes == [16, 32]
    assert mz.Fp8Unpadding(2, 16)(x, [16, 32]) is x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mz.Fp8Padding(2, 16)(sample(40), [40]), r"m_splits has 1 entries: this module has 2 groups"),
        (lambda: mz.Fp8Padding(2, 16)(sample(40), [20, 10]), r"inp has 40 rows, the groups 30: they must be equal"),
        (lambda: mz.Fp8Unpadding(2, 16)(sample(40), [20, 20]), r"inp has 40 rows, the groups 64: they must be equal"),
        (lambda: mz.Fp8Unpadding(3, 16)(sample(40), [20, 20]), r"m_splits has 2 entries: this module has 3 groups"),
        (lambda: mz.Fp8Padding(0), r"num_gemms is 0: give a positive int"),
        (lambda: mz.Fp8Unpadding(2, 0), r"align_size is 0: give a positive int"),
    ],
)
def test_wrong_padding(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Roles, quantizers and state, as tools read them


def roles(module: Any, fwd: bool, **kwargs: Any) -> list[tuple[str, str, str]]:
    return [(r.module_type, r.tensor_type, r.name) for r in module.get_quantizer_roles(fwd=fwd, **kwargs)]


@over_modules
def test_roles(name: str) -> None:
    module = MODULES[name](name="me")
    own = {"layernorm_mlp": ["me.fc1", "me.fc2"], "grouped_linear": ["me.0", "me.1", "me.2"]}.get(name, ["me"])
    kind = "grouped_linear" if name == "grouped_linear" else "linear"
    forward = [(kind, tensor, gemm) for gemm in own for tensor in ("input", "weight", "output")]
    backward = [(kind, tensor, gemm) for gemm in own for tensor in ("grad_output", "grad_input")]
    assert roles(module, True) == forward
    assert roles(module, False) == backward
    assert roles(module, True, num_quantizers=2) == forward[:2]
    assert module.output_quantizer_role is None
    assert module.grad_input_quantizer_role is None
    module.output_quantizer_role = QuantizerRole("dpa", "qkv", "attention")
    module.grad_input_quantizer_role = QuantizerRole("norm", "grad", "before")
    assert roles(module, True) == [*forward[:-1], ("dpa", "qkv", "attention")]
    assert roles(module, False) == [backward[0], ("norm", "grad", "before"), *backward[2:]]
    module.output_quantizer_role = module.grad_input_quantizer_role = None
    assert roles(module, True) == forward
    assert roles(module, False) == backward


def test_an_output_is_quantized_as_who_reads_it_asks() -> None:
    def factory(role: QuantizerRole) -> Any:
        if role.module_type == "reader":
            return mz.NVFP4Quantizer() if role.tensor_type == "input" else mz.Float8CurrentScalingQuantizer(7)
        return mz.MXFP8Quantizer()

    module, recipe = make("linear"), CustomRecipe(factory)
    assert isinstance(run(module, sample(), recipe, fp8_output=True)[0], mz.MXFP8Tensor)
    module.output_quantizer_role = QuantizerRole("reader", "input", "next")
    module.grad_input_quantizer_role = QuantizerRole("reader", "grad_output", "next")
    y, leaf = run(module, sample(), recipe, fp8_output=True, fp8_grad=True)
    assert isinstance(y, mz.NVFP4Tensor)
    (dx,) = torch.autograd.grad(gradient(y.dequantize()), leaf)
    assert isinstance(dx, mz.Float8Tensor)


@over_modules
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_quantizers_by_slot(name: str, recipe: str) -> None:
    chosen, module = RECIPES[recipe], make(name)
    assert chosen is not None
    assert module.quantizers == {}
    with mz.autocast(recipe=chosen):
        assert set(module.quantizers) == {"scaling_fwd", "scaling_bwd"}
    step(module, sample(), chosen)
    found = module.quantizers
    for key, per_gemm in (("scaling_fwd", 3), ("scaling_bwd", 2)):
        slots = module.get_quantizer_roles(fwd=key == "scaling_fwd")
        assert len(found[key]) == len(slots) == per_gemm * module.num_gemms
        for slot, (quantizer, role) in enumerate(zip(found[key], slots, strict=True)):
            if recipe != "delayed":
                assert quantizer == chosen.quantizer(role)
                continue
            meta = module.fp8_meta[key]
            assert isinstance(quantizer, mz.Float8Quantizer)
            assert quantizer.scale.data_ptr() == meta.scale[slot].data_ptr()
            assert quantizer.amax.data_ptr() == meta.amax_history[0, slot].data_ptr()
            assert quantizer.dtype == (mz.DType.kFloat8E4M3 if key == "scaling_fwd" else mz.DType.kFloat8E5M2)


def test_fp8_meta() -> None:
    module = make("layernorm_mlp")
    recipe = DelayedScaling(amax_history_len=6)
    module.init_fp8_meta_tensors(recipe)
    meta = module.fp8_meta
    assert meta["recipe"] is recipe
    assert meta["num_gemms"] == module.num_gemms == 2
    assert meta["scaling_fwd"].scale.tolist() == [1.0] * 6
    assert meta["scaling_fwd"].amax_history.shape == (6, 6)
    assert meta["scaling_bwd"].amax_history.shape == (6, 4)
    assert {type(q) for q in module.quantizers["scaling_fwd"]} == {mz.Float8Quantizer}
    meta["scaling_fwd"].scale.fill_(3.0)  # live
    assert module.scale_fwd.tolist() == [3.0] * 6
    module.init_fp8_meta_tensors(DelayedScaling(amax_history_len=3000))
    assert module.fp8_meta["scaling_fwd"].amax_history.shape == (3000, 6)
    assert module.fp8_meta["scaling_bwd"].amax_history.shape == (3000, 4)
    assert module.scale_fwd.tolist() == [3.0] * 6
    other = make("linear")
    other.init_fp8_metadata()
    assert other.quantizers == {}
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        other.init_fp8_metadata()
    assert {type(q) for q in other.quantizers["scaling_bwd"]} == {mz.MXFP8Quantizer}


def test_fp8_meta_tells_the_recipe_in_use() -> None:
    module = make("linear")
    step(module, sample(), RECIPES["current"])
    module.init_fp8_meta_tensors(RECIPES["mxfp8"])
    step(module, sample(), RECIPES["current"])
    assert module.fp8_meta["recipe"] == RECIPES["current"]


@over_modules
def test_state_is_taken_and_put_back(name: str) -> None:
    recipe, module = RECIPES["delayed"], make(name)
    for seed in range(3):
        step(module, sample(seed=seed), recipe)
    taken = module.get_fp8_meta_tensors()
    assert {key: len(value) for key, value in taken.items()} == {"scaling_fwd": 2, "scaling_bwd": 2}
    held = {key: getattr(module, key).clone() for key in BUFFERS}
    expected = step(copy.deepcopy(module), sample(seed=4), recipe)
    step(module, sample(seed=3) * 9, recipe)
    assert torch.equal(taken["scaling_fwd"][0], held["scale_fwd"])  # copies
    module.reset_fp8_meta_tensors(taken)
    for key in BUFFERS:
        assert torch.equal(getattr(module, key), held[key])
    assert_equal(step(module, sample(seed=4), recipe), expected)
    module.reset_fp8_meta_tensors()
    for key in BUFFERS:
        assert torch.equal(getattr(module, key), getattr(make(name), key))
    assert_equal(step(module, sample(), recipe), step(make(name), sample(), recipe))


def test_adjust_amax_history_length() -> None:
    module = make("linear")
    for seed in range(4):
        step(module, sample(seed=seed), DelayedScaling(amax_history_len=4))
    before = module.amax_history_fwd[:4].clone()
    module.adjust_amax_history_length(2, fwd=True)
    assert torch.equal(module.amax_history_fwd[:2], before[:2])
    assert not module.amax_history_fwd[2:].any()
    assert module.amax_history_bwd[2:4].any()
    module.adjust_amax_history_length(2000)
    assert module.amax_history_fwd.shape[0] == module.amax_history_bwd.shape[0] == 2000
    assert torch.equal(module.amax_history_fwd[:2], before[:2])
    assert not module.amax_history_fwd[2:].any()


def test_set_tensor_parallel_group(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("linear")
    module.set_tensor_parallel_group(None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="tp_group has 2 processes, the module was made for tp_size=1"):
        module.set_tensor_parallel_group(object())
    with pytest.raises(ValueError, match="tp_size is 4, tp_group has 2 processes: give a group of 4"):
        mz.Linear(8, 8, tp_group=object(), tp_size=4, **OPTIONS)


SPLITS: dict[str, tuple[Callable[[], Any], str]] = {
    "column": (layer(mz.Linear, 8, 9, parallel_mode="column", tp_size=2), "out_features is 9: .* the 2 processes"),
    "row": (layer(mz.LayerNormLinear, 9, 8, parallel_mode="row", tp_size=2), "in_features is 9: .* the 2 processes"),
    "parts": (
        layer(mz.Linear, 8, 8, parallel_mode="column", tp_size=2, parameters_split={"a": 3, "b": 5}),
        "the size of a is 3: .* the 2 processes",
    ),
    "mlp": (layer(mz.LayerNormMLP, 8, 9, set_parallel_mode=True, tp_size=2), "ffn_hidden_size is 9: .* 2 processes"),
    "grouped": (layer(mz.GroupedLinear, 2, 8, 9, parallel_mode="column", tp_size=2, bias=False), "out_features is 9"),
    "grouped-bias": (layer(mz.GroupedLinear, 2, 8, 8, parallel_mode="column", tp_size=2), "give bias=False"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_what_does_not_divide(case: str) -> None:
    make_module, message = SPLITS[case]
    with pytest.raises(ValueError, match=message):
        make_module()


@pytest.mark.parametrize("cls", [mz.Linear, mz.LayerNormLinear, mz.LayerNormMLP])
def test_a_size_without_a_group(cls: Any) -> None:
    """The group may come later, but not after the first forward."""
    options = {"set_parallel_mode": True} if cls is mz.LayerNormMLP else {"parallel_mode": "column"}
    module = cls(8, 8, tp_size=2, **options, **OPTIONS)
    with pytest.raises(ValueError, match="tp_size is 2 and there is no group: give tp_group, or call set_tensor_par"):
        module(torch.ones(4, 8))


def test_one_process_is_not_parallel() -> None:
    """Modes say which way a weight would be split; nothing is."""
    module = make("layernorm_linear", parallel_mode="column", sequence_parallel=True)
    assert_equal(
        step(module, sample(), recipes.MXFP8BlockScaling()),
        step(make("layernorm_linear"), sample(), recipes.MXFP8BlockScaling()),
    )
    assert (module.weight.tensor_model_parallel, module.weight.partition_dim) == (True, 0)
    assert not module.sequence_parallel
    assert mz.RMSNorm(8, sequence_parallel=True, device="cpu").weight.sequence_parallel
    assert not hasattr(mz.RMSNorm(8, device="cpu").weight, "sequence_parallel")


# A user's own quantizer and product


class Int8Storage(mz.QuantizedTensorStorage):
    """Rows, and columns transposed, each with its scale."""

    _FLATTEN_TENSOR_BUFFERS = (("data", "data"), ("scale", "scale"), ("data_t", "data_t"), ("scale_t", "scale_t"))
    _VALUES = (("_quantizer", "quantizer", None),)
    _ROWWISE = ("data", "scale")
    _COLUMNWISE = ("data_t", "scale_t")

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape) if self.data is not None else tuple(self.data_t.shape[::-1])


class Int8Quantizer(mz.Quantizer):
    custom = True

    def __init__(self, calls: list[dict[str, Any]], levels: int = 127) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.calls, self.levels = calls, levels

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Int8Storage:
        row = self.codes(tensor) if self.rowwise_usage else (None, None)
        column = self.codes(tensor.t()) if self.columnwise_usage else (None, None)
        fields = {"data": row[0], "scale": row[1], "data_t": column[0], "scale_t": column[1], "quantizer": self}
        return Int8Storage(fake_dtype=tensor.dtype, **fields)

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / self.levels
        return (x.float() / scale).round().to(torch.int8), scale

    def qgemm(
        self,
        qx: torch.Tensor,
        qw: torch.Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: torch.Tensor,
        sw: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gemm_type: Any,
        qresult_x: Any,
        qresult_w: Any,
    ) -> torch.Tensor:
        self.calls.append({k: v for k, v in locals().items() if k not in ("self", "__class__")})
        y = (qx.float() @ qw.float().t()) * sx * sw.t()
        return (y if bias is None else y + bias.float()).to(out_dtype)


def own_recipe(calls: list[dict[str, Any]]) -> CustomRecipe:
    quantizers = {kind: Int8Quantizer(calls, 127 - i) for i, kind in enumerate(("input", "weight", "grad_output"))}
    return CustomRecipe(lambda role: quantizers[role.tensor_type])


def test_own_attributes_are_kept() -> None:
    """What a user's quantizer is made of is its own affair."""
    made = Int8Quantizer([], 99).with_usage(columnwise=False)
    assert made.levels == 99
    assert made.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize(
    "make", [lambda: mz.Linear(IN, OUT, device="cpu"), lambda: mz.ops.Linear(IN, OUT, device="cpu")]
)
def test_own_objects_are_no_parameters(make: Any) -> None:
    message = (
        r"Int8Quantizer.quantize of weight gave Int8Storage, which is no tensor .* outside of quantized_model_init"
    )
    with mz.quantized_model_init(recipe=own_recipe([])), pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("bias", [True, False])
def test_own_quantizer_multiplies(bias: bool) -> None:
    """All three products go to it, with the operands of that product, and what it gives is what comes out."""
    calls: list[dict[str, Any]] = []
    module, x = make("linear", bias=bias), sample()
    got = step(module, x, own_recipe(calls))
    y = got["output"].clone().requires_grad_()
    gradient(y).backward()
    dy, weight = y.grad, module.weight.detach()
    assert dy is not None
    (x_r, x_c), (w_r, w_c), (g_r, g_c) = (
        (Int8Quantizer([], 127 - i).codes(t), Int8Quantizer([], 127 - i).codes(t.t()))
        for i, t in enumerate((x, weight, dy))
    )
    expected = [
        (GEMMType.FPROP, x_r, w_r, (40, OUT), module.bias if bias else None, False),
        (GEMMType.DGRAD, g_r, w_c, (40, IN), None, True),
        (GEMMType.WGRAD, g_c, x_c, (OUT, IN), None, True),
    ]
    assert [call["gemm_type"] for call in calls] == [GEMMType.FPROP, GEMMType.DGRAD, GEMMType.WGRAD]
    for call, (_, left, right, shape, added, split) in zip(calls, expected, strict=True):
        for key, wanted in (("qx", left[0]), ("sx", left[1]), ("qw", right[0]), ("sw", right[1])):
            assert torch.equal(call[key], wanted), key
        assert (call["qx"].shape[0], call["qw"].shape[0]) == shape
        assert call["out_dtype"] == torch.bfloat16
        assert call["m_params"] == MMParams(out_dtype=torch.bfloat16, use_split_accumulator=split)
        assert isinstance(call["qresult_x"], Int8Storage)
        assert isinstance(call["qresult_w"], Int8Storage)
        assert added is call["bias"] or torch.equal(added, call["bias"])
    for key, (left, right, extra) in {
        "output": (x_r, w_r, module.bias),
        "input": (g_r, w_c, None),
        "weight": (g_c, x_c, None),
    }.items():
        product = (left[0].float() @ right[0].float().t()) * left[1] * right[1].t()
        product = product + extra.detach().float() if bias and extra is not None else product
        assert torch.equal(got[key], product.bfloat16()), key


@pytest.mark.parametrize("name", ["layernorm_linear", "layernorm_mlp"])
def test_own_quantizer_in_other_modules(name: str) -> None:
    calls: list[dict[str, Any]] = []
    got, plain = step(make(name), sample(), own_recipe(calls)), step(make(name), sample(), None)
    kinds = [call["gemm_type"] for call in calls]
    gemms = 2 if name == "layernorm_mlp" else 1
    assert kinds == [GEMMType.FPROP] * gemms + [GEMMType.DGRAD, GEMMType.WGRAD] * gemms
    for key, value in plain.items():
        if key not in BUFFERS:
            assert (got[key].float() - value.float()).norm() <= 0.05 * value.float().norm(), key


def test_own_quantizer_in_groups() -> None:
    calls: list[dict[str, Any]] = []
    with mz.autocast(recipe=own_recipe(calls)):
        make("grouped_linear")(sample(), [10, 10, 20]).float().sum().backward()
    assert calls


def test_own_quantizer_adds_to_main_grad() -> None:
    calls: list[dict[str, Any]] = []
    plain = step(make("linear"), sample(), own_recipe([]))["weight"]
    module = with_main_grad("linear", 100.0)
    step(module, sample(), own_recipe(calls))
    assert calls[-1]["out_dtype"] == torch.float32
    torch.testing.assert_close(module.weight.main_grad - 100, plain.float(), rtol=0.02, atol=0.02)


def test_own_quantizer_keeps_weights() -> None:
    calls: list[dict[str, Any]] = []
    module, recipe = make("linear"), own_recipe(calls)
    first = step(module, sample(), recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(step(module, sample(), recipe, is_first_microbatch=False)["output"], first["output"])


def test_own_quantizer_updates_kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that lets them be updated goes to the quantizer that made them."""
    flags: list[torch.Tensor] = []

    def update(self: Any, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor) -> None:
        flags.append(noop_flag)
        dst.data, dst.scale = self.codes(src)

    monkeypatch.setattr(Int8Quantizer, "update_quantized", update)
    flag = torch.zeros(1)
    monkeypatch.setattr(current_state(), "skip_weight_update", flag)
    module, recipe = make("linear"), own_recipe([])
    step(module, sample(), recipe, is_first_microbatch=False)
    with torch.no_grad():
        module.weight.mul_(2)
    got = step(module, sample(), recipe, is_first_microbatch=False)["output"]
    assert torch.equal(got, step(copy.deepcopy(module), sample(), recipe)["output"])
    assert len(flags) == 1
    assert flags[0] is flag


def test_one_own_operand_is_not_enough() -> None:
    """There is no product of it with another format."""

    def factory(role: QuantizerRole) -> Any:
        return Int8Quantizer([]) if role.tensor_type == "input" else mz.MXFP8Quantizer()

    with pytest.raises(NotImplementedError, match="Int8Storage is no operand of a GEMM"):
        step(make("linear"), sample(), CustomRecipe(factory))
    assert current_state().depth == 0


NORMS: dict[str, Callable[..., Any]] = {
    "layernorm": partial(mz.LayerNorm, 32),
    "rmsnorm": partial(mz.RMSNorm, 32),
    "layernorm_linear": partial(mz.LayerNormLinear, 32, 32),
    "layernorm_mlp": partial(mz.LayerNormMLP, 32, 64),
    "ops_layernorm": partial(mz.ops.LayerNorm, 32),
    "ops_rmsnorm": partial(mz.ops.RMSNorm, 32),
    "ops_l2": mz.ops.L2Normalization,
}


@pytest.mark.parametrize("eps", ["x", float("nan"), -1.0, True, None], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_an_epsilon_that_is_no_number(name: str, eps: Any) -> None:
    with pytest.raises(ValueError, match=r"eps is .*: give 0 or a positive number"):
        NORMS[name](eps=eps)
