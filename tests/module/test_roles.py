"""Roles, quantizers and scaling state of a module, as tools read them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe as recipes
from mezzotint.recipe import CustomRecipe, DelayedScaling, QuantizerRole
from tests.module.cases import layer
from tests.recipes import MODULES, OPTIONS, RECIPES, assert_equal, gradient, make, run, sample, step
from tests.recipes import STATE as BUFFERS

over_modules = pytest.mark.parametrize("name", MODULES)
QUANTIZED = [name for name in RECIPES if name != "none"]


def roles(module: Any, fwd: bool, **kwargs: Any) -> list[tuple[str, str, str]]:
    return [(r.module_type, r.tensor_type, r.name) for r in module.get_quantizer_roles(fwd=fwd, **kwargs)]


@over_modules
def test_roles(name: str) -> None:
    module = MODULES[name](name="me")
    own = {"layernorm_mlp": ["me.fc1", "me.fc2"], "grouped_linear": ["me.0", "me.1", "me.2"]}.get(name, ["me"])
    kind = "grouped_linear" if name == "grouped_linear" else "linear"
    forward = [(kind, tensor, gemm) for gemm in own for tensor in ("input", "weight", "output")]
    backward = [(kind, tensor, gemm) for gemm in own for tensor in ("grad_output", "grad_input")]
    if name == "layernorm_mlp":  # what goes from one to the other, as its reader calls it
        forward[2], backward[3] = (kind, "input", "me.fc2"), (kind, "grad_output", "me.fc1")
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
    assert meta["recipe"] == recipe
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
    with pytest.raises(ValueError, match="the size of tp_group is 2, the module was made for tp_size=1"):
        module.set_tensor_parallel_group(object())
    with pytest.raises(ValueError, match="tp_size is 4, the size of tp_group is 2: give a group of 4"):
        mz.Linear(8, 8, tp_group=object(), tp_size=4, **OPTIONS)


SPLITS: dict[str, tuple[Callable[[], Any], str]] = {
    "column": (layer(mz.Linear, 8, 9, parallel_mode="column", tp_size=2), "out_features is 9: .* the 2 ranks"),
    "row": (layer(mz.LayerNormLinear, 9, 8, parallel_mode="row", tp_size=2), "in_features is 9: .* the 2 ranks"),
    "parts": (
        layer(mz.Linear, 8, 8, parallel_mode="column", tp_size=2, parameters_split={"a": 3, "b": 5}),
        "the size of a is 3: .* the 2 ranks",
    ),
    "mlp": (layer(mz.LayerNormMLP, 8, 9, set_parallel_mode=True, tp_size=2), "ffn_hidden_size is 9: .* 2 ranks"),
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
