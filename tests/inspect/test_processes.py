"""Over processes an inspector says what one process would that has all of it."""

import pytest
import torch

import mezzotint as mz
from tests.inspect.inspect_world import CHECKS, SIZE, seen_of, tokens
from tests.worlds import World, results, shared_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, SIZE)


def test_tokens_and_shards_of_parameters(world: World) -> None:
    torch.manual_seed(0)
    want = seen_of(mz.LayerNormMLP(64, 128, device="cpu", params_dtype=torch.bfloat16), tokens())
    for found in results(world, "fully_sharded"):
        assert found["seen"].keys() == want.keys()
        for name, figures in found["seen"].items():
            times = SIZE if name.endswith("weight") else 1  # each process has quantized the whole weight
            assert figures["count"] == times * want[name]["count"]
            assert figures["amax"] == want[name]["amax"]
            assert figures["underflow"] == pytest.approx(want[name]["underflow"])
            assert figures["snr_db"] == pytest.approx(want[name]["snr_db"], rel=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parts_of_a_weight(world: World, sequence_parallel: bool) -> None:
    model = mz.Linear(64, 128, bias=False, device="cpu", params_dtype=torch.bfloat16)
    torch.manual_seed(2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(128, 64))
    want = seen_of(model, tokens())
    for found in results(world, "tensor_parallel"):
        seen = found[str(sequence_parallel)]
        assert seen.keys() == want.keys()
        for name, figures in seen.items():
            assert figures["amax"] == want[name]["amax"]
            assert figures["snr_db"] == pytest.approx(want[name]["snr_db"], rel=1e-12)
