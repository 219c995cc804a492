"""Optimizers on a GPU: as torch.optim's there, compiled, in a CUDA graph, on quantized parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint.optimizers import FusedAdam, FusedSGD
from tests.optimizers.test_adam import KEPT, OPTIONS, assert_equal, set_gradients
from tests.optimizers.test_adam import parameters as cpu_parameters

pytestmark = pytest.mark.gpu


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in cpu_parameters(dtype)]


def give(params: list[nn.Parameter], step: int) -> None:
    made = cpu_parameters()
    set_gradients(made, step)
    for p, q in zip(params, made, strict=True):
        assert q.grad is not None
        p.grad = q.grad.to(p)


def train(optimizer: Any, params: list[nn.Parameter], first: int = 0, count: int = 4, step: Any = None) -> None:
    for i in range(first, first + count):
        give(params, i)
        (optimizer.step if step is None else step)()


def test_fp32_is_torch_optim_bit_for_bit() -> None:
    for make, theirs in (
        (lambda p: FusedAdam(p, **OPTIONS), lambda p: torch.optim.AdamW(p, **OPTIONS, fused=True)),
        (lambda p: FusedSGD(p, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True)),
    ):
        mine, other = parameters(), parameters()
        train(make(mine), mine)
        train(theirs(other), other)
        assert_equal(mine, other)


@pytest.mark.parametrize("kept", KEPT)
def test_near_the_cpu(kept: str) -> None:
    mine, other = parameters(torch.bfloat16), cpu_parameters(torch.bfloat16)
    ours, theirs = FusedAdam(mine, **OPTIONS, **KEPT[kept]), FusedAdam(other, **OPTIONS, **KEPT[kept])
    train(ours, mine)
    for i in range(4):
        set_gradients(other, i)
        theirs.step()
    for p, q in zip(mine, other, strict=True):
        a, b = (o.get_unscaled_state(x, "master_param").float().cpu() for o, x in ((ours, p), (theirs, q)))
        assert torch.allclose(a, b, rtol=2.0**-7, atol=1e-3)


@pytest.mark.compile
@pytest.mark.parametrize("kept", KEPT)
def test_compiled(kept: str) -> None:
    mine, other = parameters(torch.bfloat16)[:2], parameters(torch.bfloat16)[:2]
    ours, theirs = FusedAdam(mine, **OPTIONS, **KEPT[kept]), FusedAdam(other, **OPTIONS, **KEPT[kept])
    counters.clear()
    compiled = torch.compile(ours.step, fullgraph=True)
    for i in range(3):
        for params, optimizer, step in ((mine, ours, compiled), (other, theirs, None)):
            made = cpu_parameters()[:2]
            set_gradients(made, i)
            for p, q in zip(params, made, strict=True):
                assert q.grad is not None
                p.grad = q.grad.to(p)
            (optimizer.step if step is None else step)()
    assert_equal(mine, other)
    assert counters["stats"]["unique_graphs"] == 1


def test_in_a_cuda_graph() -> None:
    """A captured step, replayed with other gradients and another learning rate."""
    mine, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {**OPTIONS, "capturable": True, "master_weights": True, "store_param_remainders": True}
    ours, theirs = FusedAdam(mine, **options), FusedAdam(other, **options)
    give(mine, 0)
    give(other, 0)
    ours.step()
    theirs.step()
    graph = torch.cuda.CUDAGraph()
    state = copy.deepcopy((ours.state_dict(), [p.detach().clone() for p in mine]))
    with torch.cuda.graph(graph):
        ours.step()
    for i in range(1, 4):
        made = cpu_parameters()
        set_gradients(made, i)
        for p, q in zip(mine, made, strict=True):
            assert p.grad is not None
            p.grad.copy_(q.grad)
        give(other, i)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"].mul_(0.5)
        graph.replay()
        theirs.step()
    torch.cuda.synchronize()
    assert not torch.equal(state[1][0], mine[0])
    assert_equal(mine, other)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_quantized_parameters(name: str) -> None:
    make: dict[str, Any] = {
        "current": lambda: mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3),
        "mxfp8": lambda: mz.MXFP8Quantizer(mz.DType.kFloat8E4M3),
        "nvfp4": lambda: mz.NVFP4Quantizer(with_2d_quantization=True),
    }
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).cuda()
    param = nn.Parameter(make[name]().quantize(x))
    optimizer = FusedAdam([param], **OPTIONS, master_weights=True)
    for _ in range(3):
        param.grad = torch.ones_like(x)
        optimizer.step()
    expected = make[name]().quantize(optimizer.get_unscaled_state(param, "master_param"))
    assert torch.equal(param.dequantize(), expected.dequantize())
