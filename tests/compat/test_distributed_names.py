"""Transformer Engine's collectives along the first dimension, on two ranks; flags of recomputation."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.compat import distributed
from tests.worlds import World, results, shared_world

QUANTIZERS = {
    "current": mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3),
    "mxfp8": mz.MXFP8Quantizer(mz.DType.kFloat8E4M3),
    "block": mz.Float8BlockQuantizer(block_scaling_dim=1),
    "nvfp4": mz.NVFP4Quantizer(),
}


def whole() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(128, 64)


def check_collectives(rank: int) -> dict[str, Any]:
    x = whole()
    part = x[64 * rank : 64 * (rank + 1)]
    found: dict[str, Any] = {"rank": distributed.get_distributed_rank()}
    found["gathered"], found["handle"] = distributed.gather_along_first_dim(part, None)
    into = torch.empty_like(x)
    found["into"] = distributed.gather_along_first_dim(part, None, output_tensor=into)[0] is into
    for name, quantizer in QUANTIZERS.items():
        found[name] = distributed.gather_along_first_dim(part, None, quantizer=quantizer)[0].dequantize()
        quantized = QUANTIZERS["mxfp8"](part)
    found["bytes"] = distributed.gather_along_first_dim(quantized, None)[0].dequantize()
    delayed = mz.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), mz.DType.kFloat8E4M3)
    found["delayed"] = distributed.gather_along_first_dim(part, None, quantizer=delayed)[0].dequantize()
    found["amax"] = delayed.amax.item()
    found["scattered"], _ = distributed.reduce_scatter_along_first_dim(x * (rank + 1), None)
    found["sum"], _ = distributed.allreduce(x * (rank + 1))
    found["chunk"] = distributed.split_tensor_into_1d_equal_chunks(x, None, new_buffer=True)
    found["chunks"] = distributed.gather_split_1d_tensor(found["chunk"], None)
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, (check_collectives,), size=2)


def test_collectives(world: World) -> None:
    x = whole()
    for rank, found in enumerate(results(world, "check_collectives")):
        assert found["rank"] == rank
        assert torch.equal(found["gathered"], x)
        assert found["handle"] is None
        assert found["into"]
        for name, quantizer in QUANTIZERS.items():
            assert torch.equal(found[name], quantizer(x).dequantize()), name
        assert torch.equal(found["bytes"], QUANTIZERS["mxfp8"](x).dequantize())
        delayed = mz.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), mz.DType.kFloat8E4M3)
        assert torch.equal(found["delayed"], delayed(x).dequantize())
        assert found["amax"] == delayed.amax.item() == x.abs().max().item()
        torch.testing.assert_close(found["scattered"], 3 * x[64 * rank : 64 * (rank + 1)])
        torch.testing.assert_close(found["sum"], 3 * x)
        assert torch.equal(found["chunk"], x.view(-1)[4096 * rank : 4096 * (rank + 1)])
        assert torch.equal(found["chunks"], x.view(-1))


def test_one_process() -> None:
    x = whole()
    assert distributed.gather_along_first_dim(x, None) == (x, None)
    assert distributed.reduce_scatter_along_first_dim(x, None) == (x, None)
    assert distributed.allreduce(x)[0] is x
    quantized = distributed.gather_along_first_dim(x, None, quantizer=QUANTIZERS["current"])[0]
    assert isinstance(quantized, mz.Float8Tensor)
    assert distributed.get_distributed_world_size() == 1
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.get_distributed_rank()
    with pytest.raises(ValueError, match="output_tensor"):
        distributed.gather_along_first_dim(x, None, quantizer=QUANTIZERS["current"], output_tensor=x)


def test_flags_of_recomputation() -> None:
    def flags() -> tuple[bool, bool]:
        return distributed.is_fp8_activation_recompute_enabled(), distributed.in_fp8_activation_recompute_phase()

    assert flags() == (False, False)
    first, second = distributed.get_activation_recompute_contexts()
    with first:
        assert flags() == (True, False)
        with second:
            assert flags() == (True, True)
        assert flags() == (True, False)
    assert flags() == (False, False)
    assert distributed.activation_recompute_forward(True, True)(flags)() == (True, True)
    assert distributed.use_reentrant_activation_recompute()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flags_in_a_checkpoint(use_reentrant: bool) -> None:
    seen = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(distributed.is_fp8_activation_recompute_enabled())
        with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
            seen.append(distributed.is_fp8_activation_recompute_enabled())
            seen.append(distributed.in_fp8_activation_recompute_phase())
            return x.sin()

    mz.checkpoint(run, whole().requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True, False, False, True, True]


def test_parameters() -> None:
    weight = torch.empty(4, 4)
    tracker = mz.CudaRNGStatesTracker("cpu")
    tracker.add("model-parallel-rng", 5)
    distributed.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: tracker, partition_dim=1)
    torch.manual_seed(5)
    assert torch.equal(weight, torch.randn(4, 4))
    assert weight.partition_dim == 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="has tensor_model_parallel already"):
        distributed.set_tensor_model_parallel_attributes(weight, True, 0, 1)
    distributed.set_all_rng_states({"a": 1})
    assert distributed.get_all_rng_states() == {"a": 1}
    distributed.set_all_rng_states({})
