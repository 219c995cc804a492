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


def test_shards_of_weights(world: World) -> None:
    """Rules give a module that is split over ranks what a region around it alone would, bit for bit."""
    y, _ = parallel_step(None)
    for rank, found in enumerate(results(world, "tensor_parallel")):
        for ruled, by_hand in zip(found["by_rules"], found["by_hand"], strict=True):
            assert torch.equal(ruled, by_hand)
        torch.testing.assert_close(found["by_rules"][0], y.chunk(2, -1)[rank], rtol=0.02, atol=0.02)
        assert "recipe is not the same on the 2 ranks of the group" in found["error"]
