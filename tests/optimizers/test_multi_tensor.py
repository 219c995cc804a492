"""Functions over lists of tensors: formulas, the flag, other dtypes."""

from typing import Any

import pytest
import torch
from torch import nn

from mezzotint import DType, Float8Quantizer, optimizers
from mezzotint.optimizers import FusedAdam, FusedSGD, MultiTensorApply, multi_tensor_applier

SHAPES = ((5, 7), (40,), (2, 3, 4))


def sample(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flag(value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in tensors]


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_scale(dtype: torch.dtype, by_tensor: bool) -> None:
    op = optimizers.multi_tensor_scale_tensor if by_tensor else optimizers.multi_tensor_scale
    scale: Any = torch.tensor([0.3]) if by_tensor else 0.3
    inputs, outputs, noop = sample(0, dtype), sample(1), flag()
    multi_tensor_applier(op, noop, [inputs, outputs], scale)
    assert_equal(outputs, [x.float() * torch.tensor(0.3) for x in inputs])
    assert noop.item() == 0
    multi_tensor_applier(op, noop, [inputs, inputs], 4 * scale)  # in place, in its own dtype
    assert_equal(inputs, [x.to(dtype) for x in (y * 4 for y in outputs)])
    before = copies(outputs)
    multi_tensor_applier(op, flag(1), [inputs, outputs], scale)
    assert_equal(outputs, before)
    for bad in (torch.inf, torch.nan):
        noop = flag()
        inputs[1][3] = bad
        multi_tensor_applier(op, noop, [inputs, outputs], scale)
        assert noop.item() == 1


@pytest.mark.parametrize("per_tensor", [False, True])
def test_norms(per_tensor: bool) -> None:
    tensors, noop = sample(0, torch.bfloat16), flag()
    total, each = multi_tensor_applier(optimizers.multi_tensor_l2norm, noop, [tensors], per_tensor)
    wanted = torch.cat([x.double().flatten() for x in tensors]).norm()
    assert total.shape == (1,)
    assert abs(total.double() - wanted) <= 1e-6 * wanted
    assert each.shape == ((3,) if per_tensor else (0,))
    if per_tensor:
        assert torch.allclose(each.double(), torch.stack([x.double().norm() for x in tensors]), rtol=1e-6)
    before = copies(tensors)
    half, _ = multi_tensor_applier(
        optimizers.multi_tensor_unscale_l2norm, noop, [tensors], torch.tensor([0.5]), per_tensor
    )
    assert torch.allclose(half, total / 2)
    assert_equal(tensors, before)
    assert noop.item() == 0
    tensors[0][0, 0] = torch.nan
    multi_tensor_applier(optimizers.multi_tensor_unscale_l2norm, noop, [tensors], torch.tensor([0.5]))
    assert noop.item() == 1
    total, each = multi_tensor_applier(optimizers.multi_tensor_l2norm, flag(), [[]], True)
    assert (total.item(), each.shape) == (0.0, (0,))


def adam_by_optimizer(params: list[torch.Tensor], grads: list[torch.Tensor], steps: int, **options: Any) -> Any:
    held = [nn.Parameter(p.clone()) for p in params]
    optimizer = FusedAdam(held, 0.1, (0.8, 0.9), 1e-6, 0.3, **options)
    for _ in range(steps):
        for p, g in zip(held, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in held], optimizer


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correction", [0, 1])
def test_adam(mode: int, correction: int) -> None:
    """What the optimizer does, by hand."""
    params, grads, ms, vs = sample(0), sample(1), [x * 0 for x in sample(0)], [x * 0 for x in sample(0)]
    wanted, _ = adam_by_optimizer(params, grads, 2, adam_w_mode=mode == 1, bias_correction=correction == 1)
    for step in (1, 2):
        lists = [grads, params, ms, vs]
        numbers = (0.1, 0.8, 0.9, 1e-6, step, mode, correction, 0.3)
        multi_tensor_applier(optimizers.multi_tensor_adam, flag(), lists, *numbers)
    assert_equal(params, wanted)


@pytest.mark.parametrize("noop", [0, 1])
def test_adam_capturable_with_masters(noop: int) -> None:
    masters = sample(0)
    params = [x.bfloat16() for x in masters]
    grads = [x.bfloat16() for x in sample(1)]
    scaled, ms, vs = [g * 8 for g in grads], [x * 0 for x in sample(0)], [x * 0 for x in sample(0)]
    wanted, _ = adam_by_optimizer(masters, [g.float() for g in grads], 1)
    lists = [scaled, params, ms, vs, masters]
    before = [copies(tensors) for tensors in lists]
    op = optimizers.multi_tensor_adam_capturable_master
    numbers = (torch.tensor(0.1), 0.8, 0.9, 1e-6, torch.tensor([1]), 1, 1, 0.3, torch.tensor([0.125]))
    if noop:
        scaled[0].fill_(torch.inf)
        before[0][0].fill_(torch.inf)
        params[1].fill_(5.0)
        before[1][1].fill_(5.0)
    multi_tensor_applier(op, flag(noop), lists, *numbers)
    if noop:
        for tensors, old in zip(lists, before, strict=True):
            assert_equal(tensors, old)
    else:
        for x, y in zip(masters, wanted, strict=True):
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)  # the learning rate is rounded to FP32
        assert_equal(params, [x.bfloat16() for x in masters])


