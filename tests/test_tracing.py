"""What stands in a graph for a function of eager code, and what is called while a graph is traced."""

from typing import Any

import pytest
import torch

from mezzotint.tracing import call_untraced, eager_only, memoized, traced_as

pytestmark = pytest.mark.compile

CALLS: list[Any] = []


@traced_as(lambda x, by: x * by + 1)
def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    """Multiply; in a graph something else, so that one sees which of the two ran."""
    CALLS.append(by)
    return x * by


@eager_only(in_graph=-1)
def asked(x: torch.Tensor) -> int:
    """Look at a value, which a graph cannot."""
    return int(x.sum())


def noted(what: Any) -> int:
    CALLS.append(what)
    return len(CALLS)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    CALLS.clear()
    return torch.compile(function, fullgraph=True, backend="eager")


def test_dynamo_walks_through_what_stands_for_a_function() -> None:
    x = torch.ones(3)
    assert scaled(x, 2).tolist() == [2.0] * 3
    assert compiled(lambda x: scaled(x, 2))(x).tolist() == [3.0] * 3
    assert CALLS == []  # the function of eager code did not run


def test_a_question_of_eager_code_has_one_answer_in_a_graph() -> None:
    x = torch.ones(3)
    assert asked(x) == 3
    assert compiled(lambda x: x + asked(x))(x).tolist() == [0.0] * 3


def test_a_function_is_called_once_while_a_graph_is_traced() -> None:
    call = compiled(lambda x: x + call_untraced(noted, tuple(x.shape)))
    assert call(torch.zeros(3)).tolist() == call(torch.zeros(3)).tolist() == [1.0] * 3
    assert CALLS == [(3,)]
    assert call_untraced(noted, "eager") == 2


def test_only_eager_code_keeps_what_is_memoized() -> None:
    class Owner:
        pass

    owner = Owner()
    assert compiled(lambda x: x + memoized(owner, "_kept", 1, lambda: 2))(torch.zeros(1)).item() == 2
    assert vars(owner) == {}
    assert [memoized(owner, "_kept", key, lambda: noted("made")) for key in (1, 1, 2)] == [1, 1, 2]
