"""Regions, quantized weights, what is available."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import DType, hw, quantization
from mezzotint.functional.delayed import SCALE_UPDATES
from mezzotint.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
)
from mezzotint.region import State, current_state
from tests.delayed import CURRENT, DELAYED, MX, NV, in_force, only
from tests.recipes import MODULES, make, run, sample


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever a test does, the state after it is that of the start."""
    yield
    assert State() == current_state()
    assert not SCALE_UPDATES.waiting


# Signatures, as upstream has them


EMPTY = inspect.Parameter.empty
SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "autocast": [
        ("enabled", True),
        ("calibrating", False),
        ("recipe", None),
        ("amax_reduction_group", None),
        ("_graph", False),
        ("memory", None),
        ("check_finite", None),
    ],
    "fp8_autocast": [
        ("enabled", True),
        ("calibrating", False),
        ("fp8_recipe", None),
        ("fp8_group", None),
        ("_graph", False),
    ],
    "quantized_model_init": [("enabled", True), ("recipe", None), ("preserve_high_precision_init_val", False)],
    "fp8_model_init": [("enabled", True), ("recipe", None), ("preserve_high_precision_init_val", False)],
    "is_fp8_available": [("return_reason", False), ("native", False)],
    "is_mxfp8_available": [("return_reason", False), ("native", False)],
    "is_fp8_block_scaling_available": [("return_reason", False), ("native", False)],
    "is_nvfp4_available": [("return_reason", False), ("native", False)],
    "is_bf16_available": [("return_reason", False)],
    "get_align_size_for_quantization": [("recipe", EMPTY)],
    "get_fp8_torch_dtype": [("fp8_recipe", EMPTY), ("fprop_tensor", True)],
    "get_fp8_te_dtype": [("fp8_recipe", EMPTY), ("fprop_tensor", True)],
    "_amax_and_scale_update": [("amax_history", EMPTY), ("scale", EMPTY), ("fp8_max", EMPTY), ("recipe", EMPTY)],
    "_default_sf_compute": [
        ("amax", EMPTY),
        ("scale", EMPTY),
        ("fp8_max", EMPTY),
        ("margin", EMPTY),
        ("_fp32_max", torch.finfo(torch.float32).max),
    ],
    "check_fp8_support": [],
    "check_mxfp8_support": [],
    "check_fp8_block_scaling_support": [],
    "check_nvfp4_support": [],
    "get_default_recipe": [],
    "get_device_compute_capability": [],
    "is_non_tn_fp8_gemm_supported": [],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(quantization, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


# Regions


OUTSIDE = (False, False, None, None, 0)


def test_regions_nest() -> None:
    group = object()
    assert in_force() == OUTSIDE
    with mz.autocast(recipe=CURRENT, amax_reduction_group=group) as region:
        assert isinstance(region, mz.autocast)
        assert in_force() == (True, False, CURRENT, group, 1)
        with mz.autocast(recipe=MX):
            assert in_force() == (True, False, MX, None, 2)
            with mz.autocast(enabled=False):
                assert in_force() == (False, False, None, None, 3)
                with mz.autocast(enabled=False, calibrating=True, recipe=NV):
                    assert in_force() == (False, True, NV, None, 4)
                assert in_force() == (False, False, None, None, 3)
            assert in_force() == (True, False, MX, None, 2)
        assert in_force() == (True, False, CURRENT, group, 1)
    assert in_force() == OUTSIDE


def test_regions_decide_what_modules_do() -> None:
    """The innermost one, and none where it is disabled."""
    module, x = make("linear"), sample()
    plain, current, mxfp8 = (run(make("linear"), x, recipe)[0] for recipe in (None, CURRENT, MX))
    assert not torch.equal(plain, current)
    assert not torch.equal(current, mxfp8)
    with mz.autocast(recipe=CURRENT):
        assert torch.equal(module(x), current)
        with mz.autocast(recipe=MX):
            assert torch.equal(module(x), mxfp8)
            with mz.autocast(enabled=False):
                assert torch.equal(module(x), plain)
            with mz.autocast(enabled=False, recipe=CURRENT):
                assert torch.equal(module(x), plain)
            assert torch.equal(module(x), mxfp8)
        assert torch.equal(module(x), current)
    assert torch.equal(module(x), plain)


def test_an_exception_leaves_every_region() -> None:
    region = mz.autocast(recipe=MX)

    def fail() -> None:
        with mz.autocast(recipe=CURRENT), region, mz.autocast(enabled=False):
            raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            fail()
        assert in_force() == OUTSIDE
    with mz.autocast(recipe=CURRENT):
        with pytest.raises(KeyError):
            fail()
        assert in_force() == (True, False, CURRENT, None, 1)


def test_a_region_is_entered_inside_itself() -> None:
    region = mz.autocast(recipe=MX)
    with region:
        with region:
            assert in_force() == (True, False, MX, None, 2)
        assert in_force() == (True, False, MX, None, 1)
    assert in_force() == OUTSIDE


def test_a_region_is_entered_again_later() -> None:
    region = mz.autocast(recipe=MX)
    for outer in (None, CURRENT, None):
        with mz.autocast(enabled=outer is not None, recipe=outer):
            with region:
                assert in_force() == (True, False, MX, None, 2)
            assert in_force() == (outer is not None, False, outer, None, 1)


DEFAULTS = {
    None: DelayedScaling(),
    (8, 9): DelayedScaling(),
    (9, 0): DelayedScaling(),
    (10, 0): MXFP8BlockScaling(),
    (10, 3): MXFP8BlockScaling(),
    (12, 0): Float8CurrentScaling(),
}


@pytest.mark.parametrize("cc", DEFAULTS, ids=str)
def test_default_recipe(cc: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: cc)
    assert mz.get_default_recipe() == DEFAULTS[cc]
    with mz.autocast():
        assert current_state().recipe == DEFAULTS[cc]
    with mz.autocast(enabled=False, calibrating=True):
        assert current_state().recipe == DEFAULTS[cc]
    with mz.autocast(enabled=False):
        assert current_state().recipe is None
    with mz.quantized_model_init():
        assert current_state().init_recipe == DEFAULTS[cc]
    assert mz.get_device_compute_capability() == (cc or (0, 0))
    assert quantization.is_non_tn_fp8_gemm_supported() == (cc in ((10, 0), (10, 3)))


@pytest.mark.parametrize("wrong", [MXFP8BlockScaling, 3])
@pytest.mark.parametrize("context", [mz.autocast, mz.fp8_autocast, mz.quantized_model_init])
def test_wrong_recipe(context: Any, wrong: Any) -> None:
    name = "fp8_recipe" if context is mz.fp8_autocast else "recipe"
    kind = "type" if isinstance(wrong, type) else type(wrong).__name__
    with pytest.raises(TypeError, match=rf"recipe is {kind}: give one of mezzotint.recipe"):
        context(**{name: wrong})
    assert in_force() == OUTSIDE


def test_former_names() -> None:
    group = object()
    with mz.fp8_autocast(True, False, MX, group) as region:
        assert isinstance(region, mz.autocast)
        assert in_force() == (True, False, MX, group, 1)
    with mz.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=CURRENT, fp8_group=None):
        assert in_force() == (False, True, CURRENT, None, 1)
    with mz.fp8_model_init(recipe=MX):
        assert isinstance(MODULES["linear"]().weight, mz.MXFP8Tensor)


