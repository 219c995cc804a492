"""Launches from a record: what an op launches for tensors of one form is worked out once.

The CUDA code of an op chooses tiles and grids, makes buffers and prepares the arguments of its launches. For tensors of
the same form (sizes, strides, dtype, device, alignment) and the same options it always comes to the same launches. So
`Relaunched` records them, the second time that it sees a form, and from then on makes the buffers and the launches of
the record, in a fraction of the Python.

What is recorded must be nothing but buffers, views of them and launches. While it records, a `Recording` is PyTorch's
dispatch mode, and so sees everything else: code that also fills a buffer, copies a tensor or asks for a value runs as
it is each time.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import attrgetter, itemgetter, or_
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mezzotint.kernels._recorder import recording

_T = TypeVar("_T")

MOST_FORMS = 4096  # of one op; a program with more of them begins anew
# What stands in the place of a record: nothing is known of the form, it was seen once, or no record can be made of it.
_UNKNOWN, _SEEN, _MORE_THAN_LAUNCHES = "unknown", "seen", "more than launches"

_STREAM = object()  # stands for the stream among what a kernel is called with
TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter)  # PyTorch's own classes of tensors, with which eager code calls
_OPTIONS = (int, float, bool, str, NoneType, torch.dtype)
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)


class Relaunched:
    """A `Relaunched` is the CUDA code of an op, `run`, whose launches are made from a record where there is one."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.records: dict[Any, Record | str] = {}  # by the form

    def __call__(self, *args: Any) -> Any:
        """Run the op for tensors and options."""
        key, tensors = _form(args)
        if key is None:
            return self.run(*args)
        record = self.records.get(key, _UNKNOWN)
        if type(record) is not Record or has_hooks(record.runtime):
            return self._run(key, record, args, tensors)
        return record.launch(*tensors)

    def record_of(self, args: Sequence[Any]) -> "Record | None":
        """Return the record of the launches for such arguments, or None if there is none."""
        record = self.records.get(_form(args)[0])
        return record if isinstance(record, Record) else None

    def _run(self, key: Any, record: "Record | str", args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Run the code as it is; the second time for tensors of this form, record it."""
        if record == _UNKNOWN:
            if len(self.records) >= MOST_FORMS:
                self.records.clear()
            self.records[key] = _SEEN
        if record != _SEEN or tensors[0].device.index != torch.cuda.current_device():
            return self.run(*args)
        with Recording(tensors) as recording:
            result = self.run(*args)
        self.records[key] = recording.record(result)
        return result


Taker = Callable[[Sequence[Any]], tuple[Any, ...]]  # it picks some items out of a sequence


class Launch(NamedTuple):
    """A `Launch` is a compiled kernel with what it is called with. `take` picks that, in order, out of the stream, the
    addresses of buffers, the constants, and tuples of these, which `tuples` pick."""

    run: Callable[..., None]
    constants: tuple[Any, ...]
    tuples: tuple[Taker, ...]
    take: Taker


@dataclass(frozen=True, slots=True)
class Record:
    """A `Record` holds what an op does for tensors of one form. Its buffers are numbered: first the op's tensors, then
    those that it makes, then places inside of these that begin elsewhere."""

    made: tuple[tuple[tuple[Any, ...], torch.dtype], ...]  # sizes as `new_empty` takes them one by one, and dtype
    inside: tuple[tuple[int, int], ...]  # the number of a buffer, and bytes behind its beginning
    launches: tuple[Launch, ...]
    returned: Callable[[list[Any]], Any]  # what the op returns of the buffers that were made
    runtime: Any  # Triton's settings, which hold a profiler's hooks
    device: int  # the number of the GPU, which must be the current one

    def launch(self, *tensors: torch.Tensor) -> Any:
        """Make the buffers and the launches for the tensors among the op's arguments."""
        like = tensors[0]
        made = [like.new_empty(*size, dtype=dtype) for size, dtype in self.made]
        addresses = [*map(_address_of, tensors), *map(_address_of, made)]
        for buffer, offset in self.inside:
            addresses.append(addresses[buffer] + offset)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for run, constants, tuples, take in self.launches:
            given = (stream, *addresses, *constants)
            run(*take((*given, *[take_some(given) for take_some in tuples]) if tuples else given))
        return self.returned(made)

    def places_inside(self, buffers: Sequence[_T]) -> list[tuple[_T, int]]:
        """Return the places inside of buffers, each as the buffer and an offset."""
        return [(buffers[number], offset) for number, offset in self.inside]


class Recording(TorchDispatchMode):
    """A `Recording` notes what is made and launched while it is PyTorch's dispatch mode."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.given = len(tensors)
        self.buffers = list(tensors)  # It keeps all buffers, so that none is made where another one was.
        self.launches: list[tuple[Any, Sequence[Any]]] = []  # with all that they are called with
        self.runtime: Any = None
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        # Of two tensors in one storage an address does not tell which it belongs to.
        self.is_whole = len(set(storages)) == len(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.buffers.append(result)
            self.is_whole &= result.is_contiguous() and result.device == self.buffers[0].device
        elif not getattr(func, "is_view", False) and func is not torch.ops.aten._unsafe_view.default:
            self.is_whole = False
        return result

    def note(self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Note a launch of a compiled kernel, with all of its arguments."""
        self.launches.append(_without_python(compiled.run, call_of(compiled, grid, _STREAM, args)))

    def _place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the number of the buffer that a tensor lies in, and the bytes behind its beginning."""
        storage = tensor.untyped_storage().data_ptr()
        for i, buffer in enumerate(self.buffers):
            if storage != 0 and buffer.untyped_storage().data_ptr() == storage:
                return i, tensor.data_ptr() - buffer.data_ptr()
        self.is_whole = False  # It has no memory, or is neither an argument nor made here.
        return 0, 0

    def record(self, result: Any) -> Record | str:
        """Return the record of a run with this result, or what stands in its place if the run did more than launch."""
        made = self.buffers[self.given :]
        places = [self._place_of(tensor) for _, call in self.launches for tensor in _tensors_in(call)]
        inside = sorted({place for place in places if place[1]})
        launches = [self._launch(run, call, inside) for run, call in self.launches]
        returned = _returned(made, result)
        if returned is None or not self.is_whole:
            return _MORE_THAN_LAUNCHES
        sizes = [(tuple(x.shape) or ((),), x.dtype) for x in made]
        device = torch.cuda.current_device()
        return Record(tuple(sizes), tuple(inside), tuple(launches), returned, self.runtime, device)

    def _launch(self, run: Callable[..., None], call: Sequence[Any], inside: list[tuple[int, int]]) -> Launch:
        """Return a launch that is called as in `call`, in which tensors stand for their addresses."""
        begin = 1 + len(self.buffers) + len(inside)  # of the constants, behind the stream and the addresses
        constants: list[Any] = []

        def number(arg: Any) -> int:
            if arg is _STREAM:
                return 0
            if isinstance(arg, torch.Tensor):
                buffer, offset = self._place_of(arg)
                return 1 + (len(self.buffers) + inside.index((buffer, offset)) if offset else buffer)
            if isinstance(arg, tuple) and _tensors_in(arg):  # a tuple in a tuple
                self.is_whole = False
            constants.append(arg)
            return begin + len(constants) - 1

        is_split = [isinstance(arg, tuple) and bool(_tensors_in(arg)) for arg in call]
        tuples = [taker(tuple(map(number, arg))) for arg, split in zip(call, is_split, strict=True) if split]
        whole = iter([number(arg) for arg, split in zip(call, is_split, strict=True) if not split])
        split_ones = iter(range(begin + len(constants), begin + len(constants) + len(tuples)))
        take = taker(tuple([next(split_ones if split else whole) for split in is_split]))
        return Launch(run, tuple(constants), tuple(tuples), take)


def _form(args: Sequence[Any]) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the form of an op's arguments and the tensors among them; the form is None if no record can have it."""
    types = tuple(map(type, args))
    places = _places(types)
    if places is None:
        return None, ()
    tensors = places.tensors_of(args)
    form = [types, torch.cuda.current_device(), places.options_of(args), *form_of(tensors)]
    for i in places.lists:
        if not _are_options(args[i]):
            return None, ()
        form.append((*args[i], *map(type, args[i])))  # 1 is not 1.0 to a kernel
    return tuple(form), tensors


def form_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the form of tensors: their sizes, strides, dtypes, devices, and where they begin within 16 bytes."""
    form = [*map(_form_of, tensors), *map(_strides_of, tensors)]
    if reduce(or_, map(_address_of, tensors)) & 15:
        form.append(tuple([tensor.data_ptr() & 15 for tensor in tensors]))
    return form


def _tensors_in(args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among some arguments and in tuples among them."""
    found: list[torch.Tensor] = []
    for arg in args:
        found += [arg] if isinstance(arg, torch.Tensor) else _tensors_in(arg) if isinstance(arg, tuple) else []
    return found


def _returned(made: list[torch.Tensor], result: Any) -> Callable[[list[torch.Tensor]], Any] | None:
    """Return the function that picks out of the buffers that were made what an op returns; None if there is none."""
    results = list(result) if isinstance(result, (list, tuple)) else [] if result is None else [result]
    # By what they show: a function such as `empty_like` hands on another object than the mode has seen.
    numbers = [next((i for i, buffer in enumerate(made) if _shows(each) == _shows(buffer)), -1) for each in results]
    if -1 in numbers:
        return None
    if result is None:
        return lambda made: None
    if isinstance(result, list) and numbers == list(range(len(made))):
        return lambda made: made
    if isinstance(result, (list, tuple)):
        kind = type(result)
        return lambda made: kind([made[i] for i in numbers])
    return itemgetter(numbers[0])


def _shows(x: Any) -> Any:
    """Return what two tensors are equal by: the memory that they show, and how."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if type(x) is torch.Tensor else x


def call_of(compiled: Any, grid: tuple[int, ...], stream: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the `run` of a compiled kernel is called with, without a profiler's hooks."""
    return *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *args


def _without_python(run: Callable[..., Any], call: Sequence[Any]) -> tuple[Callable[..., None], Sequence[Any]]:
    """Return the compiled function in which the `run` of a kernel ends, and what it is called with for this `call`.

    The launcher in between is Python, which makes memory for kernels that ask for some and hands on all else: for the
    others it comes to the same call each time. Return `run` and `call` if the launcher is of another kind.
    """
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1) or not hasattr(run, "launch"):
        return run, call
    ends: list[tuple[Any, ...]] = []
    launcher: Any = copy.copy(run)
    launcher.launch = lambda *args: ends.append(args)
    launcher(*call)
    is_nested = any(isinstance(item, tuple) for arg in ends[0] if isinstance(arg, tuple) for item in arg)
    return (run, call) if is_nested else (run.launch, ends[0])


