"""The ops of one quantization: they quantize a tensor, into new or given buffers, or what a producer would write.

A norm, an activation or its backward in front of a GEMM (a source) need not write its result in high precision: the
quantization takes the producer in. `name_of_<source>` has the source's arguments in the place of `x`. Its result is,
bit for bit, that of the two ops one after the other: the producer's result is rounded to its dtype in between.

`name_groups` does the same to each of many tensors, in as many launches as one tensor takes if the format can do that.
An option that is a tensor in the call for one tensor is a list there, empty if nothing is given.

`name_unpacked` writes, of the directions that its last option names, the values that a product reads instead of codes.
Where a GPU has no product of a format, BF16 tensor cores multiply these values: an operand that nobody keeps need not
be written as codes, read and written again.

On CUDA a launch whose file says TAKES_SOURCES reads the producer's arguments (`SourceCall`) where it would read x. For
the others, and where Triton does not run, the producer's own op writes x first.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from mezzotint import hw
from mezzotint.constants import FP8_TORCH
from mezzotint.formats import KINDS
from mezzotint.kernels._lib import (
    Buffers,
    Late,
    define,
    holds_launches,
    in_memory,
    is_bare,
    launch_in_graphs,
    load_triton,
)
from mezzotint.kernels._recorder import noted
from mezzotint.kernels._relaunch import Relaunched
from mezzotint.kernels.activation import (
    activation_backward,
    activation_backward_reference,
    activation_forward,
    activation_forward_reference,
    column_sum,
    is_gated,
)
from mezzotint.kernels.delayed import delayed_saw_reference
from mezzotint.kernels.norm import norm_apply, norm_apply_reference
from mezzotint.tracing import eager_only

__all__ = ["SOURCES", "SourceCall", "Unpacking", "entering", "fused", "of_groups", "quantize_ops", "unpacking_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """A `Source` is a producer: it holds the producer's arguments, their number, its reference, its op and the shape of
    its result. With `sums` its last argument requests column sums, too."""

    arguments: str
    count: int
    make: Callable[..., torch.Tensor]
    op: torch._ops.OpOverload
    shape: Callable[..., tuple[int, ...]]
    sums: bool = False


def _forward_shape(x: torch.Tensor, bias: Any, name: str, params: Any, scales: Any) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2 if is_gated(name) else x.shape[-1])


SOURCES = {
    "norm": Source(
        arguments="Tensor x, Tensor mu, Tensor rs, Tensor gamma, Tensor? beta, bool zero_centered, bool rms",
        count=7,
        make=norm_apply_reference,
        op=norm_apply,
        shape=lambda x, *_: tuple(x.shape),
    ),
    "activation": Source(
        arguments="Tensor x, Tensor? bias, str name, float[] params, Tensor? scales",
        count=5,
        make=activation_forward_reference,
        op=activation_forward,
        shape=_forward_shape,
    ),
    "activation_backward": Source(
        arguments="Tensor dy, Tensor x, Tensor? bias, str name, float[] params, Tensor? scales, ScalarType? sums",
        count=7,
        make=activation_backward_reference,
        op=activation_backward,
        shape=lambda dy, x, *_: tuple(x.shape),
        sums=True,
    ),
}


@dataclass(frozen=True, slots=True)
class SourceCall:
    """A `SourceCall` stands for the tensor that a source would make of its arguments. The column sums of that tensor
    are written to `sums`, in the dtype of `sums`."""

    source: str
    args: tuple[Any, ...]
    sums: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.args[0].device

    @property
    def shape(self) -> tuple[int, ...]:
        return SOURCES[self.source].shape(*self.args)

    def tensor(self) -> torch.Tensor:
        """Make the tensor by the source's own op, write its column sums, and return it."""
        made = SOURCES[self.source].op(*self.args)
        if self.sums is not None:
            self.sums.copy_(column_sum(made, self.sums.dtype))
        return made


# This maps a quantization and a source to the op that does both.
_FUSED: dict[torch._ops.OpOverload, dict[str, torch._ops.OpOverload]] = {}


