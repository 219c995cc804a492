"""`parallelize_module` with our styles: modules split from outside are the modules made in parts, to the bit."""

import re

import pytest
import torch

from tests.distributed.styles_world import CHECKS, SIZE
from tests.recipes import assert_equal
from tests.worlds import World, results, shared_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, SIZE)


def test_split_from_outside_is_made_in_parts(world: World) -> None:
    for found in results(world, "styles"):
        assert len(found) == 36
        for got, want in found.values():
            assert_equal(got, want)


def test_compiled(world: World) -> None:
    for found in results(world, "compiled"):
        for name in ("norm column", "mlp"):
            assert found[f"{name} graphs"] == 1
            for number in range(2):
                assert_equal(*found[f"{name} {number}"])


def test_training(world: World) -> None:
    first, second = results(world, "training")
    assert first["names"] == sorted(first["whole"]) == second["names"]
    assert first["losses"].isfinite().all()
    assert first["losses"][-1] < first["losses"][0]
    assert_equal(first["whole"], second["whole"])
    assert not torch.equal(first["losses"], second["losses"])  # of other tokens


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("plain", "TypeError: ColwiseParallel is given Linear: it splits modules of mezzotint"),
        ("twice", "Linear is split already, over 2 ranks"),
        ("one weight", "LayerNormMLP has two weights: use TensorParallel"),
        ("two weights", "Linear has 1 weights: it cannot be split"),
        ("odd", "out_features is 63: it must be divisible by the 2 ranks"),
        ("fused", "queries, keys and values are one weight"),
        ("quantized", "a weight of quantized_model_init cannot be split"),
    ],
)
def test_wrong_use_raises_on_every_process(world: World, case: str, message: str) -> None:
    for found in results(world, "wrong"):
        assert re.search(re.escape(message), found[case]), found[case]