def note_launch(compiled: Any, grid: tuple[int, ...], args: Sequence[Any], runtime: Any) -> None:
    """Tell the recordings that are under way, if there are any, of a launch; `compiled` is None if a record cannot make
    it."""
    recorder = recording()
    if recorder is not None:
        recorder.fail("a kernel was launched outside of an op")
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    if not isinstance(mode, Recording):
        return
    mode.runtime = runtime
    if compiled is None:
        mode.is_whole = False
    else:
        mode.note(compiled, grid, args)


def has_hooks(runtime: Any) -> bool:
    """Return whether a profiler has hooked launches; an empty chain of hooks, as newer Tritons have it, is none."""
    hook = None if runtime is None else runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


class _Places(NamedTuple):
    """A `_Places` says what is where among the arguments of an op."""

    tensors_of: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    options_of: Taker
    lists: tuple[int, ...]


@lru_cache(maxsize=4096)
def _places(types: tuple[type, ...]) -> _Places | None:
    """Return the places of arguments of these types; None if the op has no tensor, or takes something of another
    type."""
    if not set(types) <= {*TENSOR_CLASSES, *_OPTIONS, list, tuple}:
        return None
    tensors, options, lists = [
        tuple([i for i, kind in enumerate(types) if kind in kinds])
        for kinds in (TENSOR_CLASSES, _OPTIONS, (list, tuple))
    ]
    return _Places(taker(tensors), taker(options), lists) if tensors else None


def taker(places: tuple[int, ...]) -> Taker:
    """Return a function that takes what is at these places out of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda args: (args[places[0]],)) if places else lambda args: ()


def _are_options(values: Sequence[Any]) -> bool:
    return all(type(value) in _OPTIONS for value in values)


_address_of = torch.Tensor.data_ptr
_strides_of = torch.Tensor.stride
_form_of = attrgetter("shape", "dtype", "device")
