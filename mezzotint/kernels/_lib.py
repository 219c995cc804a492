"""How a leaf op is made: schema, fake, CPU reference and, named by string so that Triton loads late, CUDA launch.

`Library.define` + `impl` costs about half of what `torch.library.custom_op` does per call. The op is the boundary that
the compiler does not look into: eager and compiled code run the same bytes through the same kernel.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mezzotint import hw

LIBRARY = torch.library.Library("mezzotint", "DEF")

# What a quantization makes, in order: buffer name → (shape, dtype). Pure ints in and out, symbolic ones too.
Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


def leaf(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: str | None = None,
    tags: Sequence[torch.Tag] = (),
) -> torch._ops.OpOverload:
    """Define `mezzotint::<schema>` and return its overload.

    `cuda` is "module:function" inside `mezzotint.kernels.triton`; without it, and on GPUs that Triton's FP8 casts do
    not reach, the plain-torch reference runs on the CUDA tensors.
    """
    return define(schema, fake, cpu, cpu if cuda is None else Late(cuda, cpu), tags)


def define(
    schema: str,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    if cpu is None:
        raise TypeError(f"leaf op {name!r} needs a CPU reference: it is the specification of the op")
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"mezzotint::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.mezzotint, name).default
    _IMPLEMENTATIONS[op] = (cpu, cuda)
    return op


_IMPLEMENTATIONS: dict[torch._ops.OpOverload, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def run_op(op: torch._ops.OpOverload, *args: Any) -> Any:
    """The op. In plain eager code its implementation itself, which the dispatcher is slower to reach than to run."""
    first = args[0][0] if isinstance(args[0], list) and args[0] else args[0]
    if not is_plain(first) or _has_negative(args):
        return op(*args)
    cpu, cuda = _IMPLEMENTATIONS[op]
    return cuda(*args) if first.is_cuda else cpu(*args)


def write_op(op: torch._ops.OpOverload, written: torch.Tensor, *args: Any) -> None:
    """An op that writes into state, of which autograd knows nothing; the way there is that of `run_op`, whether
    gradients are enabled or not."""
    if is_bare(written):
        cpu, cuda = _IMPLEMENTATIONS[op]
        (cuda if written.is_cuda else cpu)(written, *args)
    else:
        with torch.no_grad():
            op(written, *args)


def is_plain(x: Any) -> bool:
    """Whether nothing stands between a call on `x` and its implementation: no graph, no mode, no transform, no fake."""
    return not torch.is_grad_enabled() and is_bare(x)


def is_bare(x: Any) -> bool:
    """The same but for gradients."""
    return (
        not torch.compiler.is_compiling()  # a graph is made of ops
        and type(x) in _PLAIN
        and (x.is_cuda or x.is_cpu)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _has_negative(args: Sequence[Any]) -> bool:
    """Whether a tensor is the negative of what its memory holds (`z.conj().imag`), which the dispatcher makes plain."""
    for arg in args:  # a loop over types: this runs in front of every kernel
        kind = type(arg)
        if kind in _PLAIN:
            if arg.is_neg():
                return True
        elif kind is list and _has_negative(arg):
            return True
    return False


class Late:
    """A CUDA implementation that is imported when it is first called."""

    def __init__(self, target: str, reference: Callable[..., Any]) -> None:
        self.target, self.reference = target, reference
        self.launch: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.launch is None:
            self.launch = load_triton(self.target) if hw.has_triton_kernels() else self.reference
        device = (args[0][0] if isinstance(args[0], list) else args[0]).device.index
        if device == torch.cuda.current_device():
            return self.launch(*args)
        with torch.cuda.device(device):  # Triton launches on the current device, whatever its arguments
            return self.launch(*args)


def load_triton(target: str) -> Callable[..., Any]:
    """Import "module:function" from the Triton kernels."""
    module, function = target.split(":")
    return getattr(importlib.import_module(f"mezzotint.kernels.triton.{module}"), function)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """The 2-D view (M, K) of a tensor of any rank; a vector is one row."""
    return x if x.dim() == 2 else x.reshape(_leading(x.shape), x.shape[-1])


def as_columns(data: torch.Tensor) -> torch.Tensor:
    """The 2-D view (K, M) of a column-wise copy (K, d0, …, dn-1)."""
    return data if data.dim() == 2 else data.reshape(data.shape[0], _leading((*data.shape[1:], 1)))


def padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """A matrix with zeros up to (rows, cols); itself where there is nothing to add."""
    if x.shape[0] == rows and x.shape[1] == cols:
        return x
    return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def _leading(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a logical shape."""
    return _leading(shape), shape[-1]
