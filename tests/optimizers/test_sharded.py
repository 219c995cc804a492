"""Optimizers under FSDP2, in a world of two processes: bit for bit as one process, and state that is put together."""

import pytest
import torch

from tests.optimizers.world import CASES, CHECKS
from tests.worlds import World, results, shared_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS)


@pytest.mark.parametrize("name", CASES)
def test_sharded_parameters(world: World, name: str) -> None:
    for found in results(world, "sharded_as_one"):
        sharded, alone = found[f"{name} sharded"], found[f"{name} alone"]
        assert sharded["losses"] == alone["losses"]
        assert len(set(alone["losses"])) == len(alone["losses"])
        for key, value in alone.items():
            if key != "losses":
                assert torch.equal(sharded[key], value), key


def test_whole_state(world: World) -> None:
    for found in results(world, "resumed_from_whole_state"):
        assert found.pop("lr") == 5e-3
        assert found.pop("names") == ["exp_avg", "exp_avg_sq", "master_param", "step"]
        assert all(found.values()), found