@pytest.mark.parametrize("noop", [0, 1])
def test_adam_fp8(noop: int) -> None:
    masters, grads, ms, vs = sample(0), sample(1), [x * 0 for x in sample(0)], [x * 0 for x in sample(0)]
    codes = [torch.full(shape, 9, dtype=torch.uint8) for shape in SHAPES]
    scales, amaxes, inverses = ([torch.full((1,), v) for _ in SHAPES] for v in (16.0, 0.5, -1.0))
    wanted, _ = adam_by_optimizer(masters, grads, 1)
    lists = [grads, codes, ms, vs, masters, scales, amaxes, inverses]
    before = [copies(tensors) for tensors in lists]
    numbers = (0.1, 0.8, 0.9, 1e-6, 1, 1, 1, 0.3, DType.kFloat8E4M3)
    multi_tensor_applier(optimizers.multi_tensor_adam_fp8, flag(noop), lists, *numbers)
    if noop:
        for tensors, old in zip(lists, before, strict=True):
            assert_equal(tensors, old)
        return
    assert_equal(masters, wanted)
    for code, master, amax, inverse in zip(codes, masters, amaxes, inverses, strict=True):
        quantizer = Float8Quantizer(torch.full((1,), 16.0), torch.full((1,), 0.5), DType.kFloat8E4M3)
        made = quantizer.quantize(master)
        assert torch.equal(made._data, code)
        assert torch.equal(quantizer.amax, amax)
        assert torch.equal(made._scale_inv, inverse)


@pytest.mark.parametrize("dampening", [0.0, 0.4])
@pytest.mark.parametrize("noop", [0, 1])
def test_sgd(dampening: float, noop: int) -> None:
    params, grads = sample(0), sample(1)
    held = [nn.Parameter(p.clone()) for p in params]
    optimizer = FusedSGD(held, 0.1, 0.7, dampening, 0.3)
    buffers, halves = [torch.full(shape, torch.nan) for shape in SHAPES], [x.half() for x in params]
    lists = [grads, params, buffers, halves]
    before = [copies(tensors) for tensors in lists]
    for first in (True, False):
        for p, g in zip(held, grads, strict=True):
            p.grad = g * 0.5
        optimizer.step()
        numbers = (0.3, 0.7, dampening, 0.1, False, first, False, 0.5)
        multi_tensor_applier(optimizers.multi_tensor_sgd, flag(noop), lists, *numbers)
    if noop:
        for tensors, old in zip(lists, before, strict=True):
            for x, y in zip(tensors, old, strict=True):
                assert torch.equal(x.isnan(), y.isnan())
                assert torch.equal(x.nan_to_num(), y.nan_to_num())
        return
    assert_equal(params, [p.detach() for p in held])
    assert_equal(halves, [p.detach().half() for p in held])


def test_bad_input() -> None:
    tensors = sample(0)
    with pytest.raises(ValueError, match="chunk_size"):
        MultiTensorApply(0)
    with pytest.raises(ValueError, match="noop_flag"):
        multi_tensor_applier(optimizers.multi_tensor_l2norm, torch.zeros(2), [tensors])
    with pytest.raises(ValueError, match="tensor_lists has 1 lists"):
        multi_tensor_applier(optimizers.multi_tensor_scale, flag(), [tensors], 1.0)
    with pytest.raises(ValueError, match="same number in each"):
        multi_tensor_applier(optimizers.multi_tensor_scale, flag(), [tensors, tensors[:1]], 1.0)
    with pytest.raises(ValueError, match="shapes"):
        multi_tensor_applier(optimizers.multi_tensor_scale, flag(), [tensors, tensors[::-1]], 1.0)
    lists = [tensors, sample(1), sample(2), sample(3)]
    with pytest.raises(ValueError, match="mode is 2"):
        multi_tensor_applier(optimizers.multi_tensor_adam, flag(), lists, 0.1, 0.9, 0.9, 1e-6, 1, 2, 1, 0.0)
