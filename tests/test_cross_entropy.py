"""parallel_cross_entropy against torch's, in FP64."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import mezzotint as mz

SHAPE, VOCABULARY = (3, 5), 17


def sample(dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    logits = (torch.randn(*SHAPE, VOCABULARY, generator=make) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(0, VOCABULARY, SHAPE, generator=make)


def expected_of(logits: torch.Tensor, target: torch.Tensor, smoothing: float, ignored: int) -> torch.Tensor:
    flat = functional.cross_entropy(
        logits.double().flatten(0, 1),
        target.flatten(),
        reduction="none",
        label_smoothing=smoothing,
        ignore_index=ignored,
    )
    return flat.view(SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("reduces", [False, True])
def test_loss_and_gradient(dtype: torch.dtype, smoothing: float, ignored: int, reduces: bool) -> None:
    logits, target = sample(dtype)
    target[0, 2] = target[2, 4] = ignored
    loss = mz.parallel_cross_entropy(logits, target, smoothing, reduces, None, ignored)
    expected = expected_of(logits, target, smoothing, ignored)
    expected = expected.mean() if reduces else expected
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((loss * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert grad.dtype == dtype
    assert not grad[0, 2].any()
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(grad.double(), wanted.double(), rtol=rounding, atol=1e-7)


def test_large_logits() -> None:
    logits, target = sample(torch.float32, scale=1e4)
    loss = mz.parallel_cross_entropy(logits, target)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(loss.double(), expected_of(logits, target, 0.0, -100), rtol=1e-6, atol=1e-6)


def test_a_second_backward_gives_the_same() -> None:
    logits, target = sample(torch.bfloat16)
    loss = mz.parallel_cross_entropy(logits, target, 0.1, True)
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, logits)[0])


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """Sums in another order: FP32 within a millionth, gradients within one unit of BF16."""
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(mz.parallel_cross_entropy, fullgraph=True, backend=counter)
    for _ in range(2):
        logits, target = sample(torch.bfloat16)
        target[1, 1] = -100
        results = []
        for function in (call, mz.parallel_cross_entropy):
            loss = function(logits, target, 0.1)
            results.append((loss, torch.autograd.grad(loss.square().sum(), logits)[0]))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=2**-7, atol=1e-6)
    assert counter.frame_count == 1


def test_bad_input() -> None:
    logits, target = sample(torch.float32)
    with pytest.raises(ValueError, match="target must be"):
        mz.parallel_cross_entropy(logits, target[0])
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        mz.parallel_cross_entropy(logits, target, 1.0)
    with pytest.warns(DeprecationWarning, match="is called inp"):
        loss = mz.parallel_cross_entropy(None, target, _input=logits)
    assert torch.equal(loss, mz.parallel_cross_entropy(logits, target))


def test_a_group_of_one_is_no_group(tmp_path: Path) -> None:
    logits, target = sample(torch.float32)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = mz.parallel_cross_entropy(logits, target, dist_process_group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(made, mz.parallel_cross_entropy(logits, target))
