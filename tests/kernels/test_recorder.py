"""Recorded calls: made again, they do to other tensors what the function does, and what might do otherwise is not
recorded."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzotint.kernels._lib import callee, run_op, write_op
from mezzotint.kernels._recorder import Recorder, noted, recording
from mezzotint.kernels._relaunch import note_launch
from mezzotint.kernels.activation import column_sum
from mezzotint.kernels.delayed import delayed_saw_
from mezzotint.kernels.philox import draw_rng

Function = Callable[..., Any]
ELSEWHERE = torch.ones(4)


def record(function: Function, *tensors: torch.Tensor) -> tuple[Function | None, Recorder]:
    """The function that makes the calls again, and the recorder."""
    with torch.no_grad(), Recorder(tensors) as recorder:
        result = function(*tensors)
    return recorder.function(result), recorder


def again_of(function: Function, *tensors: torch.Tensor) -> Function:
    again, recorder = record(function, *tensors)
    assert again is not None, recorder.missing
    return again


STEPS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "add": lambda held: held.append(held[-1] + held[0]),
    "twice": lambda held: held.append(2.0 * held[-1]),
    "view": lambda held: held.append(held[-1].reshape(-1).view(4, 4)),
    "transpose": lambda held: held.append(held[-1].t()),
    "row": lambda held: held[-1][1].mul_(0.5),
    "fill": lambda held: held.append(held[-1].new_empty(4, 4).fill_(3)),
    "write": lambda held: held[0].__setitem__(slice(1, 3), held[-1][:2].clone()),
    "into": lambda held: torch.mul(held[-1], held[0], out=held[-1]),
    "product": lambda held: held.append(held[-1] @ held[0].t()),
    "parts": lambda held: held.append(torch.cat(held[-1].split([3, 1])[::-1])),
    "drop": lambda held: held.pop() if len(held) > 2 else None,
    "op": lambda held: held.append(callee(column_sum, held[-1])(held[-1], torch.float32) + held[-1]),
    "pad": lambda held: held.append(torch.nn.functional.pad(held[-1], (0, 1))[:, 1:]),
    "constant": lambda held: held.append(torch.full((4, 4), 0.25) + held[-1]),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_calls_are_made_again(steps: list[str]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = [x, y.clone()]
        for step in steps:
            STEPS[step](held)
        return tuple(held[1:])

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed))
        return made[0].clone(), made[1].clone()

    again = again_of(program, *inputs(0))
    mine, theirs = inputs(1), inputs(1)
    for a, b in zip((*again(*mine), *mine), (*program(*theirs), *theirs), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_results_keep_their_form() -> None:
    x = torch.randn(4, 4)
    for result in (lambda x: x + 1, lambda x: (x + 1,), lambda x: (x, None, (x + 1, x)), lambda x: None):
        made, wanted = again_of(result, x)(x), result(x)
        assert str(made) == str(wanted)


def test_a_tensor_may_come_twice() -> None:
    x, y = torch.randn(4), torch.randn(4)
    again = again_of(lambda a, b, c: a - b * c, x, y, x)
    assert torch.equal(again(y, x, y), y - x * y)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * x[0, 0].item(), "item"),
        (lambda x: x if x[0, 0] > 0 else -x, "bool"),
        (lambda x: x * len(x.tolist()), "tolist"),
        (lambda x: x * x.numpy().sum(), "numpy"),
        (lambda x: x + ELSEWHERE, "comes from elsewhere"),
        (lambda x: note_launch(None, (1,), (x,), None) or x, "launched"),
        (lambda x: noted(lambda x, option: x + 1)(x, object()), "object"),
        (lambda x: object(), "object"),
    ],
)
def test_what_cannot_be_recorded(function: Function, reason: str) -> None:
    again, recorder = record(function, torch.ones(4, 4))
    assert again is None
    assert recorder.missing is not None
    assert reason in recorder.missing


def test_what_autograd_follows_cannot_be_recorded() -> None:
    x = torch.randn(4, requires_grad=True)
    with Recorder([x]) as recorder:
        y = x * 2
    assert recorder.function(y) is None
    with Recorder([x]) as recorder:
        y = x.detach() * 2
    assert recorder.function(y) is not None


def test_grad_mode_is_left_alone() -> None:
    """A function may switch it; what is written is called without gradients, and must not switch them on."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x + 1
        with torch.enable_grad():
            return torch.mul(y, x.detach(), out=y)

    x = torch.randn(4)
    with Recorder([x]) as recorder:
        result = function(x)
    again = recorder.function(result)
    assert again is not None
    parameter = torch.nn.Parameter(x)
    with torch.no_grad():
        assert torch.equal(again(parameter), result)
        assert not torch.is_grad_enabled()


def test_questions_about_the_form_are_not_made_again() -> None:
    asked: list[str] = []

    class Asked(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def function(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (4, 4)
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.numel() % 16 == x.data_ptr() % 16 == x.storage_offset()
        _ = x.t(), x[1:], x.view(16), x.detach()  # nobody reads these
        return x.neg()

    again, x = again_of(function, torch.ones(4, 4)), torch.ones(4, 4)
    with Asked():
        again(x)
    assert asked == ["neg"]


def test_each_op_is_one_call() -> None:
    """What its code does inside is its own affair."""
    inside: list[Any] = []

    def code(x: torch.Tensor, option: float) -> list[torch.Tensor]:
        inside.append(recording())
        run_op(column_sum, x, torch.float32)
        return [x * float(x.sum()), x + option]

    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = noted(code)(x, 2.5)
        return a - b

    again, recorder = record(function, torch.ones(4, 4))
    assert again is not None
    assert inside == [None]
    assert len(recorder.lines) == 3  # the op, the difference, what is returned
    x = torch.randn(4, 4)
    assert torch.equal(again(x), x * float(x.sum()) - (x + 2.5))


def test_ops_that_write_and_draw() -> None:
    def function(history: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        write_op(delayed_saw_, history, [amax], [1])
        return draw_rng(amax)

    again = again_of(function, torch.zeros(2, 3), torch.ones(1))
    history = torch.zeros(2, 3)
    torch.manual_seed(5)
    drawn = again(history, torch.full((1,), 7.0))
    torch.manual_seed(5)
    assert torch.equal(drawn, draw_rng(history))
    assert not torch.equal(drawn, again(history, torch.ones(1)))
    assert history.tolist() == [[0, 7, 0], [0, 0, 0]]


@pytest.mark.parametrize("is_recorded", [False, True], ids=["while it is recorded", "made again"])
def test_nothing_is_held_longer_than_needed(is_recorded: bool) -> None:
    """Of a chain of tensors two are alive at a time: what is read, and what is made of it."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def code(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        result = x + 1
        made.append(weakref.ref(result))
        return result

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = noted(code)(x)
        return x

    gc.disable()
    try:
        again = again_of(function, torch.ones(4))
        if is_recorded:
            made.clear()
            alive.clear()
            again(torch.ones(4))
    finally:
        gc.enable()
    assert alive == [0, 1, 1, 1, 1]


def test_an_error_leaves_nothing_behind() -> None:
    def fails(x: torch.Tensor) -> None:
        raise KeyError("code")

    def record_failing(tensors: Sequence[torch.Tensor]) -> None:
        with Recorder(tensors):
            with pytest.raises(KeyError):
                noted(fails)(tensors[0])
            assert recording() is not None
            raise ValueError("function")

    with pytest.raises(ValueError, match="function"):
        record_failing([torch.ones(2)])
    assert recording() is None
    assert noted(fails) is fails