# Weights that are kept quantized


def test_quantized_model_init_nests() -> None:
    kinds = {
        CURRENT: mz.Float8Tensor,
        DELAYED["max-3"]: mz.Float8Tensor,
        Float8RowwiseScaling(): mz.Float8RowwiseTensor,
        Float8BlockScaling(): mz.Float8BlockwiseQTensor,
        MX: mz.MXFP8Tensor,
        NV: mz.NVFP4Tensor,
    }
    region = mz.quantized_model_init(recipe=MX)
    with mz.quantized_model_init(recipe=CURRENT):
        for recipe, kind in kinds.items():
            with mz.quantized_model_init(recipe=recipe):
                module = MODULES["layernorm_mlp"]()
                assert type(module.fc1_weight.data) is kind
                assert type(module.fc2_weight.data) is kind
                assert not isinstance(module.layer_norm_weight, mz.QuantizedTensor)
                assert not isinstance(module.fc1_bias, mz.QuantizedTensor)
        with mz.quantized_model_init(enabled=False):
            assert type(make("linear").weight) is nn.Parameter
            with region, region:  # the same one twice
                assert isinstance(MODULES["linear"]().weight, mz.MXFP8Tensor)
            assert type(make("linear").weight) is nn.Parameter
        assert isinstance(MODULES["linear"]().weight, mz.Float8Tensor)
    assert type(make("linear").weight) is nn.Parameter

    def fail() -> None:
        with mz.quantized_model_init(recipe=MX):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(make("linear").weight) is nn.Parameter


def test_quantized_model_init_is_no_autocast() -> None:
    with mz.quantized_model_init(recipe=MX):
        module = MODULES["linear"]()
        assert not current_state().enabled
    with mz.autocast(recipe=MX):
        assert not isinstance(MODULES["linear"]().weight, mz.QuantizedTensor)
    x = sample()
    expected = nn.functional.linear(x, module.weight.dequantize(), module.bias)
    torch.testing.assert_close(module(x), expected, rtol=0.02, atol=0.02)


