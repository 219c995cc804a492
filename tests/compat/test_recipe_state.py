"""RecipeState: the class of each recipe, its quantizers and its state."""

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.compat import recipe_state
from mezzotint.compat.recipe_state import RecipeState


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (recipe.DelayedScaling(), recipe_state.DelayedScalingRecipeState),
        (recipe.Float8CurrentScaling(), recipe_state.Float8CurrentScalingRecipeState),
        (recipe.MXFP8BlockScaling(), recipe_state.MXFP8BlockScalingRecipeState),
        (recipe.Float8BlockScaling(), recipe_state.Float8BlockScalingRecipeState),
        (recipe.NVFP4BlockScaling(), recipe_state.NVFP4BlockScalingRecipeState),
        (recipe.CustomRecipe(mz.custom_recipes.mxfp8_factory), recipe_state.CustomRecipeState),
        (recipe.MXFP6BlockScaling(), RecipeState),
    ],
)
def test_classes(of: recipe.Recipe, kind: type[RecipeState]) -> None:
    made = RecipeState.create(of, mode="forward", num_quantizers=3)
    assert type(made) is kind
    assert len(made.make_quantizers()) == 3
    assert (made.scale is not None) == isinstance(of, recipe.DelayedScaling)


def test_element_types() -> None:
    for mode, dtype in (("forward", mz.DType.kFloat8E4M3), ("backward", mz.DType.kFloat8E5M2)):
        state = recipe_state.DelayedScalingRecipeState(recipe.DelayedScaling(), mode=mode, num_quantizers=2)
        assert state.dtype == dtype
        assert state.amax_history is not None
        assert state.amax_history.shape == (1024, 2)
    blocks = recipe_state.Float8BlockScalingRecipeState(recipe.Float8BlockScaling(), mode="forward")
    assert blocks.qx_dtype == blocks.qw_dtype == blocks.qgrad_dtype == mz.DType.kFloat8E4M3
    fp4 = recipe_state.NVFP4BlockScalingRecipeState(recipe.NVFP4BlockScaling(), mode="forward")
    assert fp4.dtype == mz.DType.kFloat4E2M1 == recipe_state.get_fp4_te_dtype(recipe.NVFP4BlockScaling())
    with pytest.raises(ValueError, match="fp4_recipe is DelayedScaling"):
        recipe_state.get_fp4_te_dtype(recipe.DelayedScaling())


def test_helpers() -> None:
    recipe_state.check_recipe_support(recipe.NVFP4BlockScaling())
    made = [torch.zeros(2), torch.zeros(3)]
    recipe_state.split_and_copy(torch.arange(5.0), made, [2, 3])
    assert [each.tolist() for each in made] == [[0, 1], [2, 3, 4]]
