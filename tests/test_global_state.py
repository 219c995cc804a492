"""Upstream's names for the state: the manager and the recipe state."""

import pytest
import torch

import mezzotint as mz
from mezzotint import FP8GlobalStateManager, RecipeState, recipe
from tests.recipes import RECIPES, make, sample


def test_the_manager_tells_what_is_in_force() -> None:
    before = FP8GlobalStateManager.get_autocast_state()
    chosen = recipe.MXFP8BlockScaling()
    with mz.autocast(recipe=chosen):
        assert FP8GlobalStateManager.is_fp8_enabled()
        assert FP8GlobalStateManager.get_fp8_recipe() is chosen
        with mz.autocast(enabled=False, calibrating=True):
            assert not FP8GlobalStateManager.is_fp8_enabled()
            assert FP8GlobalStateManager.is_fp8_calibration()
    assert FP8GlobalStateManager.get_autocast_state() == before
    with mz.quantized_model_init(recipe=chosen, preserve_high_precision_init_val=True):
        assert FP8GlobalStateManager.with_fp8_parameters()
        assert FP8GlobalStateManager.with_high_precision_init_val()
    assert not FP8GlobalStateManager.with_fp8_parameters()


def test_regions_by_hand_update_as_autocast_does() -> None:
    module, twin = make("linear"), make("linear")
    with mz.autocast(recipe=RECIPES["delayed"]):
        expected = twin(sample())
    FP8GlobalStateManager.autocast_enter(True, fp8_recipe=RECIPES["delayed"])
    got = module(sample())
    assert not module.amax_history_fwd[1:].any()
    FP8GlobalStateManager.autocast_exit(True)
    assert torch.equal(got, expected)
    assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)
    key = FP8GlobalStateManager.get_meta_tensor_key(forward=True)
    assert torch.equal(module.fp8_meta[key].scale, twin.scale_fwd)
    with pytest.raises(RuntimeError, match="autocast_enter first"):
        FP8GlobalStateManager.autocast_exit(True)


def test_reset() -> None:
    FP8GlobalStateManager.autocast_enter(True, fp8_recipe=RECIPES["mxfp8"])
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor().item() == 1
    FP8GlobalStateManager.reset()
    assert FP8GlobalStateManager.get_autocast_state() == (False, False, None, None)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None


@pytest.mark.parametrize("name", [n for n, chosen in RECIPES.items() if chosen is not None])
def test_recipe_state(name: str) -> None:
    chosen = RECIPES[name]
    assert chosen is not None
    for mode, count in (("forward", 3), ("backward", 2)):
        state = RecipeState.create(chosen, mode=mode, num_quantizers=count, device="cpu")
        quantizers = state.make_quantizers()
        assert len(quantizers) == count
        quantizers[0].quantize(sample())
        if name == "delayed":
            assert state.amax_history is not None
            assert state.amax_history.shape == (4, count)
            assert state.amax_history[0, 0] == sample().abs().max()
            longer = RecipeState.create(recipe.DelayedScaling(amax_history_len=6), mode=mode, num_quantizers=count)
            longer.inherit_state_from(state)
            assert longer.amax_history is not None
            assert torch.equal(longer.amax_history[:4].cpu(), state.amax_history)
            assert not longer.amax_history[4:].any()
        else:
            assert state.scale is None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="mode is 'sideways'"):
        RecipeState.create(recipe.MXFP8BlockScaling(), mode="sideways")
    with pytest.raises(ValueError, match="roles has 1 entries for 2"):
        RecipeState.create(recipe.MXFP8BlockScaling(), mode="forward", num_quantizers=2, roles=[mz.QuantizerRole()])
    with pytest.raises(TypeError, match="recipe is str"):
        RecipeState.create("mxfp8", mode="forward")
