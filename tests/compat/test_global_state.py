"""Upstream's names for the state: the manager and the recipe state."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import FP8GlobalStateManager, RecipeState, recipe
from mezzotint.region import NO_OPTIONS, current_state
from tests.recipes import RECIPES, assert_equal, gradient, make, sample, step


def test_the_manager_tells_what_is_in_force() -> None:
    before = FP8GlobalStateManager.get_autocast_state()
    chosen = recipe.MXFP8BlockScaling()
    with mz.autocast(recipe=chosen):
        assert FP8GlobalStateManager.is_fp8_enabled()
        assert FP8GlobalStateManager.get_fp8_recipe() == chosen
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
    assert current_state().entered == ()
    with pytest.raises(RuntimeError, match="autocast_enter first"):
        FP8GlobalStateManager.autocast_exit(True)


def test_an_update_by_hand() -> None:
    """It is the one at the end of the region: that has nothing left to do."""
    module, twin = make("linear"), make("linear")
    with mz.autocast(recipe=RECIPES["delayed"]):
        twin(sample())
    with mz.autocast(recipe=RECIPES["delayed"]):
        module(sample())
        assert not module.amax_history_fwd[1:].any()
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)  # nothing waits
    assert torch.equal(module.amax_history_fwd, twin.amax_history_fwd)
    assert torch.equal(module.scale_fwd, twin.scale_fwd)


def test_reset() -> None:
    FP8GlobalStateManager.autocast_enter(True, fp8_recipe=RECIPES["mxfp8"])
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor().item() == 1
    FP8GlobalStateManager.reset()
    assert FP8GlobalStateManager.get_autocast_state() == (False, False, None, None, NO_OPTIONS)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None


@pytest.fixture
def skip_flag() -> Iterator[Callable[[bool], None]]:
    """Sets the flag; afterwards there is none."""
    yield FP8GlobalStateManager.set_skip_fp8_weight_update_tensor
    FP8GlobalStateManager.reset()


def kept_weights(module: Any) -> list[torch.Tensor]:
    return [workspace.dequantize().clone() for workspace in module._workspaces]


KEPT = [n for n in RECIPES if n != "none"]
over_kept = pytest.mark.parametrize("name", KEPT)
MODULE_NAMES = ("linear", "layernorm_mlp", "grouped_linear")
# A module with each recipe in a graph, in turn; eager code has all.
IN_A_GRAPH = [(name, MODULE_NAMES[index % 3], "compiled") for index, name in enumerate(KEPT)]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "module_name", "how"),
    [
        *[(name, module_name, "eager") for name in KEPT for module_name in MODULE_NAMES],
        *IN_A_GRAPH[:2],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in IN_A_GRAPH[2:]],
    ],
)
def test_kept_weights_are_updated_unless_told_not_to(name: str, module_name: str, how: str, skip_flag: Any) -> None:
    """What a graph does that serves every micro-batch: `is_first_microbatch` is the same, the flag tells."""
    chosen = RECIPES[name]
    module, twin = make(module_name), make(module_name)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter) if how == "compiled" else module
    for seed, skips in enumerate((False, True, True, False, True, False)):
        if not skips:
            with torch.no_grad():
                for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                    ours.mul_(1.25)
                    theirs.mul_(1.25)
        skip_flag(skips)
        before = None if module._workspaces is None else kept_weights(module)
        got = step(module, sample(seed=seed), chosen, call, is_first_microbatch=False)
        assert before is None or skips == all(map(torch.equal, before, kept_weights(module)))
        skip = current_state().skip_weight_update
        current_state().skip_weight_update = None
        expected = step(twin, sample(seed=seed), chosen, is_first_microbatch=not skips)
        current_state().skip_weight_update = skip
        assert_equal(got, expected)
    assert counter.frame_count == (2 if how == "compiled" else 0)  # the first call makes the workspaces


@pytest.mark.parametrize("first", [True, False])
def test_a_kept_weight_is_written_in_place(first: bool, skip_flag: Any) -> None:
    """Buffers stay where they are, as a captured graph needs it."""
    module = make("linear")
    skip_flag(False)
    step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=first)
    buffers = module._workspaces[0]._rowwise_data
    with torch.no_grad():
        module.weight.mul_(3)
    got = step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=first)
    assert module._workspaces[0]._rowwise_data is buffers
    twin = make("linear")
    twin.load_state_dict(module.state_dict())
    assert_equal(got, step(twin, sample(), RECIPES["mxfp8"]))


def test_the_flag_is_for_kept_weights(skip_flag: Any) -> None:
    module, twin = make("linear"), make("linear")
    expected = step(twin, sample(), RECIPES["mxfp8"])
    skip_flag(True)
    assert_equal(step(module, sample(), RECIPES["mxfp8"]), expected)
    assert module._workspaces is None
    assert_equal(step(module, sample(), RECIPES["mxfp8"], is_first_microbatch=True), expected)  # a miss is made


@over_kept
def test_backward_after_the_forward_of_the_next(name: str, skip_flag: Any) -> None:
    """As a pipeline runs them: what the first forward saved is still what it was."""
    chosen, module, twin = RECIPES[name], make("linear"), make("linear")
    results = []
    for target, flags in ((module, (False, True)), (twin, (None, None))):
        leaves, outputs = [], []
        torch.manual_seed(0)
        with mz.autocast(recipe=chosen):
            for seed, flag in enumerate(flags):
                if flag is None:
                    current_state().skip_weight_update = None
                else:
                    skip_flag(flag)
                leaves.append(sample(seed=seed).requires_grad_())
                outputs.append(target(leaves[-1], is_first_microbatch=seed == 0))
        for y in outputs:
            gradient(y).backward()
        results.append({f"input {i}": leaf.grad for i, leaf in enumerate(leaves)} | {"weight": target.weight.grad})
    assert_equal(*results)


@pytest.mark.parametrize("skips", [True, False])
def test_a_recomputation_has_the_scales_of_the_kept_weights(skips: bool, skip_flag: Any) -> None:
    def last_step(module: Any, call: Any) -> dict[str, Any]:
        skip_flag(False)
        for _ in range(3):
            step(module, sample(), RECIPES["delayed"], is_first_microbatch=False)
        skip_flag(skips)
        return step(module, sample(seed=1) * 7, RECIPES["delayed"], call, is_first_microbatch=False)

    module, twin = make("linear"), make("linear")
    assert_equal(last_step(module, partial(mz.checkpoint, module, use_reentrant=False)), last_step(twin, twin))


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
