"""FusedSGD: as torch.optim's, weight decay after the momentum, state, compiler."""

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mezzotint.optimizers import FusedSGD
from tests.optimizers.test_adam import assert_equal, parameters, set_gradients, train

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "after": {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "after"])
def test_fp32_is_torch_optim(case: str) -> None:
    """Bit for bit, but for dampening, which the fused kernel cannot tell the first step of."""
    mine, other = parameters(), parameters()
    train(FusedSGD(mine, 0.1, **CASES[case]), mine)
    train(torch.optim.SGD(other, 0.1, **CASES[case], fused=True), other)
    if case != "dampening":
        assert_equal(mine, other)
    for p, q in zip(mine, other, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-6)


def test_weight_decay_after_the_momentum() -> None:
    params = parameters()
    values, buffers = [p.detach().double() for p in params], [torch.zeros_like(p).double() for p in params]
    optimizer = FusedSGD(params, 0.1, **CASES["after"])
    for i in range(4):
        set_gradients(params, i)
        for p, value, buffer in zip(params, values, buffers, strict=True):
            assert p.grad is not None
            buffer.mul_(0.9).add_(p.grad)
            value.sub_(0.1 * (buffer + 0.1 * value))
        optimizer.step()
    for p, value in zip(params, values, strict=True):
        assert torch.allclose(p.double(), value, rtol=1e-6, atol=1e-6)


def test_bf16_parameters_are_rounded_in_every_step() -> None:
    mine, other = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    ours, theirs = FusedSGD(mine, 0.1, momentum=0.9), torch.optim.SGD(other, 0.1, momentum=0.9, fused=True)
    for i in range(3):
        set_gradients(mine, i)
        set_gradients(other, i)
        ours.step()
        theirs.step()
        with torch.no_grad():
            for p in other:
                p.copy_(p.bfloat16())
    assert_equal([p.float() for p in mine], other)
    assert {ours.state[p]["momentum_buffer"].dtype for p in mine} == {torch.float32}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(case: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = FusedSGD(params, 0.1, **CASES[case])
    train(optimizer, params, 0, 2)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, file)
    train(optimizer, params, 2, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p) for p in saved["params"]]
    other = FusedSGD(again, 1.0, **CASES[case])
    other.load_state_dict(saved["optimizer"])
    train(other, again, 2, 2)
    assert_equal(params, again)


def test_loads_the_state_of_torch_optim_and_goes_on_bit_for_bit() -> None:
    mine, other = parameters(), parameters()
    theirs = torch.optim.SGD(other, 0.1, momentum=0.9, fused=True)
    train(theirs, other, 0, 2)
    ours = FusedSGD(mine, 1.0)
    with torch.no_grad():
        for p, q in zip(mine, other, strict=True):
            p.copy_(q)
    ours.load_state_dict(theirs.state_dict())
    train(ours, mine, 2, 2)
    train(theirs, other, 2, 2)
    assert_equal(mine, other)


@pytest.mark.compile
@pytest.mark.parametrize("case", ["decay", "dampening", "after"])
def test_compiled(case: str) -> None:
    mine, other = parameters(torch.bfloat16)[:2], parameters(torch.bfloat16)[:2]
    ours, theirs = FusedSGD(mine, 0.1, **CASES[case]), FusedSGD(other, 0.1, **CASES[case])
    counters.clear()
    compiled = torch.compile(ours.step, fullgraph=True, backend="aot_eager")
    train(ours, mine, 0, 3, compiled)
    train(theirs, other, 0, 3)
    assert_equal(mine, other)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_bad_input() -> None:
    params = parameters()
    for options, words in (
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": 0.1, "momentum": -1.0}, "momentum"),
        ({"lr": 0.1, "nesterov": True}, "nesterov"),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, "nesterov"),
    ):
        with pytest.raises(ValueError, match=words):
            FusedSGD(params, **options)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedSGD(embedding.parameters(), 0.1).step()
