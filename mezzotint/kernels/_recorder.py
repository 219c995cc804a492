"""Calls, recorded: a `Recorder` notes which calls a function makes on tensors, and writes a function that makes them
again with other tensors of the same form.

The calls are those of PyTorch and those of this package's ops. Between them a function works out sizes, picks
backends, and takes quantized tensors apart and puts them together. All that depends on the form of the tensors (sizes,
strides, dtype, device) and on constants alone, so it comes to the same calls each time. What does not is noticed: code
that reads a value out of a tensor, or a tensor that is neither given nor made on the way, cannot be recorded.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

# Functions whose results follow from the form of a tensor.
_QUESTIONS = {
    "__get__",
    "__len__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "nelement",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
}
_VIEWS = {"__getitem__", "detach", "reshape", "t", "view"}  # they write nothing
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, Enum)


class Recorder(TorchFunctionMode):
    """A `Recorder` notes the calls of a thread while it is PyTorch's function mode. `tensors` are those that the
    function is given. One of them may come twice, if it does so in each call of what is written."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.names: dict[int, tuple[Any, str]] = {}  # a weak reference and a name, by the tensor's id
        self.count = 0  # of names
        self.lines: list[tuple[str, list[str], bool]] = []  # a call, the names in it, and whether it only makes views
        self.globals: dict[str, Any] = {}
        self.used: list[str] = []  # the names in the line that is being written
        self.given = [self._name(x) if self._known(x) is None else f"again{i}" for i, x in enumerate(tensors)]
        self.missing: str | None = None  # why no function can be written
        self.runtime: Any = None  # Triton's settings, if a kernel is launched
        self.device: int | None = None  # the number of the GPU where it is launched
        self.launches = False
        self.kept: Any = None  # what an autograd function keeps for backward
        self.is_in_op = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def fail(self, reason: str) -> None:
        """Say why no function can be written; the first reason stays."""
        self.missing = self.missing or reason

    def run_op(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run the code of an op, and note it as one call, or as the launches that it makes."""
        with torch._C.DisableTorchFunction():
            self.is_in_op = True
            try:
                result = run(*args)
            finally:
                self.is_in_op = False
            find_record = getattr(run, "record_of", None)
            record = None if find_record is None else find_record(args)
            if record is None:
                self.note(run, args, {}, result)
            else:
                self._note_launches(record, [arg for arg in args if isinstance(arg, torch.Tensor)], result)
        return result

    def _note_launches(self, record: Any, tensors: Sequence[torch.Tensor], result: Any) -> None:
        """Note the launches of a `Record` as they are made for the tensors that an op was given, and for the buffers
        that it makes."""
        self.runtime, self.device, self.launches = record.runtime, record.device, True
        buffers = [self._text(tensor) for tensor in tensors]
        like, made, self.used = buffers[0], [], []
        for size, dtype in record.made:
            made.append(self._new_name())
            self.used = [like, made[-1]]
            self._end_line(
                f"{made[-1]} = {like}.new_empty({', '.join(map(repr, size))}, dtype={self._constant(dtype)})"
            )
        buffers += made
        addresses = [f"{name}.data_ptr()" for name in buffers]
        addresses += [f"{name}.data_ptr() + {offset}" for name, offset in record.places_inside(buffers)]
        for run, constants, tuples, take in record.launches:
            given = ("stream", *addresses, *map(self._constant, constants))
            split = [f"({', '.join(take_some(given))}, )" for take_some in tuples]
            call = f"{self._constant(run)}({', '.join(take((*given, *split)))})"
            self.used = [name for name in buffers if f"{name}." in call]
            self._end_line(call)
        names = record.returned(made)
        results = result if isinstance(result, (list, tuple)) else [] if result is None else [result]
        for tensor, name in zip(results, [names] if isinstance(names, str) else names or [], strict=True):
            self.names[id(tensor)] = ref(tensor), name

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call and its result."""
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled":  # what is written is called without gradients
            return
        made = list(result) if isinstance(result, (list, tuple)) else [] if result is None else [result]
        if not all(isinstance(each, torch.Tensor) for each in made):
            if name not in _QUESTIONS:
                self.fail(f"{func} returned {type(result).__name__}")
            return
        if torch.is_grad_enabled() and any(each.requires_grad for each in made):
            self.fail(f"autograd follows {func}")
        given = [self._text(arg) for arg in args] + [f"{key}={self._text(arg)}" for key, arg in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(given)})"
        names = [self._name(each) for each in made]
        if names:
            call = f"{', '.join(names)}{',' if isinstance(result, (list, tuple)) else ''} = {call}"
        elif not any(isinstance(arg, (torch.Tensor, list, tuple)) for arg in args):
            self.fail(f"{func} changes no tensor")
        self._end_line(call, name in _VIEWS)

    def _end_line(self, line: str, is_view: bool = False) -> None:
        self.lines.append((line, self.used, is_view))
        self.used = []

    def _known(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor, or None if it has none. (Of a tensor that is gone another one may have the id.
        That tensors are not kept here leaves the peak of memory as it is.)"""
        found, name = self.names.get(id(tensor), (None, None))
        return name if found is not None and found() is tensor else None

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor, which is a new one if the tensor is new."""
        name = self._known(tensor)
        if name is None:
            name = self._new_name()
            self.names[id(tensor)] = ref(tensor), name
        self.used.append(name)
        return name

    def _new_name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def _text(self, value: Any) -> str:
        """Return the expression for an argument or a result."""
        if isinstance(value, torch.Tensor):
            if self._known(value) is None:
                self.fail(f"a tensor of shape {tuple(value.shape)} comes from elsewhere")
            return self._name(value)
        if type(value) in (list, tuple):
            items = "".join([f"{self._text(item)}, " for item in value])
            return f"[{items}]" if type(value) is list else f"({items})"
        if not isinstance(value, (*_CONSTANTS, torch.Size, slice)):
            self.fail(f"{type(value).__name__} is no constant")
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.globals)}"
        self.globals[name] = value
        return name

    def function(self, result: Any) -> Callable[..., Any] | None:
        """Return a function that makes the calls again, with tensors such as were given, and returns what stands in the
        place of `result`: a tensor, None, or a tuple of these. Return None if there is none; `missing` says why."""
        self._end_line(f"return {self._text(result)}")
        if self.missing is not None:
            return None
        # A tensor is let go after its last use; those that were given the caller holds.
        known = set(self.given)
        code: list[str] = []
        for line, used, is_view in reversed(self.lines):
            if is_view and used[-1] not in known:  # nobody reads the view
                continue
            over = sorted({*used} - known)
            known.update(over)
            code += [f"    del {', '.join(over)}"] if over and code else []
            code.append(f"    {line}")
        if self.launches:
            code.append(f"    stream = {self._constant(torch._C._cuda_getCurrentRawStream)}({self.device})")
        code.append(f"def again({', '.join(self.given)}):")
        code.reverse()
        exec(compile("\n".join(code), "<recorded calls>", "exec"), self.globals)
        return self.globals.pop("again")


def noted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the code of an op as it is, or, while the calls of this thread are recorded, such that its call is
    noted."""
    recorder = recording()
    if recorder is None:
        return run
    return lambda *args: recorder.run_op(run, *args)


def recording() -> Recorder | None:
    """Return the recorder of this thread, or None."""
    mode = _get_current_function_mode() if torch._C._len_torch_function_stack() else None
    return mode if isinstance(mode, Recorder) and not mode.is_in_op else None
