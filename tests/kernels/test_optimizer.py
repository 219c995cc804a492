"""The ops of Adam and SGD: opcheck, and their formulas in FP64."""

from typing import Any

import pytest
import torch

from mezzotint.kernels.optimizer import adam_, join_master, sgd_

SHAPES = ((5, 7), (40,), (0, 3), (2, 3, 4))
LR, BETA1, BETA2, EPS, DECAY, MOMENTUM = 0.1, 0.8, 0.9, 1e-6, 0.3, 0.7


def sample(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def steps(value: float) -> list[torch.Tensor]:
    return [torch.tensor(value) for _ in SHAPES]


def adam_arguments(decoupled: bool, bias_correction: bool, found_inf: torch.Tensor | None, lr: Any) -> tuple[Any, ...]:
    lists = (sample(0), sample(1), sample(2), [x.abs() for x in sample(3)], steps(3.0))
    return *lists, lr, found_inf, LR, BETA1, BETA2, EPS, DECAY, decoupled, bias_correction


def sgd_arguments(
    momentum: float, dampening: float, nesterov: bool, after: bool, found_inf: torch.Tensor | None, lr: Any = None
) -> tuple[Any, ...]:
    lists = (sample(0), sample(1), sample(2), steps(3.0)) if momentum else (sample(0), sample(1), [], [])
    return *lists, lr, found_inf, LR, momentum, dampening, DECAY, nesterov, after


SGD_CASES = [
    (0.0, 0.0, False, False),
    (MOMENTUM, 0.0, False, False),
    (MOMENTUM, 0.0, True, False),
    (MOMENTUM, 0.4, False, False),
    (MOMENTUM, 0.4, False, True),
    (MOMENTUM, 0.0, True, True),
]


@pytest.mark.parametrize("found_inf", [None, 1.0])
def test_opcheck(found_inf: float | None) -> None:
    flag = None if found_inf is None else torch.tensor([found_inf])
    torch.library.opcheck(torch.ops.mezzotint.adam_.default, adam_arguments(True, True, flag, torch.tensor(LR)))
    torch.library.opcheck(torch.ops.mezzotint.adam_.default, adam_arguments(False, False, flag, None))
    torch.library.opcheck(torch.ops.mezzotint.sgd_.default, sgd_arguments(MOMENTUM, 0.0, True, False, flag))
    torch.library.opcheck(
        torch.ops.mezzotint.sgd_.default, sgd_arguments(MOMENTUM, 0.4, False, True, flag, torch.tensor(LR))
    )


def test_join_master() -> None:
    param = torch.tensor([1.0, -2.0, 0.0]).bfloat16()
    remainder = torch.tensor([0, -1, 1], dtype=torch.int16)
    torch.library.opcheck(torch.ops.mezzotint.join_master.default, (param, remainder))
    assert join_master(param, remainder).view(torch.int32).tolist() == [0x3F800000, 0xC0000000 - 1 - 2**32, 1]


def assert_near(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert (x.double() - y).abs().sum() <= 1e-6 * y.abs().sum() + 1e-12, what


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("by_tensor", [True, False])
def test_adam_by_formula(decoupled: bool, bias_correction: bool, by_tensor: bool) -> None:
    arguments = adam_arguments(decoupled, bias_correction, None, torch.tensor(LR) if by_tensor else None)
    wanted: tuple[list[torch.Tensor], ...] = ([], [], [])
    for p, g, m, v in zip(*([x.double() for x in tensors] for tensors in arguments[:4]), strict=True):
        g = g if decoupled else g + DECAY * p
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        one, two = (1 - BETA1**3, 1 - BETA2**3) if bias_correction else (1.0, 1.0)
        update = (m / one) / ((v / two).sqrt() + EPS)
        update = update + DECAY * p if decoupled else update
        for tensors, value in zip(wanted, (p - LR * update, m, v), strict=True):
            tensors.append(value)
    grads = [g.clone() for g in arguments[1]]
    adam_(*arguments)
    for name, actual, expected in zip("pmv", (arguments[0], *arguments[2:4]), wanted, strict=True):
        assert_near(actual, expected, name)
    assert all(torch.equal(x, y) for x, y in zip(grads, arguments[1], strict=True))


@pytest.mark.parametrize(("momentum", "dampening", "nesterov", "after"), SGD_CASES)
@pytest.mark.parametrize("count", [0, 3])
def test_sgd_by_formula(momentum: float, dampening: float, nesterov: bool, after: bool, count: int) -> None:
    arguments = sgd_arguments(momentum, dampening, nesterov, after, None)
    buffers = arguments[2] or [torch.zeros(shape) for shape in SHAPES]
    if count == 0:
        for tensor in (*arguments[2], *arguments[3]):
            tensor.zero_()
    wanted: tuple[list[torch.Tensor], ...] = ([], [])
    for p, g, b in zip(*([x.double() for x in tensors] for tensors in (*arguments[:2], buffers)), strict=True):
        g = g if after else g + DECAY * p
        b = momentum * b + (1 - dampening) * g if count else g
        update = g if momentum == 0 else g + momentum * b if nesterov else b
        update = update + DECAY * p if after else update
        wanted[0].append(p - LR * update)
        wanted[1].append(b)
    sgd_(*arguments)
    assert_near(arguments[0], wanted[0], "p")
    if momentum:
        assert_near(arguments[2], wanted[1], "b")


def test_nothing_changes_where_an_infinity_was_found() -> None:
    flag = torch.ones(1)
    for op, arguments in (
        (adam_, adam_arguments(True, True, flag, None)),
        *((sgd_, sgd_arguments(*case, flag)) for case in SGD_CASES),
    ):
        arguments[1][0].fill_(torch.inf)
        before = [[x.clone() for x in tensors] for tensors in arguments[:4]]
        op(*arguments)
        for tensors, old in zip(arguments[:4], before, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(tensors, old, strict=True))
