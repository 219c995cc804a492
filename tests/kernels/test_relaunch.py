"""Launches from a record: they are those that the op's own code makes, with buffers of their own, and only where that
code does nothing but launch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mezzotint as mz
from mezzotint.kernels import _relaunch
from mezzotint.kernels._lib import callee
from mezzotint.kernels._relaunch import Relaunched, note_launch
from mezzotint.recipe import RECIPES
from tests.formats import VARIANTS, Variant
from tests.values import raw

STREAM = 77


class Op:
    """An op whose code is `code(op, *args)`. Its `runs` are counted, and `launched` has what each launch was called
    with, addresses in the place of tensors."""

    def __init__(self, code: Callable[..., Any]) -> None:
        self.code = code
        self.runs = 0
        self.launched: list[tuple[Any, ...]] = []
        self.call = Relaunched(self.run)
        self.runtime = SimpleNamespace(launch_enter_hook=None)

    def run(self, *args: Any) -> Any:
        self.runs += 1
        return self.code(self, *args)

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        """Do what `Fast.launch` does."""
        compiled = SimpleNamespace(
            run=lambda *args: self.launched.append(args), function="function", packed_metadata="metadata"
        )
        given = [addressed(arg) for arg in args]
        compiled.run(*(*grid, 1, 1)[:3], STREAM, "function", "metadata", None, None, None, *given)
        note_launch(compiled, grid, args, self.runtime)


def addressed(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(addressed, arg))
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of a tensor on the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def cast(op: Op, x: torch.Tensor, scale: torch.Tensor | None, rows: int, flag: bool = True) -> list[torch.Tensor]:
    """Code with all that a record holds: views, scratch of which parts are handed on, two launches, constants."""
    matrix = x.view(-1, x.shape[-1])
    out, amax = x.new_empty(x.shape, dtype=torch.uint8), torch.empty_like(matrix[:, 0], dtype=torch.float32)
    first, second = x.new_empty(12, dtype=torch.float32).split([8, 4])
    op.launch((rows,), matrix, first, second, None, 0.5, flag)
    op.launch((3, 2), matrix[1:], scale, second, out, amax, (1, 2), rows)
    return [out, amax]


def expected(x: torch.Tensor, scale: torch.Tensor | None, rows: int, buffers: list[int]) -> list[tuple[Any, ...]]:
    out, amax, scratch = buffers
    head, tail = (STREAM, "function", "metadata", None, None, None), x.data_ptr()
    at = None if scale is None else scale.data_ptr()
    return [
        (rows, 1, 1, *head, tail, scratch, scratch + 32, None, 0.5, True),
        (3, 2, 1, *head, tail + 2 * x.shape[-1], at, scratch + 32, out, amax, (1, 2), rows),
    ]


@pytest.mark.parametrize("with_scale", [True, False])
def test_the_third_call_makes_the_launches_of_the_record(with_scale: bool) -> None:
    op = Op(cast)
    for i in range(4):
        x = torch.zeros(2, 4, 16, dtype=torch.bfloat16)
        scale = torch.zeros(1) if with_scale else None
        op.launched.clear()
        made = op.call(x, scale, 5)
        scratch = op.launched[0][10]
        assert op.launched == expected(x, scale, 5, [*[each.data_ptr() for each in made], scratch])
        assert [(each.shape, each.dtype) for each in made] == [((2, 4, 16), torch.uint8), ((8,), torch.float32)]
        assert op.runs == min(i + 1, 2)


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 3), st.booleans(), st.booleans()), max_size=30))
def test_calls_of_any_forms(calls: list[tuple[int, int, bool, bool]]) -> None:
    """In whatever order forms come, a call launches what its own code would."""
    op, plain = Op(cast), Op(cast)
    for size, rows, is_shifted, flag in calls:
        x = torch.zeros(size * 16 + 1, dtype=torch.bfloat16)[int(is_shifted) :][: size * 16].view(size, 16)
        scale = x.new_zeros(1)
        known = {x.data_ptr(), x[1:].data_ptr(), scale.data_ptr()}

        def seen(op: Op, known: set[int] = known) -> list[list[Any]]:
            """What was launched, without the addresses of buffers, which each call makes anew."""
            is_new = lambda arg: type(arg) is int and arg > 1 << 20 and arg not in known  # noqa: E731
            return [["a buffer" if is_new(arg) else arg for arg in call] for call in op.launched]

        op.launched.clear()
        plain.launched.clear()
        made = op.call(x, scale, rows, flag)
        plain.run(x, scale, rows, flag)
        assert seen(op) == seen(plain)
        assert [each.shape for each in made] == [(size, 16), (size,)]


X = torch.zeros(4, 16, dtype=torch.bfloat16)


def test_tuples_of_tensors() -> None:
    def code(op: Op, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(4)
        op.launch((1,), (None, x, 0.5), x, (out, x[1:]), ("norm", 3), (out,), 7)
        return out

    op = Op(code)
    for _ in range(4):
        op.launched.clear()
        x = torch.zeros(4, 16)
        out = op.call(x).data_ptr()
        at = x.data_ptr()
        assert op.launched[0][9:] == ((None, at, 0.5), at, (out, at + 64), ("norm", 3), (out,), 7)
    assert op.runs == 2


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(4, 32, dtype=torch.bfloat16), None, 5, True),
        (torch.zeros(4, 16), None, 5, True),
        (torch.zeros(4, 32, dtype=torch.bfloat16)[:, :16], None, 5, True),
        (torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16), None, 5, True),
        (torch.nn.Parameter(X, requires_grad=False), None, 5, True),
        (X, torch.zeros(1), 5, True),
        (X, None, 6, True),
        (X, None, 5, 1),  # which equals True
        (X, None, 5, False),
    ],
    ids=str,
)
def test_another_form_is_recorded_for_itself(other: tuple[Any, ...]) -> None:
    op = Op(cast)
    for _ in range(3):
        op.call(X, None, 5, True)
    assert op.runs == 2
    op.call(*other)
    assert op.runs == 3


def test_options_in_a_list_belong_to_the_form() -> None:
    op = Op(lambda op, x, params: op.launch((1,), x, tuple(params)))
    for params in ([1.0], [1.0], [1.0], [], [], [], [0.25], [1]):
        op.call(X, params)
    assert op.runs == 6
    assert [call[-1] for call in op.launched] == [(1.0,)] * 3 + [()] * 3 + [(0.25,), (1,)]
    assert type(op.launched[-1][-1][0]) is int
    for _ in range(3):
        op.call(X, [X])  # tensors in a list are not looked at
    assert op.runs == 9


def _fills(op: Op, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(4)
    op.launch((1,), x, out)
    return out


def _copies(op: Op, x: torch.Tensor) -> None:
    op.launch((1,), x.t().contiguous())


def _asks(op: Op, x: torch.Tensor) -> None:
    op.launch((1,), x, float(x[0, 0]))


def _returns_a_part(op: Op, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(8)
    op.launch((1,), x, out)
    return out[:4]


def _returns_what_it_got(op: Op, x: torch.Tensor) -> torch.Tensor:
    op.launch((1,), x)
    return x


CONSTANT = torch.ones(4)


def _reads_a_constant(op: Op, x: torch.Tensor) -> None:
    op.launch((1,), x, CONSTANT)


def _nests_tuples(op: Op, x: torch.Tensor) -> None:
    op.launch((1,), (x, (x, None)))


def _launches_by_triton(op: Op, x: torch.Tensor) -> None:
    note_launch(None, (1,), (x,), op.runtime)


def _makes_columns(op: Op, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x.t())
    op.launch((1,), x, out)
    return out


def _makes_elsewhere(op: Op, x: torch.Tensor) -> None:
    x.new_empty(4, device="meta")
    op.launch((1,), x)


@pytest.mark.parametrize(
    "code",
    [
        _fills,
        _copies,
        _asks,
        _returns_a_part,
        _returns_what_it_got,
        _reads_a_constant,
        _nests_tuples,
        _launches_by_triton,
        _makes_columns,
        _makes_elsewhere,
    ],
)
def test_code_that_does_more_runs_each_time(code: Callable[..., Any]) -> None:
    op = Op(code)
    for i in range(4):
        op.call(X)
        assert op.runs == i + 1


def test_a_buffer_without_dimensions() -> None:
    def code(op: Op, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(())
        op.launch((1,), x, out)
        return out

    op = Op(code)
    for _ in range(3):
        assert op.call(X).shape == ()
    assert op.runs == 2


def test_two_tensors_in_one_storage_are_not_told_apart() -> None:
    op = Op(lambda op, x, y: op.launch((1,), y, x))
    for _ in range(4):
        op.call(X[:2], X[2:])
    assert op.runs == 4


def test_tensors_without_memory() -> None:
    op = Op(lambda op, x: op.launch((1,), x))
    for _ in range(4):
        op.call(torch.zeros(0, 16))
    assert op.runs == 4


@pytest.mark.parametrize(
    "other", [X.as_subclass(type("Own", (torch.Tensor,), {})), {"a": 1}, object()], ids=["tensor", "dict", "object"]
)
def test_arguments_of_other_types_go_to_the_code(other: Any) -> None:
    op = Op(lambda op, x, other: None)
    for _ in range(4):
        op.call(X, other)
    assert op.runs == 4
    assert not op.call.records


def test_a_tensor_of_another_device_than_the_current(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op(lambda op, x: op.launch((1,), x))
    for _ in range(3):
        op.call(X)
    assert op.runs == 2
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(4):
        op.call(X)
    assert op.runs == 6


def test_a_profilers_hook_hears_of_launches() -> None:
    op = Op(lambda op, x: op.launch((1,), x))
    for _ in range(3):
        op.call(X)
    op.runtime.launch_enter_hook = lambda metadata: None
    op.call(X)
    assert op.runs == 3
    op.runtime.launch_enter_hook = None
    op.call(X)
    assert op.runs == 3


def test_an_error_leaves_no_record() -> None:
    def fails(op: Op, x: torch.Tensor) -> None:
        op.launch((1,), x)
        if op.runs == 2:
            raise ValueError("once")

    op = Op(fails)
    op.call(X)
    with pytest.raises(ValueError, match="once"):
        op.call(X)
    assert torch._C._len_torch_dispatch_stack() == 0
    op.call(X)
    op.call(X)
    assert op.runs == 3


def test_forms_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_relaunch, "MOST_FORMS", 4)
    op = Op(lambda op, x: op.launch((1,), x))
    for size in range(1, 12):
        op.call(torch.zeros(size))
        assert len(op.call.records) <= 4
    for _ in range(3):
        op.call(torch.zeros(11))
    assert op.runs == 12


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bits_of_every_format(variant: Variant) -> None:
    """Call by call, on values that are new each time, the ops on CUDA give the bits of their references."""
    for shape in ((128, 256), (33, 70)):
        for i in range(4):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(variant.dtypes[0]) * 4.0**i
            for usage in variant.usages():
                want = variant.buffers(x, usage)
                on_cuda = x.cuda()
                got = callee(variant.quantize, on_cuda)(on_cuda, *variant.arguments(on_cuda.device, usage))
                for (name, expected), buffer in zip(want.items(), got, strict=True):
                    assert torch.equal(raw(buffer).cpu(), raw(expected)), (name, shape, i, usage)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore::mezzotint.EmulationWarning")
def test_bits_of_steps(name: str) -> None:
    """Steps that make the launches of records give the bits of steps in which each op runs its code."""

    def steps() -> list[torch.Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
        model = torch.nn.Sequential(
            mz.LayerNormLinear(128, 256, **options),
            mz.LayerNormMLP(256, 384, activation="swiglu", **options),
            mz.Linear(256, 128, **options),
        )
        found: list[torch.Tensor] = []
        for i in range(5):
            x = torch.randn(96, 128, dtype=torch.bfloat16, device="cuda") * 2.0**i
            x.requires_grad_()
            with mz.autocast(name):
                y = model(x)
            y.backward(torch.randn_like(y))
            found += [y.detach(), *[leaf.grad.clone() for leaf in (x, *model.parameters()) if leaf.grad is not None]]
        return found

    steps()
    made = steps()
    with mock.patch.object(Relaunched, "__call__", lambda op, *args: op.run(*args)):
        expected = steps()
    assert len(made) == len(expected)
    for mine, other in zip(made, expected, strict=True):
        assert torch.equal(mine, other)