def fused(op: torch._ops.OpOverload, source: str) -> torch._ops.OpOverload:
    """Return the op that quantizes what `source` makes, as `op` quantizes a tensor."""
    return _FUSED[op][source]


# This maps a quantization to the op that does it to many tensors.
_GROUPS: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}


def of_groups(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the op that quantizes each of many tensors as `op` does one, and returns the buffers tensor by tensor."""
    return _GROUPS[op]


# How a launch that the compiler makes itself writes codes. With None the compiler makes none.
InGraphs = Literal["bytes", "fp8"] | None

ROWWISE, COLUMNWISE = 1, 2  # the directions in the option `unpacked`, which add up


@dataclass(frozen=True, slots=True)
class Unpacking:
    """An `Unpacking` says which values stand in an unpacked direction of a format: those that `OperandKind.exact`
    reads out of its codes, in BF16, which must hold them exactly."""

    kind: str  # of its operands
    values: Callable[..., torch.Tensor]  # (buffers by name, "rowwise" or "columnwise", *options) → the values


# This maps a quantization to its form that unpacks.
_UNPACKED: dict[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Unpacking]] = {}


def unpacking_of(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, Unpacking] | None:
    """Return the op that quantizes as `op` does and unpacks, and what it writes; None if the format has none."""
    return _UNPACKED.get(op)


def _unpacked_names(buffers: Mapping[str, Any], unpacked: int) -> list[tuple[str, str]]:
    """Return (direction, name of its codes) of the directions that are `unpacked`, among those that are made."""
    flags = {"rowwise": ROWWISE, "columnwise": COLUMNWISE}
    names = [(direction, f"{direction}_data") for direction, flag in flags.items() if unpacked & flag]
    return [(direction, name) for direction, name in names if name in buffers]


def quantize_ops(
    name: str,
    options: str,
    *,
    geometry: Callable[..., Buffers],
    reference: Callable[..., "list[torch.Tensor]"],
    cuda: str | None,
    cuda_groups: str | None = None,
    cuda_enter: str | None = None,
    in_graphs: InGraphs = None,
    unpacking: Unpacking | None = None,
) -> "tuple[torch._ops.OpOverload, torch._ops.OpOverload]":
    """Define `name(x, options) -> buffers` and its in-place form `name_(x, buffers, noop, options)`, and return both.
    `fused`, `of_groups` and `unpacking_of` find the other ops that are defined with them.

    `geometry(shape, *options)` describes every buffer, for the fake and for the real allocation. `reference(x,
    *options)` returns new buffers. The launch, `cuda`, writes into given ones: `launch(x, out, noop, *options)`;
    nothing is written if the one-element `noop` is 1. The launch for many tensors, `cuda_groups`, takes lists:
    `launch(xs, outs, *options)`; without it the tensors are quantized one after another. `cuda_enter` is the launch
    that enters the amax, which is the last buffer, into a history (`entering`): `launch(x, out, noop, scale, history,
    slot, *options)`. With `in_graphs` the compiler launches the kernels of `cuda` itself; "fp8" says that all bytes are
    codes of the option `dtype`, which such a launch writes as FP8 (`_made`). With `unpacking` the launch writes values
    wherever a buffer is BF16.
    """
    in_place = _in_place(reference)
    late = Late(cuda, in_place)
    functional = _functional_op(name, options, geometry, reference, late, cuda, in_graphs)
    _GROUPS[functional] = _groups_op(f"{name}_groups", options, _allocation(geometry), reference, late, cuda_groups)
    if cuda_enter is not None:
        enter = _entering(options, geometry, reference, cuda_enter, in_graphs)
        _ENTERING[functional] = enter[0], Relaunched(enter[1])
        _ENTERING_SOURCES[functional] = _of_source(enter[0]), Relaunched(_of_source(enter[1]))
    if unpacking is not None:
        _UNPACKED[functional] = _unpacked_op(name, options, geometry, reference, cuda, in_graphs, unpacking), unpacking
    schema = f"{name}_(Tensor x, Tensor(a!)[] out, Tensor? noop, {options}) -> ()"
    return functional, define(schema, lambda x, out, noop, *args: None, in_place, late)


# This maps a quantization by a given scale to the functions that enter the amax, on a CPU and on CUDA.
_ENTERING: dict[torch._ops.OpOverload, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_ENTERING_SOURCES: dict[torch._ops.OpOverload, tuple[Callable[..., Any], Callable[..., Any]]] = {}


@eager_only()
def entering(
    op: torch._ops.OpOverload, x: torch.Tensor, is_source: bool = False
) -> Callable[..., "list[torch.Tensor]"] | None:
    """Return the function that quantizes as `op` does and raises row 0 of a history (L, n) to the amax, instead of
    returning that: `enter(x, scales, slot, history, *options)`, with scales [n]. Without a history no amax is taken.

    It is None but in plain eager code and in graphs that hold launches. Elsewhere there must be an op, and none does
    this: the compiler takes no op that writes an argument and returns a list. If `is_source`, the function quantizes
    what a source makes of arguments whose first is `x`, as `_of_source` says; graphs hold no launches of those.
    """
    cpu, cuda = (_ENTERING_SOURCES if is_source else _ENTERING)[op]
    if type(x) is FunctionalTensor:
        return cuda if not is_source and holds_launches(x) else None
    if not is_bare(x) or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
        return None
    return noted(cpu if x.is_cpu else cuda)


def _entering(
    options: str,
    geometry: Callable[..., Buffers],
    reference: Callable[..., "list[torch.Tensor]"],
    cuda: str,
    in_graphs: InGraphs,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that enter the amax, on a CPU and on CUDA."""
    fp8_at = _place_of_fp8(options, in_graphs)

    def no_amax(shape: tuple[int, ...], *options: Any) -> Buffers:
        buffers = geometry(shape, *options)
        buffers.popitem()
        return buffers

    def on_cpu(x: Any, scales: torch.Tensor, slot: int, history: Any, *options: Any) -> list[torch.Tensor]:
        x = x.tensor() if isinstance(x, SourceCall) else x
        *buffers, amax = reference(x, scales[slot : slot + 1], *options)
        if history is not None:
            delayed_saw_reference(history, [amax], [slot])
        return buffers

    def on_cuda(x: Any, scales: torch.Tensor, slot: int, history: Any, *options: Any) -> list[torch.Tensor]:
        like = x.args[0] if isinstance(x, SourceCall) else x

        def launch(out: list[torch.Tensor]) -> None:
            late.on(x)(in_memory(x), out, None, scales, slot, history, *options)

        return _made(like, tuple(x.shape), no_amax, (scales, *options), launch, fp8_at)

    def in_place(x: Any, out: list[torch.Tensor], noop: None, *args: Any) -> None:
        for buffer, fresh in zip(out, on_cpu(x, *args), strict=True):
            buffer.copy_(fresh)

    late = Late(cuda, in_place)
    return on_cpu, on_cuda


def _of_source(enter: Callable[..., "list[torch.Tensor]"]) -> Callable[..., "list[torch.Tensor]"]:
    """Return `enter` for what a source makes. It takes the fields of a `SourceCall` with the number of its arguments,
    which come last but for the options: a record of launches knows tensors and plain values alone."""

    def enter_source(
        source: str,
        count: int,
        sums: torch.Tensor | None,
        scales: torch.Tensor,
        slot: int,
        history: torch.Tensor | None,
        *rest: Any,
    ) -> list[torch.Tensor]:
        return enter(SourceCall(source, rest[:count], sums), scales, slot, history, *rest[count:])

    return enter_source


def _allocation(geometry: Callable[..., Buffers]) -> Callable[..., "list[torch.Tensor]"]:
    """Return the function that allocates the buffers of x with these options."""
    return lambda x, *args: _empty(x, tuple(x.shape), geometry, args)


def _in_place(reference: Callable[..., "list[torch.Tensor]"]) -> Callable[..., None]:
    """Return the reference as a function that writes into given buffers."""

    def in_place(x: torch.Tensor, out: list[torch.Tensor], noop: torch.Tensor | None, *args: Any) -> None:
        if noop is not None and noop.item() == 1.0:
            return
        for buffer, fresh in zip(out, reference(x, *args), strict=True):
            buffer.copy_(fresh)

    return in_place


def _functional_op(
    name: str,
    options: str,
    geometry: Callable[..., Buffers],
    reference: Callable[..., "list[torch.Tensor]"],
    late: Late,
    cuda: str | None,
    in_graphs: InGraphs,
) -> torch._ops.OpOverload:
    """Define the op that returns new buffers, and those that take a source in."""
    fp8_at = _place_of_fp8(options, in_graphs)

    def on_cuda(x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        def launch(out: list[torch.Tensor]) -> None:
            late.on(x)(x, out, None, *args)

        return _made(x, tuple(x.shape), geometry, args, launch, fp8_at)

    def made_on_cuda(made: SourceCall, out: list[torch.Tensor], *args: Any) -> None:
        late(made if _takes_sources(cuda) else made.tensor(), out, None, *args)

    functional = define(f"{name}(Tensor x, {options}) -> Tensor[]", _allocation(geometry), reference, on_cuda)
    if in_graphs is not None:
        launch_in_graphs(functional)
    _FUSED[functional] = {
        key: _fused_op(f"{name}_of_{key}", options, key, geometry, reference, made_on_cuda) for key in SOURCES
    }
    return functional


def _unpacked_op(
    name: str,
    options: str,
    geometry: Callable[..., Buffers],
    reference: Callable[..., "list[torch.Tensor]"],
    cuda: str | None,
    in_graphs: InGraphs,
    unpacking: Unpacking,
) -> torch._ops.OpOverload:
    """Define the op that unpacks, with the directions to unpack as its last option."""

    def unpacked_geometry(shape: tuple[int, ...], *args: Any) -> Buffers:
        found, (count, width) = geometry(shape, *args[:-1]), KINDS[unpacking.kind].packed
        for _, name in _unpacked_names(found, args[-1]):
            size = found[name][0]
            *leading, groups = size if width == 1 else size[:-1]  # several bytes are a last dimension
            found[name] = (*leading, groups * count), torch.bfloat16
        return found

    def unpacked_reference(x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        own = args[:-1]
        made = dict(zip(geometry(tuple(x.shape), *own), reference(x, *own), strict=True))
        for direction, name in _unpacked_names(made, args[-1]):
            made[name] = unpacking.values(made, direction, *own)
        return list(made.values())

    late = Late(cuda, _in_place(unpacked_reference))
    schema = f"{name}_unpacked", f"{options}, int unpacked"
    return _functional_op(*schema, unpacked_geometry, unpacked_reference, late, cuda, in_graphs)


def _groups_op(
    name: str,
    options: str,
    allocate: Callable[..., "list[torch.Tensor]"],
    reference: Callable[..., "list[torch.Tensor]"],
    late: Callable[..., None],
    cuda_groups: str | None,
) -> torch._ops.OpOverload:
    """Define `name(xs, options) -> buffers`, tensor by tensor, where an option that is a tensor has become a list."""
    kinds = [option.split()[0] for option in options.split(", ")]
    tensors = sum(kind.startswith("Tensor") for kind in kinds)  # they come first
    listed = ", ".join(
        option.replace("Tensor? ", "Tensor[] ").replace("Tensor ", "Tensor[] ") for option in options.split(", ")
    )

    def each(xs: list[torch.Tensor], args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the op of one tensor, for each tensor."""
        for i, x in enumerate(xs):
            yield x, *[given[i] if given else None for given in args[:tensors]], *args[tensors:]

    def fake(xs: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        return [buffer for own in each(xs, args) for buffer in allocate(*own)]

    def on_cpu(xs: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        return [buffer for own in each(xs, args) for buffer in reference(*own)]

    def one_by_one(xs: list[torch.Tensor], outs: list[list[torch.Tensor]], *args: Any) -> None:
        for (x, *own), out in zip(each(xs, args), outs, strict=True):
            late(x, out, None, *own)

    launch: Callable[..., None] = one_by_one if cuda_groups is None else Late(cuda_groups, one_by_one)

    def on_cuda(xs: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        outs = [allocate(*own) for own in each(xs, args)]
        launch(xs, outs, *args)
        return [buffer for out in outs for buffer in out]

    return define(f"{name}(Tensor[] xs, {listed}) -> Tensor[]", fake, on_cpu, on_cuda)


@cache
def _takes_sources(cuda: str | None) -> bool:
    if cuda is None or not hw.has_triton_kernels():
        return False
    return getattr(sys.modules[load_triton(cuda).__module__], "TAKES_SOURCES", False)


def _place_of_fp8(options: str, in_graphs: InGraphs) -> int | None:
    """Return which of the options names the FP8 type that launches in graphs write; None if they write bytes."""
    if in_graphs != "fp8":
        return None
    return [option.split()[1] for option in options.split(", ")].index("dtype")


def _made(
    like: torch.Tensor,
    shape: tuple[int, ...],
    geometry: Callable[..., Buffers],
    args: Sequence[Any],
    launch: Callable[[list[torch.Tensor]], None],
    fp8_at: int | None,
) -> list[torch.Tensor]:
    """Make the buffers of a tensor like `like`, have `launch` write them, and return them.

    In a graph the launch writes FP8, of the type that the option at `fp8_at` names, and the bytes that are returned are
    views of it. A product views them as FP8 again, so that the compiler leaves out both views. If the launch wrote
    bytes, each run would view them as FP8, by a call through PyTorch's dispatcher for each operand of a product.
    """
    if fp8_at is None or type(like) is not FunctionalTensor:
        out = _empty(like, shape, geometry, args)
        launch(out)
        return out
    fp8 = FP8_TORCH[args[fp8_at]]
    buffers = geometry(shape, *args).values()
    out = [like.new_empty(size, dtype=fp8 if dtype is torch.uint8 else dtype) for size, dtype in buffers]
    launch(out)
    return [buffer.view(torch.uint8) if buffer.dtype is fp8 else buffer for buffer in out]


def _empty(like: torch.Tensor, shape: tuple[int, ...], geometry: Callable[..., Buffers], args: Any) -> Any:
    # PyTorch takes a third more time to read sizes out of a tuple.
    return [
        like.new_empty(*size, dtype=dtype) if size else like.new_empty((), dtype=dtype)
        for size, dtype in geometry(shape, *args).values()
    ]


def _fused_op(
    name: str,
    options: str,
    key: str,
    geometry: Callable[..., Buffers],
    reference: Callable[..., "list[torch.Tensor]"],
    launch: Callable[..., None],
) -> torch._ops.OpOverload:
    """Define the op that returns the buffers of what the source makes. If the source has `sums`, its FP32 column sums
    follow them, in the dtype that is given."""
    source = SOURCES[key]
    count = source.count

    def split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """Return the source's arguments, the dtype of the sums, and the options."""
        return args[: count - source.sums], args[count - 1] if source.sums else None, args[count:]

    def fake(*args: Any) -> list[torch.Tensor]:
        given, sums, rest = split(args)
        shape = source.shape(*given)
        buffers = _empty(args[0], shape, geometry, rest)
        if source.sums:
            buffers.append(args[0].new_empty(0 if sums is None else shape[-1], dtype=sums or torch.float32))
        return buffers

    def on_cpu(*args: Any) -> list[torch.Tensor]:
        given, sums, rest = split(args)
        made = source.make(*given)
        buffers = reference(made, *rest)
        if source.sums:
            buffers = [*buffers, made.new_empty(0, dtype=torch.float32) if sums is None else column_sum(made, sums)]
        return buffers

    def on_cuda(*args: Any) -> list[torch.Tensor]:
        given, sums, rest = split(args)
        buffers = fake(*args)
        made = SourceCall(key, given, None if sums is None else buffers[-1])
        launch(made, buffers[:-1] if source.sums else buffers, *rest)
        return buffers

    return define(f"{name}({source.arguments}, {options}) -> Tensor[]", fake, on_cpu, on_cuda)
