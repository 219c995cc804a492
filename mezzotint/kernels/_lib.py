"""Leaf ops: this module registers an op's schema, fake, CPU reference and CUDA launch.

The launch is named by a string, so that Triton is imported only when the launch is first called. `Library.define` +
`impl` costs about half of what `torch.library.custom_op` does per call. The op is the boundary that the compiler does
not look into: eager and compiled code run the same bytes through the same kernel.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from mezzotint import hw
from mezzotint.kernels._recorder import noted
from mezzotint.kernels._relaunch import TENSOR_CLASSES, Relaunched
from mezzotint.tracing import eager_only, traced_as

LIBRARY = torch.library.Library("mezzotint", "DEF")

# The buffers that a quantization writes, in order: name → (shape, dtype). Sizes are ints, or symbolic ones.
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

    `cuda` is "module:function" inside `mezzotint.kernels.triton`. Without it, and on GPUs that Triton's FP8 casts do
    not support, the plain-torch reference `cpu` runs on the CUDA tensors.
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
    _IMPLEMENTATIONS[op] = (cpu, cuda if cuda is cpu else Relaunched(cuda))
    return op


def composite(schema: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define an op that is made of other ops, which the compiler sees in its place, and return its overload."""
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    op = getattr(torch.ops.mezzotint, name).default
    _COMPOSITES[op] = function
    return op


def leaf_references() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the CPU reference of each leaf op that has been defined so far."""
    return {op: cpu for op, (cpu, _) in _IMPLEMENTATIONS.items()}


def composites() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the Python function behind each op that `composite` defined."""
    return dict(_COMPOSITES)


def launch_in_graphs(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Make the compiler launch the op's Triton kernels itself, and return the op. A graph on CUDA then holds the
    launches of the op's CUDA code in place of the op. (`torch.library.triton_op` does the same, but for an op without a
    reference.)

    The op stays an op while sizes are dynamic, because which kernels run depends on the sizes, and in `torch.export`.
    All our launches keep products and sums apart (`enable_fp_fusion=False`), which the compiler cannot be told to do:
    so the kernels of such an op must have no product and sum that could be fused
    (`tests/kernels/test_triton_ahead.py`). The compiler may move a launch whose result only backward reads into
    backward.
    """
    reference, launch = _IMPLEMENTATIONS[op]

    def decompose(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if not is_pure and _is_decomposed(op):
            with mode:
                return reference(*args)
        is_plain = all(kind in (torch.Tensor, FunctionalTensor) for kind in types)
        if not (is_plain and holds_launches(args[0], mode)):
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        with mode:
            return _run_once(mode, op, launch, args) if is_pure else launch(*args)

    is_pure = not op._schema.is_mutable
    LIBRARY._register_torch_dispatch_rule(op._opname, FunctionalTensorMode, decompose)
    return op


def holds_launches(x: torch.Tensor, mode: Any = None) -> bool:
    """Return whether the graph that is traced, of which x is a tensor, holds launches in place of ops on x. `mode` is
    the one that makes the graph functional, if it is not on at the moment."""
    mode = mode or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return _runs_launches(x) and not mode.export and all(type(size) is int for size in x.shape)


def _runs_launches(x: torch.Tensor) -> bool:
    """Return whether ops on x run their Triton kernels."""
    return x.is_cuda and hw.has_triton_kernels()


def in_memory(x: Any) -> Any:
    """Return `x`, in a graph such that the compiler writes it once, however many launches read it."""
    if type(x) is not FunctionalTensor:
        return x
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return _in_memory(x, _identity(x.from_functional()), vars(mode).setdefault("mezzotint_made", {}))


def once_in_graphs(launch: Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """Return `launch`, which only computes. For an x in a graph, calls that read the same memory run it once. As with
    `callee`, the caller makes the call."""
    if not isinstance(x, FunctionalTensor):
        return launch
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return lambda *args: _run_once(mode, launch, launch, args)


def _run_once(mode: Any, name: Any, launch: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run `launch`, or return what it gave for the same memory in this graph, as the compiler does with equal ops:
    linears that read one tensor then quantize it once."""
    made: dict[Any, Any] = vars(mode).setdefault("mezzotint_made", {})
    inner = [arg.from_functional() if isinstance(arg, FunctionalTensor) else arg for arg in args]
    keys = [_identity(arg) for arg in inner]
    if (name, *keys) not in made:
        result = launch(*[_in_memory(arg, key, made) for arg, key in zip(args, keys, strict=True)])
        made[name, *keys] = result, inner  # `inner` keeps alive the storages that are in the keys
    return made[name, *keys][0]


