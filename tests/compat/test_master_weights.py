"""Quantized weights from master weights in parts: the bits of weights that are quantized whole, on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mezzotint as mz
from mezzotint import recipe
from mezzotint.compat.master_weights import (
    cast_master_weights_to_fp8,
    clear_columnwise_cache,
    post_all_gather_processing,
    quantize_master_weights,
)
from tests.worlds import World, results, shared_world

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "block_1d": recipe.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8_2d": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4_1d": recipe.NVFP4BlockScaling(disable_2d_quantization=True),
}
SHAPE = (144, 160)  # no multiple of a block of 128, and the ranges of two ranks meet inside of blocks
CUT = 9998  # where the second rank's range begins


def make_weight(of: recipe.Recipe) -> Any:
    """A quantized parameter of anything."""
    torch.manual_seed(0)
    with mz.quantized_model_init(recipe=of):
        return mz.Linear(SHAPE[1], SHAPE[0], bias=False, params_dtype=torch.bfloat16).weight


def make_values(seed: int = 1) -> torch.Tensor:
    """Master weights, with an outlier, zeros of both signs, a block of zeros and values of very different size."""
    torch.manual_seed(seed)
    values = torch.randn(SHAPE) * torch.logspace(-3, 1, SHAPE[1])
    values[3, 5], values[0, 0], values[0, 1] = 300.0, -0.0, 0.0
    values[32:64, 32:64] = 0
    return values.reshape(-1)


def buffers(weight: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in weight._buffers()}


def expected(of: recipe.Recipe, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What quantizing the whole gives."""
    weight = make_weight(of)
    weight.quantize_(values.view(SHAPE).bfloat16())
    return buffers(weight)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, buffer in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), buffer.view(torch.uint8)), name


@pytest.mark.parametrize("name", RECIPES)
def test_one_process_that_has_it_all(name: str) -> None:
    weight, values = make_weight(RECIPES[name]), make_values()
    quantize_master_weights([weight], [values], [0], None, manual_post_all_gather_processing=True)
    post_all_gather_processing([weight])
    assert_equal(buffers(weight), expected(RECIPES[name], values))


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_read_next_is_there_without_asking(name: str) -> None:
    """Without `manual_post_all_gather_processing`, forward and backward find the column-wise copy or make it."""
    of, values = RECIPES[name], make_values()
    gradients = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        with mz.quantized_model_init(recipe=of):
            layer = mz.Linear(SHAPE[1], SHAPE[0], params_dtype=torch.bfloat16)
        if is_whole:
            layer.weight.quantize_(values.view(SHAPE).bfloat16())
        else:
            cast_master_weights_to_fp8([layer.weight], [values], [0], None)
        torch.manual_seed(2)
        x = torch.randn(32, SHAPE[1], dtype=torch.bfloat16, requires_grad=True)
        with mz.autocast(recipe=of):
            layer(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def split(rank: int, name: str) -> dict[str, Any]:
    """Two weights: each rank has a range of the first; the second one is rank 1's, from a place of its own on."""
    of, values, others = RECIPES[name], make_values(), make_values(3)
    first, second = make_weight(of), make_weight(of)
    second.quantize_(torch.ones(SHAPE, dtype=torch.bfloat16))
    ranges = (values[:CUT], values[CUT:])
    masters = [ranges[rank], others if rank else None]
    quantize_master_weights([first, second], masters, [(0, CUT)[rank], 0], None, None, True)
    for weight, cut in ((first, CUT), (second, 0)):  # what a client does: the codes of all ranges
        for direction in ("_ROWWISE", "_COLUMNWISE") if "mxfp8" in name else ("_ROWWISE",):
            codes = getattr(weight, getattr(weight, direction)[0]).view(-1)
            at = cut * codes.numel() // weight.numel()
            for part, owner in ((codes[:at], 0), (codes[at:], 1)):
                if part.numel():
                    dist.broadcast(part, owner)
    post_all_gather_processing([first, second])
    return {"first": buffers(first), "second": buffers(second)}


def check_splits(rank: int) -> dict[str, Any]:
    return {name: split(rank, name) for name in RECIPES}


def check_shards(rank: int) -> dict[str, Any]:
    """Codes go into a buffer of the caller's."""
    weight, values = make_weight(RECIPES["current"]), make_values()
    before = weight._data.clone()
    start, stop = ((0, CUT), (CUT, values.numel()))[rank]
    shard = torch.empty(stop - start, dtype=torch.uint8)
    quantize_master_weights([weight], [values[start:stop]], [start], None, [shard])
    return {"shard": shard, "is_left": torch.equal(weight._data, before), "scale": weight._scale_inv.clone()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, (check_splits, check_shards), size=2)


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks(world: World, name: str) -> None:
    for found in results(world, "check_splits"):
        assert_equal(found[name]["first"], expected(RECIPES[name], make_values()))
        assert_equal(found[name]["second"], expected(RECIPES[name], make_values(3)))


def test_shards_of_fsdp(world: World) -> None:
    whole = expected(RECIPES["current"], make_values())
    found = results(world, "check_shards")
    assert torch.equal(torch.cat([each["shard"] for each in found]), whole["_data"].view(-1))
    assert all(each["is_left"] and torch.equal(each["scale"], whole["_scale_inv"]) for each in found)


def test_the_amax_of_delayed_scaling_is_kept() -> None:
    weight = make_weight(RECIPES["delayed"])
    quantize_master_weights([weight], [make_values()], [0], None)
    assert weight._quantizer.amax.item() == 300.0


def test_initial_values_are_let_go() -> None:
    with mz.quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=True):
        weight = mz.Linear(32, 32, bias=False).weight
    assert weight.get_high_precision_init_val() is not None
    quantize_master_weights([weight], [torch.randn(1024)], [0], None)
    assert weight.get_high_precision_init_val() is None


def test_clear_columnwise_cache() -> None:
    weight = make_weight(RECIPES["current"])
    clear_columnwise_cache(weight)
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}


def test_what_is_refused() -> None:
    weight, values = make_weight(RECIPES["nvfp4"]), make_values()
    with pytest.raises(TypeError, match=r"model_weights\[0\] is a Tensor"):
        quantize_master_weights([torch.ones(2)], [torch.ones(2)], [0], None)
    with pytest.raises(ValueError, match=r"start_offsets\[0\] is 1 with 23040"):
        quantize_master_weights([weight], [values], [1], None)
    with pytest.raises(ValueError, match="master_weights 0"):
        quantize_master_weights([weight], [], [0], None)
    with pytest.raises(ValueError, match="begins or ends at element 3"):
        quantize_master_weights([weight], [values[:3]], [0], None, None, True)
    with pytest.raises(NotImplementedError, match="fsdp_shard_model_weights"):
        quantize_master_weights([weight], [values], [0], None, [torch.empty(1)])
