"""Collectives as operations: by formula in a world of two processes, around a linear, compiled; in a world of one."""

from pathlib import Path

import pytest
import torch

from mezzotint import ops
from tests.ops.world import (
    CHECKS,
    ROWS,
    SIZE,
    forward_backward,
    gradient_of,
    input_of,
    linear_of,
)
from tests.recipes import RECIPES, assert_equal
from tests.worlds import World, results, shared_world

RANKS = range(SIZE)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """For each rank what every check gave."""
    return shared_world(tmp_path_factory, CHECKS, SIZE)


def part(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(SIZE)[rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gather", "reduce", "reduce forward", "scatter"])
def test_formula(world: World, name: str, dtype: torch.dtype) -> None:
    made = results(world, "collectives")
    inputs = [input_of(rank).to(dtype) for rank in RANKS]
    shape = {"gather": (ROWS * SIZE, *inputs[0].shape[1:]), "scatter": (ROWS // SIZE, *inputs[0].shape[1:])}
    gradients = [gradient_of(rank, shape.get(name, inputs[0].shape), dtype) for rank in RANKS]
    x_sum, x_all = inputs[0] + inputs[1], torch.cat(inputs)
    dy_sum, dy_all = gradients[0] + gradients[1], torch.cat(gradients)
    for rank in RANKS:
        y, dx = {
            "gather": (x_all, part(dy_sum, rank)),
            "reduce": (x_sum, dy_sum),
            "reduce forward": (x_sum, gradients[rank]),
            "scatter": (part(x_sum, rank), dy_all),
        }[name]
        assert_equal(made[rank][f"{name} {dtype}"], {"output": y, "input": dx})


def test_one_at_a_time(world: World) -> None:
    for made in results(world, "one_at_a_time"):
        assert made == {"kinds": {"Tensor"}, "waits": []}


def test_strides_do_not_matter(world: World) -> None:
    for made in results(world, "strides"):
        assert_equal(made["other"], made["dense"])
        assert torch.equal(made["summed"], torch.ones_like(made["summed"]))


def check_identity(made: dict[str, torch.Tensor], rank: int) -> None:
    x = input_of(rank)
    assert_equal(made, {"output": x, "input": gradient_of(rank, x.shape, x.dtype)})


def test_a_group_of_one_in_a_larger_world(world: World) -> None:
    for rank, made in enumerate(results(world, "group_of_one")):
        for each in made.values():
            check_identity(each, rank)


@pytest.mark.parametrize("name", ["AllGather", "AllReduce", "ReduceScatter"])
def test_a_world_of_one(name: str, tmp_path: Path) -> None:
    """And none at all."""
    check_identity(forward_backward(getattr(ops, name)(), input_of(0), 0), 0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_identity(forward_backward(getattr(ops, name)(), input_of(0), 0), 0)
        odd = input_of(0, 3)
        assert torch.equal(getattr(ops, name)()(odd), odd)
    finally:
        torch.distributed.destroy_process_group()


def test_rows_that_do_not_divide_are_refused_on_every_rank(world: World) -> None:
    for made in results(world, "does_not_divide"):
        assert set(made) == {"scatter", "linear"}
        for message in made.values():
            assert "(3, 2, " in message
            assert "2 ranks must divide its first dimension" in message


@pytest.mark.parametrize("name", ["none bias", "none no bias", "delayed bias", "mxfp8 bias", "nvfp4 no bias"])
def test_a_linear_between_collectives(world: World, name: str) -> None:
    """Each rank's linear over the rows of all, summed: the sums of what the linears give alone."""
    recipe, bias = name.split()[0], "no bias" not in name
    made = [result[f"{name} fused"] for result in results(world, "chains")]
    gathered = torch.cat([input_of(rank) for rank in RANKS])
    outputs, grads = [], []
    for rank in RANKS:
        linear = linear_of(rank, bias)
        shape = (ROWS, gathered.shape[1], linear.out_features)
        dy = torch.cat([gradient_of(other, shape, torch.bfloat16) for other in RANKS])
        outputs.append(forward_backward(linear, gathered, rank, dy=dy, recipe=RECIPES[recipe]))
        grads.append(outputs[-1]["input"])
    total, dx = outputs[0]["output"] + outputs[1]["output"], grads[0] + grads[1]
    for rank in RANKS:
        got = made[rank]
        near(got["output"], part(total, rank))
        assert torch.equal(got["input"], part(dx, rank))
        for key, value in outputs[rank].items():
            if key.startswith("basic_ops"):
                assert torch.equal(got[f"1.{key}"], value), key


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The product is made in parts of other sizes, whose FP32 sums may be in another order: the last bit, of each of
    the two numbers that are added up."""
    assert got.shape == want.shape
    bound = 2 * torch.finfo(got.dtype).eps * want.abs().max()
    assert (got.double() - want.double()).abs().max() <= bound


@pytest.mark.parametrize("name", ["none bias", "none no bias", "delayed bias", "mxfp8 bias", "nvfp4 no bias"])
def test_linear_overlapped_with_its_reduce_scatter(world: World, name: str) -> None:
    """The same as one after the other, but for the last bit of the output; gradients and state do not depend on it."""
    for made in results(world, "chains"):
        fused, apart = made[f"{name} fused"], made[f"{name} apart"]
        near(fused["output"], apart["output"])
        assert_equal(fused, apart, but=("output",))


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_compiled(world: World, recipe: str) -> None:
    for made in results(world, "compiled"):
        assert made[f"{recipe} graphs"] == 1
        for seed in range(2):
            assert_equal(made[f"{recipe} {seed} compiled"], made[f"{recipe} {seed} eager"])


def test_every_check_is_looked_at(world: World) -> None:
    for made in world:
        assert list(made) == [check.__name__ for check in CHECKS]
