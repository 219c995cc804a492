"""Rules over two processes (`rules_world.py`), against one process."""

from pathlib import Path

import pytest
import torch

from tests.distributed.rules_world import CHECKS, RULES, STEPS, parallel_step, ruled_model
from tests.distributed.sharded import train
from tests.worlds import World, results, run_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = tmp_path_factory.mktemp("rules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZOTINT_TEST_FOLDER", str(folder))
        return run_world(folder, CHECKS, 2)


def test_shards_of_mixed_formats_and_their_checkpoint(world: World) -> None:
    """Bit for bit the losses of one process, and again after a checkpoint was read."""
    alone = train(ruled_model(), RULES, 2 * STEPS)
    for found in results(world, "fully_sharded"):
        assert found["losses"] == alone
        assert found["resumed"] == alone[STEPS:]
        assert found["kinds"] == ["ShardedWeight", "ShardedWeight", "Tensor"]


def test_parts_of_weights(world: World) -> None:
    """Rows of a weight are multiplied by whole tokens: what a process has of the output is exact."""
    y, dx = parallel_step(None)
    for rank, found in enumerate(results(world, "tensor_parallel")):
        torch.testing.assert_close(found["y"], y.chunk(2, -1)[rank], rtol=0.02, atol=0.02)
        torch.testing.assert_close(found["dx"], dx, rtol=0.05, atol=0.5)
        assert "recipe is not the same on the 2 processes of the group" in found["error"]