def _identity(arg: Any) -> Any:
    """Return what an argument is equal by: a tensor by the memory that it shows, so that two views of it are equal."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return arg.untyped_storage()._cdata, arg.storage_offset(), arg.shape, arg.stride(), arg.dtype


def _in_memory(arg: Any, key: Any, made: dict[Any, Any]) -> Any:
    """Return a tensor such that the compiler writes it once, however many launches read it. It writes a copy of a view
    for each launch that reads the view, except for `as_strided`, whose input it has in memory."""
    is_whole = isinstance(arg, FunctionalTensor) and arg.numel() * arg.element_size() == arg.untyped_storage().nbytes()
    if not is_whole:
        return arg
    if key not in made:
        made[key] = arg.as_strided(arg.shape, arg.stride())
    return made[key]


def _is_decomposed(op: torch._ops.OpOverload) -> bool:
    """Return whether a program is being written in PyTorch's operators (`dynamo/decompositions.py`). An op that writes
    is made one that does not before PyTorch asks the table, and then would stay."""
    from torch.fx.experimental import proxy_tensor  # it imports SymPy

    # torch 2.11 has one table for all modes.
    table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
    return op in getattr(proxy_tensor.get_proxy_mode(), "decomposition_table", table)


_IMPLEMENTATIONS: dict[torch._ops.OpOverload, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_COMPOSITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_count_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def run_op(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run the op. In plain eager code this calls its implementation directly, because the dispatcher takes longer to
    reach it than it takes to run."""
    first = args[0][0] if isinstance(args[0], list) and args[0] else args[0]
    if not is_plain(first) or _has_negative(args):
        return op(*args)
    cpu, cuda = _IMPLEMENTATIONS[op]
    return noted(cuda if first.is_cuda else cpu)(*args)


@traced_as(lambda op, x: op)
def callee(op: torch._ops.OpOverload, x: torch.Tensor) -> Callable[..., Any]:
    """Return the callable that runs the op on `x`: in plain eager code (`is_bare`), and if x has no gradient, the
    implementation itself (on CUDA one that makes recorded launches), else the op. Only `x` is looked at: the op's other
    tensors must be made by this package. The caller makes the call, so that no frame stands between the two on the
    stack."""
    if not is_bare(x) or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
        return op
    cpu, cuda = _IMPLEMENTATIONS[op]
    return noted(cpu if x.is_cpu else cuda)


def write_op(op: torch._ops.OpOverload, written: torch.Tensor, *args: Any) -> Any:
    """Run an op that writes into state, of which autograd knows nothing. As in `run_op` plain eager code calls the
    implementation directly, whether gradients are enabled or not."""
    if is_bare(written):
        cpu, cuda = _IMPLEMENTATIONS[op]
        return noted(cuda if written.is_cuda else cpu)(written, *args)
    with torch.no_grad():
        return op(written, *args)


@eager_only(in_graph=False)
def is_plain(x: Any) -> bool:
    """Return whether nothing stands between a call on `x` and its implementation: no autograd graph, no dispatch mode,
    no functorch transform, no fake tensor."""
    return not torch.is_grad_enabled() and is_bare(x)


@eager_only(in_graph=False)
def is_bare(x: Any) -> bool:
    """Return whether `x` is plain as in `is_plain`, whether gradients are enabled or not. A compiled graph is made of
    ops: below Dynamo its tensors are fake, so that their type answers the question."""
    return type(x) in TENSOR_CLASSES and (x.is_cuda or x.is_cpu) and _count_modes() == 0 and _transform() is None


def _has_negative(args: Sequence[Any]) -> bool:
    """Return whether a tensor in `args` is the negative of what its memory holds (`z.conj().imag`), which only the
    dispatcher resolves."""
    for arg in args:  # This loop compares types because it runs in front of every kernel.
        kind = type(arg)
        if kind in TENSOR_CLASSES:
            if arg.is_neg():
                return True
        elif kind is list and _has_negative(arg):
            return True
    return False


class Late:
    """A `Late` is a CUDA implementation that is imported when it is first called, or the reference without a target."""

    def __init__(self, target: str | None, reference: Callable[..., Any]) -> None:
        self.target, self.reference = target, reference
        self.launch: Callable[..., Any] | None = None

    def on(self, x: Any) -> Callable[..., Any]:
        """Return the implementation for arguments on the device of `x`."""
        if self.launch is None:
            if self.target is not None and hw.has_triton_kernels():
                self.launch = load_triton(self.target)
            else:
                self.launch = self.reference
        device = x.device
        if device.index == torch.cuda.current_device():
            return self.launch
        return partial(_on_device, device, self.launch)

    def __call__(self, *args: Any) -> Any:
        return self.on(args[0][0] if isinstance(args[0], list) else args[0])(*args)


def _on_device(device: torch.device, launch: Callable[..., Any], *args: Any) -> Any:
    """Call `launch` with `device` current: Triton launches on the current device, wherever its arguments are."""
    with torch.cuda.device(device):
        return launch(*args)


def load_triton(target: str) -> Callable[..., Any]:
    """Import a function of the Triton kernels by its name "module:function"."""
    module, function = target.split(":")
    return getattr(importlib.import_module(f"mezzotint.kernels.triton.{module}"), function)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return the 2-D view (M, K) of a tensor with any number of dimensions; a vector is one row."""
    return x if x.dim() == 2 else x.reshape(matrix_shape(x.shape))


def as_columns(data: torch.Tensor) -> torch.Tensor:
    """Return the 2-D view (K, M) of a column-wise copy (K, d0, …, dn-1)."""
    if data.dim() == 2:
        return data
    return data.reshape(data.shape[0] if data.dim() > 0 else 1, _leading((*data.shape[1:], 1)))


def padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return a matrix with zeros appended up to (rows, cols), or `x` itself where there is nothing to add."""
    if is_known(x.shape[0] == rows) and is_known(x.shape[1] == cols):
        return x
    return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds, and False where symbolic sizes do not say: a traced program then
    serves all sizes, where a plain `if` would bind it to those with one answer."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it imports SymPy

    return statically_known_true(condition)


def _leading(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (M, K) of a logical shape, where M is the product of all sizes but the last; () gives (1, 1)."""
    return _leading(shape), shape[-1] if len(shape) > 0 else 1