def test_initial_values_in_high_precision() -> None:
    torch.manual_seed(0)
    plain = MODULES["linear"]()
    torch.manual_seed(0)
    with mz.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        module = MODULES["linear"]()
    kept = module.weight.get_high_precision_init_val()
    assert torch.equal(kept, plain.weight)
    assert kept.device.type == "cpu"
    other = copy.deepcopy(module)
    other.weight.clear_high_precision_init_val()
    assert other.weight.get_high_precision_init_val() is None
    assert torch.equal(module.weight.get_high_precision_init_val(), plain.weight)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    with mz.quantized_model_init(recipe=MX):
        assert not hasattr(MODULES["linear"]().weight, "get_high_precision_init_val")


def test_resetting_a_quantized_weight_keeps_what_it_had() -> None:
    with mz.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        module = MODULES["linear"]()
    old = module.weight.get_high_precision_init_val()
    module.weight.requires_grad_(False)
    module.weight.tensor_model_parallel = True
    module.reset_parameters()
    assert isinstance(module.weight, mz.MXFP8Tensor)
    assert not module.weight.requires_grad
    assert module.weight.tensor_model_parallel
    assert not torch.equal(module.weight.get_high_precision_init_val(), old)


# What is available


GATES = {
    "is_fp8_available": "float8",
    "is_mxfp8_available": "mxfp8",
    "is_fp8_block_scaling_available": "float8_block",
    "is_fp8_rowwise_available": "float8_rowwise",
    "is_nvfp4_available": "nvfp4",
}
HOW = {
    None: dict.fromkeys(GATES, "reference on cpu: plain torch"),
    (8, 0): dict.fromkeys(GATES, "emulated on sm_80: exact values in BF16"),
    (9, 0): {
        "is_fp8_available": "native on sm_90: torch._scaled_mm",
        "is_mxfp8_available": "emulated on sm_90: exact values in BF16",
        "is_fp8_block_scaling_available": "native on sm_90: cuBLAS 1x128",
        "is_fp8_rowwise_available": "native on sm_90: torch._scaled_mm",
        "is_nvfp4_available": "emulated on sm_90: exact values in BF16",
    },
    (10, 0): {
        "is_fp8_available": "native on sm_100",
        "is_mxfp8_available": "native on sm_100: cuBLAS 1x32",
        "is_fp8_block_scaling_available": "emulated on sm_100",
        "is_fp8_rowwise_available": "native on sm_100",
        "is_nvfp4_available": "native on sm_100: cuBLAS 1x16",
    },
}


@pytest.mark.parametrize("cc", HOW, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, cc: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: cc)
    monkeypatch.setattr(hw, "cuda_version", lambda: (13, 0))
    hw.gemm_backend.cache_clear()
    available = getattr(mz, gate)
    found = available(), available(return_reason=True)
    hw.gemm_backend.cache_clear()
    assert found[0] is True
    runs, reason = found[1]
    assert runs is True
    assert reason.startswith(HOW[cc][gate])
    assert available.__doc__.startswith(f"Return whether {GATES[gate]} runs here")


def test_support_is_availability_with_its_reason() -> None:
    for gate in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        support = getattr(quantization, f"check_{gate}_support")
        assert support() == getattr(quantization, f"is_{gate}_available")(return_reason=True)


def test_bf16_is_available() -> None:
    assert mz.is_bf16_available() is True
    assert mz.is_bf16_available(return_reason=True)[0] is True


def test_alignment() -> None:
    sizes = {
        DelayedScaling(): 16,
        CURRENT: 16,
        Float8RowwiseScaling(): 16,
        Float8BlockScaling(): 16,
        MX: 32,
        NV: 128,
        CustomRecipe(only()): 128,
        CustomRecipe(only(), quantization_alignment=48): 48,
    }
    for recipe, size in sizes.items():
        assert mz.get_align_size_for_quantization(recipe) == size


@pytest.mark.parametrize(
    ("fp8_format", "fprop", "is_e5m2"),
    [
        (Format.E4M3, True, False),
        (Format.E4M3, False, False),
        (Format.HYBRID, True, False),
        (Format.HYBRID, False, True),
    ],
)
def test_element_types(fp8_format: Format, fprop: bool, is_e5m2: bool) -> None:
    for cls in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        recipe = cls(fp8_format=fp8_format)
        dtype = DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3
        assert quantization.get_fp8_te_dtype(recipe, fprop) == quantization.get_fp8_te_dtype(recipe, fprop_tensor=fprop)
        assert quantization.get_fp8_te_dtype(recipe, fprop) is dtype
        torch_dtype = quantization.get_fp8_torch_dtype(recipe, fprop)
        assert torch_dtype is (torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)
        assert quantization.get_fp8_max(recipe, fprop) == torch.finfo(torch_dtype).max
    assert quantization.get_fp8_te_dtype(DelayedScaling()) is DType.kFloat8E4M3
