"""`torch.library.opcheck` on every leaf op: schema (mutation and aliasing), fake = real, autograd, AOT dispatch.

Schema and fake run over every option set, usage and dtype; all of opcheck, which also traces each case with dynamic
shapes, over every option set once. An op is one for all of its options: `make test` traces the first of each format.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mezzotint.kernels
from mezzotint.comm.collectives import collective
from mezzotint.compat.global_state import FP8GlobalStateManager
from mezzotint.constants import E4M3
from mezzotint.functional.delayed import delayed_catch_up_, delayed_compare, delayed_hand_over_
from mezzotint.kernels.activation import (
    ACTIVATIONS,
    PARAMETERS,
    activation_backward,
    activation_forward,
    activation_scale_gradient,
    column_sum,
)
from mezzotint.kernels.delayed import (
    delayed_saw_,
    delayed_snapshot_,
    delayed_step_,
    delayed_take_,
    delayed_update_,
)
from mezzotint.kernels.float8 import float8_amax
from mezzotint.kernels.float8_rowwise import float8_rowwise_amax
from mezzotint.kernels.grouped_bias import scaled_bias, scaled_bias_backward
from mezzotint.kernels.norm import norm_add_stats, norm_apply, norm_backward, norm_backward_add, norm_stats
from mezzotint.kernels.nvfp4 import nvfp4_amax
from mezzotint.kernels.philox import draw_rng
from mezzotint.kernels.pointwise import add, dropout, l2norm, l2norm_backward, scale, scale_add
from mezzotint.kernels.quantize_ops import SOURCES, fused, of_groups, unpacking_of
from mezzotint.kernels.rope import rope, rope_join, rope_split
from mezzotint.kernels.statistics import (
    empty_statistics,
    nonfinite_add_,
    operand_statistics,
    statistics_add_,
    statistics_whole,
    tensor_statistics,
)
from tests.formats import ELEMENTS, FORMATS, HIGH, VARIANTS, Variant, variants_of

SHAPES = ((48, 80), (2, 3, 40))
FAST = ("test_schema", "test_faketensor")
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

# Ops whose opchecks are beside their other tests.
ELSEWHERE = {
    "gemm": "test_gemm.py",
    "gemm_": "test_gemm.py",
    "gemm_in_graph": "test_gemm_in_graph.py",
    "grouped_gemm": "test_grouped_gemm.py",
    "grouped_gemm_": "test_grouped_gemm.py",
    "adam_": "test_optimizer.py",
    "join_master": "test_optimizer.py",
    "sgd_": "test_optimizer.py",
}
AMAX_CASES = {
    "float8": (float8_amax, ()),
    "float8_rowwise": (float8_rowwise_amax, (False,)),
    "float8_rowwise-columns": (float8_rowwise_amax, (True,)),
    "nvfp4-both": (nvfp4_amax, (False, 0, False, True, True)),
    "nvfp4-rowwise": (nvfp4_amax, (False, 0, False, True, False)),
    "nvfp4-columnwise-rht": (nvfp4_amax, (True, 0xD7E8, False, False, True)),
    "nvfp4-row_scaled": (nvfp4_amax, (False, 0, True, True, True)),
}


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def describe(value: Any) -> str | None:
    """Ids: row, column or both for a usage, the bare name for a dtype."""
    if isinstance(value, tuple) and all(isinstance(flag, bool) for flag in value):
        return {(True, False): "row", (False, True): "column"}.get(value, "both")
    return str(value).removeprefix("torch.")


def over_variants(*left_out: str) -> pytest.MarkDecorator:
    """Parametrize `variant`; of each format the first one runs always, the others are slow."""
    cases = [
        pytest.param(variant, marks=pytest.mark.slow if index else (), id=str(variant))
        for name in FORMATS
        if name not in left_out
        for index, variant in enumerate(variants_of(name))
    ]
    return pytest.mark.parametrize("variant", cases)


def check_quantize(variant: Variant, x: torch.Tensor, usage: tuple[bool, ...], utils: tuple[str, ...]) -> None:
    """The functional op, and the in-place one without and with `noop`."""
    arguments = variant.arguments("cpu", usage)
    torch.library.opcheck(variant.quantize, (x, *arguments), test_utils=utils)
    out = [buffer.clone() for buffer in variant.quantize(x, *arguments)]
    for noop in (None, torch.ones(1)):
        torch.library.opcheck(variant.quantize_, (x, out, noop, *arguments), test_utils=utils)


def quantize_cases() -> Iterator[Any]:
    """Every variant and usage with a dtype, in turn; with its other dtypes they are slow."""
    pairs = [(variant, usage) for variant in VARIANTS for usage in variant.usages()]
    for i, (variant, usage) in enumerate(pairs):
        for j, dtype in enumerate(variant.dtypes):
            is_slow = j != i % len(variant.dtypes)
            yield pytest.param(variant, usage, dtype, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("variant", "usage", "dtype"), [*quantize_cases()], ids=describe)
def test_quantize(variant: Variant, usage: tuple[bool, ...], dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check_quantize(variant, sample(shape, dtype), usage, FAST)


@pytest.mark.compile
@over_variants()
def test_quantize_traced(variant: Variant) -> None:
    check_quantize(variant, sample(SHAPES[0], variant.dtypes[0]), variant.usages()[-1], ALL)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.format in ("float8", "float8_block")], ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (24, 1), (24,)], ids=str)
def test_quantize_one_row_or_column(variant: Variant, shape: tuple[int, ...]) -> None:
    """A transpose that moves nothing is still a copy."""
    check_quantize(variant, sample(shape, torch.bfloat16), (True, True), FAST)


@pytest.mark.compile
@pytest.mark.parametrize("way", ["rowwise", "columnwise"])
@over_variants("identity")
def test_dequantize(variant: Variant, way: str) -> None:
    """The op that `variant.dequantize` calls, with the arguments that it gives; every output dtype."""
    x = sample(SHAPES[0], variant.dtypes[0])
    op, arguments = called_op(variant, way, x)
    torch.library.opcheck(op, arguments, test_utils=ALL)
    for out_dtype in HIGH[:2]:
        torch.library.opcheck(op, (*arguments[:-1], out_dtype), test_utils=FAST)
    if ELEMENTS[variant.elem].bits == 8 or way == "rowwise":  # column-wise, packed codes are of the 2-D view
        op, arguments = called_op(variant, way, sample(SHAPES[1], variant.dtypes[0]))
        torch.library.opcheck(op, arguments, test_utils=FAST)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """The ops of this library that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mezzotint":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def called_op(variant: Variant, way: str, x: torch.Tensor) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """The dequantization op of a variant and what it is called with."""
    buffers = variant.buffers(x)
    with Recorder() as recorder:
        variant.dequantize(buffers, way, x.shape)
    ((op, arguments),) = recorder.calls
    return op, arguments


@pytest.mark.parametrize("dtype", HIGH, ids=describe)
@pytest.mark.parametrize("case", AMAX_CASES)
def test_amax(case: str, dtype: torch.dtype) -> None:
    op, arguments = AMAX_CASES[case]
    for shape in SHAPES:
        torch.library.opcheck(op, (sample(shape, dtype), *arguments), test_utils=ALL)


def test_draw_rng() -> None:
    """It draws from the generator: `test_aot_dispatch_dynamic` compares two draws and cannot pass."""
    x = torch.zeros(3)
    torch.library.opcheck(draw_rng, (x,), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    assert torch.Tag.nondeterministic_seeded in draw_rng.tags
    torch.manual_seed(5)
    first, second = draw_rng(x), draw_rng(x)
    torch.manual_seed(5)
    assert torch.equal(draw_rng(x), first)
    assert not torch.equal(first, second)


def sources(x: torch.Tensor, name: str = "swiglu", rms: bool = False) -> dict[str, tuple[Any, ...]]:
    """Source → its arguments, made of x (…, K). The backward's ask for sums; rows are scaled where there is a bias."""
    gamma = sample(x.shape[-1:], torch.float32)
    beta, bias, params = None if rms else gamma, None if rms else gamma, list(PARAMETERS.get(name, {}).values())
    scales = None if rms else sample(x.shape[:-1], torch.float32)
    dy = activation_forward(x, bias, name, params)
    return {
        "norm": (x, *norm_stats(x, 1e-5, rms), gamma, beta, rms, rms),
        "activation": (x, bias, name, params, scales),
        "activation_backward": (dy, x, bias, name, params, scales, x.dtype if rms else None),
    }


@pytest.mark.parametrize("dtype", HIGH, ids=describe)
@pytest.mark.parametrize("rms", [False, True])
def test_norm(rms: bool, dtype: torch.dtype) -> None:
    for shape, utils in zip((*SHAPES, (0, 16)), (ALL, FAST, FAST), strict=True):
        x = sample(shape, dtype)
        norm = sources(x, rms=rms)["norm"]
        torch.library.opcheck(norm_stats, (x, 1e-5, rms), test_utils=utils)
        torch.library.opcheck(norm_add_stats, (x, x.float(), None if rms else norm[3], 1e-5, rms), test_utils=utils)
        torch.library.opcheck(norm_apply, norm, test_utils=utils)
        torch.library.opcheck(norm_backward, (x, *norm[:4], rms, rms, not rms), test_utils=utils)
        torch.library.opcheck(norm_backward_add, (x, *norm[:4], rms, rms, not rms, x), test_utils=utils)
        if len(shape) == 2:
            turned = x.t().contiguous().t()
            torch.library.opcheck(norm_add_stats, (turned, turned, norm[3], 1e-5, rms), test_utils=FAST)
            torch.library.opcheck(norm_apply, (turned, *norm[1:]), test_utils=FAST)
            backward = (turned, turned, *norm[1:4], rms, rms, True)
            torch.library.opcheck(norm_backward, backward, test_utils=FAST)
            torch.library.opcheck(norm_backward_add, (*backward, turned), test_utils=FAST)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    for shape, dtype, utils in zip((*SHAPES, (0, 16)), HIGH, (ALL, FAST, FAST), strict=True):
        x = sample(shape, dtype)
        made = sources(x, name)
        torch.library.opcheck(activation_forward, made["activation"], test_utils=utils)
        torch.library.opcheck(activation_backward, made["activation_backward"][:-1], test_utils=utils)
        torch.library.opcheck(activation_forward, made["activation"][:-1], test_utils=FAST)
        gradient = (made["activation_backward"][0], x, *made["activation"][2:4])
        torch.library.opcheck(activation_scale_gradient, gradient, test_utils=utils)
        turned = (x.transpose(0, 1).contiguous().transpose(0, 1), *made["activation"][1:])
        torch.library.opcheck(activation_forward, turned, test_utils=FAST)
        torch.library.opcheck(activation_backward, (made["activation_backward"][0], *turned), test_utils=FAST)


@pytest.mark.parametrize("dtype", HIGH, ids=describe)
def test_column_sum(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (0, 16), (1, 16), (24,)):
        torch.library.opcheck(column_sum, (sample(shape, dtype), dtype), test_utils=ALL)


@pytest.mark.cover(0)
@pytest.mark.parametrize("dtype", HIGH, ids=describe)
def test_pointwise(dtype: torch.dtype) -> None:
    rng = torch.tensor([3, 4])
    for shape, utils in zip((*SHAPES, (0, 16), (24,)), (ALL, FAST, FAST, FAST), strict=True):
        x = sample(shape, dtype)
        for given in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
            for y in (sample(shape, torch.float32), given, sample(shape[-1:], dtype)):
                torch.library.opcheck(add, (given, y), test_utils=utils)
                torch.library.opcheck(scale_add, (given, 0.3, y), test_utils=utils)
            torch.library.opcheck(scale, (given, 1.0), test_utils=utils)
            torch.library.opcheck(dropout, (given, rng, 0.25), test_utils=utils)
            torch.library.opcheck(l2norm, (given, 1e-5), test_utils=utils)
            rs = l2norm(given, 1e-5)[1]
            torch.library.opcheck(l2norm_backward, (x, given, rs), test_utils=utils)


@pytest.mark.cover(0)
@pytest.mark.parametrize("dtype", HIGH, ids=describe)
def test_scaled_bias(dtype: torch.dtype) -> None:
    y, scales = sample((9, 16), dtype), sample((9,), torch.float32)
    biases = [sample((16,), dtype) for _ in range(3)]
    for given in (y, y.T.contiguous().T):
        for splits in ([4, 0, 5], [0, 9, 0]):
            torch.library.opcheck(scaled_bias, (given, scales, biases, splits), test_utils=ALL)
            torch.library.opcheck(scaled_bias_backward, (given, scales, biases, splits), test_utils=ALL)


@pytest.mark.cover(0)
@pytest.mark.parametrize("dtype", HIGH, ids=describe)
def test_rope(dtype: torch.dtype) -> None:
    angles = sample((5, 1, 6), torch.float32)
    t = sample((5, 2, 3, 8), dtype)
    for given in (t, t.transpose(1, 2).contiguous().transpose(1, 2)):
        for interleaved, inverse in ((False, True), (True, False)):
            arguments = (given, angles.cos(), angles.sin(), interleaved, inverse)
            torch.library.opcheck(rope, arguments, test_utils=ALL)
    mixed = sample((5, 2, 64), dtype)
    for given, turns, blocks in ((mixed, [angles.cos(), angles.sin()], 1), (mixed.mT.contiguous().mT, [angles] * 4, 2)):
        torch.library.opcheck(rope_split, (given, turns, 4, 2, blocks, blocks == 2), test_utils=ALL)
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in rope_split(given, turns, 4, 2, 1, True)]
        torch.library.opcheck(rope_join, (*parts, turns, blocks, blocks == 2), test_utils=ALL)


def test_delayed() -> None:
    state = torch.ones(3), torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    other = torch.ones(2), torch.rand(1, 2, generator=torch.Generator().manual_seed(1))
    amaxes = [torch.tensor([5.0]), torch.tensor([0.25])]
    torch.library.opcheck(delayed_saw_, (torch.zeros(2, 3), amaxes, [0, 2]), test_utils=ALL)
    arguments = ([state[0], other[0]], [state[1], other[1]], [448.0, 57344.0], False)
    torch.library.opcheck(delayed_update_, arguments, test_utils=ALL)
    for rows in (4, 2):
        torch.library.opcheck(delayed_step_, (*state, amaxes, [0, 2], rows, 448.0, False), test_utils=ALL)
    for second in (other[0], None):
        torch.library.opcheck(delayed_snapshot_, (*state[::-1], second), test_utils=ALL)


@pytest.mark.cover(0)
@pytest.mark.parametrize("dtype", HIGH, ids=describe)
def test_statistics(dtype: torch.dtype) -> None:
    for shape, utils in zip(((20, 36), (0, 16), (1, 1)), (ALL, FAST, FAST), strict=True):
        x = sample(shape, dtype)
        for given in (x, x.T.contiguous().T):
            for factor in (None, torch.ones(shape)):
                torch.library.opcheck(tensor_statistics, (given, x.float(), factor, 464.0), test_utils=utils)
        codes, scale = torch.zeros(shape, dtype=torch.uint8), torch.ones(1)
        arguments = (x, codes, scale, None, "tensor", E4M3, False, 448)
        torch.library.opcheck(operand_statistics, arguments, test_utils=utils)
    table = empty_statistics((16, 256), torch.device("cpu"))
    torch.library.opcheck(statistics_whole, (table,), test_utils=ALL)
    torch.library.opcheck(statistics_add_, (table, torch.ones(16, 256, dtype=torch.float64)), test_utils=ALL)
    odd = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])
    torch.library.opcheck(nonfinite_add_, (torch.zeros(3, dtype=torch.int64), odd), test_utils=ALL)


def test_delayed_over_processes() -> None:
    """Nothing is entered: what these write beside the clock they do not tell the compiler."""
    scale, clock = torch.ones(3), torch.zeros(1)
    torch.library.opcheck(delayed_catch_up_, (clock, scale), test_utils=ALL)
    arguments = (clock, torch.tensor([1]), scale, torch.zeros(2, 3), [], [], 1, 448.0, False, [], False)
    torch.library.opcheck(delayed_hand_over_, arguments, test_utils=ALL)
    torch.library.opcheck(delayed_take_, (clock, scale, torch.zeros(2, 3), 2, 448.0, False), test_utils=ALL)


def group_arguments(variant: Variant, device: str, usage: tuple[bool, ...], count: int) -> tuple[Any, ...]:
    """Those of one tensor, for each of many: tensors in lists, which are empty where none is given."""
    given = variant.arguments(device, usage)
    kinds = [str(argument.type) for argument in of_groups(variant.quantize)._schema.arguments[1:]]
    return tuple(
        ([] if value is None else [value.clone() for _ in range(count)]) if kind == "List[Tensor]" else value
        for kind, value in zip(kinds, given, strict=True)
    )


@pytest.mark.compile
@over_variants()
def test_groups(variant: Variant) -> None:
    """The bits of one op after another; an empty group among them."""
    for usage in variant.usages():
        xs = [sample((rows, 80), variant.dtypes[0]) for rows in (48, 0, 16)]
        arguments = group_arguments(variant, "cpu", usage, len(xs))
        op = of_groups(variant.quantize)
        torch.library.opcheck(op, (xs, *arguments), test_utils=ALL if usage == variant.usages()[-1] else FAST)
        made, own = op(xs, *arguments), variant.arguments("cpu", usage)
        wanted = [buffer for x in xs for buffer in variant.quantize(x, *own)]
        assert all(map(torch.equal, made, wanted))
        assert len(made) == len(wanted)


@pytest.mark.compile
@over_variants()
def test_unpacked(variant: Variant) -> None:
    found = unpacking_of(variant.quantize)
    if found is None:
        return
    for usage, unpacked in itertools.product(variant.usages(), (1, 2, 3)):
        arguments = sample((48, 80), variant.dtypes[0]), *variant.arguments("cpu", usage), unpacked
        is_last = usage == variant.usages()[-1] and unpacked == 3
        torch.library.opcheck(found[0], arguments, test_utils=ALL if is_last else FAST)


@pytest.mark.cover(1)
@pytest.mark.compile
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", FORMATS)
def test_fused(name: str, source: str) -> None:
    """The first option set of each format traced, in both directions; the others with their fake."""
    for index, variant in enumerate(variants_of(name)):
        arguments = variant.arguments("cpu", variant.usages()[-1])
        for shape, rms in zip(SHAPES, (False, True), strict=True):
            made = sources(sample(shape, variant.dtypes[0]), rms=rms)[source]
            utils = ALL if index == 0 and not rms else FAST
            torch.library.opcheck(fused(variant.quantize, source), (*made, *arguments), test_utils=utils)
            found = unpacking_of(variant.quantize)
            if found is not None:
                torch.library.opcheck(fused(found[0], source), (*made, *arguments, 3), test_utils=utils)


@pytest.fixture
def alone() -> Iterator[str]:
    """The name of a group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    torch.distributed.destroy_process_group()
    FP8GlobalStateManager.reset()


@pytest.mark.compile
def test_processes(alone: str) -> None:
    """In a group of one; what ranks compare is the affair of `tests/distributed`."""
    for kind in ("gather", "scatter", "sum", "max"):
        torch.library.opcheck(collective, (sample((16, 32), torch.bfloat16), kind, 1, alone), test_utils=ALL)
    numbers = [torch.tensor([i]) for i in range(2)]
    torch.library.opcheck(delayed_compare, (torch.ones(6), numbers, alone), test_utils=ALL)


def library_ops() -> set[str]:
    """Every op of the `mezzotint` namespace, all files of the kernels loaded."""
    for found in pkgutil.iter_modules(mezzotint.kernels.__path__):
        if found.name != "triton":  # launches only; ops are defined beside their references
            importlib.import_module(f"{mezzotint.kernels.__name__}.{found.name}")
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("mezzotint::") for name in names if name.startswith("mezzotint::")}


def test_every_op_has_a_case() -> None:
    """A new op without a case fails here."""
    x = sample((16, 32), torch.bfloat16)
    here = {op.name() for variant in VARIANTS for op in (variant.quantize, variant.quantize_)}
    for variant in VARIANTS:
        if variant.format != "identity":
            here |= {called_op(variant, way, x)[0].name() for way in variant.directions}
    here |= {op.name() for op, _ in AMAX_CASES.values()} | {draw_rng.name()}
    here |= {op.name() for op in (norm_stats, norm_apply, norm_backward, activation_forward, activation_backward)}
    here |= {op.name() for op in (norm_backward_add, activation_scale_gradient, column_sum)}
    here |= {op.name() for op in (delayed_saw_, delayed_snapshot_, delayed_step_, delayed_update_)}
    here |= {op.name() for op in (delayed_catch_up_, delayed_compare, delayed_hand_over_, delayed_take_)}
    here |= {op.name() for op in (collective, norm_add_stats)}
    here |= {op.name() for op in (add, scale, scale_add, dropout, l2norm, l2norm_backward)}
    here |= {op.name() for op in (scaled_bias, scaled_bias_backward, rope, rope_split, rope_join)}
    here |= {op.name() for op in (operand_statistics, statistics_add_, statistics_whole, tensor_statistics)}
    here |= {nonfinite_add_.name()}
    here |= {fused(variant.quantize, source).name() for variant in VARIANTS for source in SOURCES}
    here |= {of_groups(variant.quantize).name() for variant in VARIANTS}
    unpacked = [found[0] for found in map(unpacking_of, {variant.quantize for variant in VARIANTS}) if found]
    here |= {op.name() for op in unpacked} | {fused(op, source).name() for op in unpacked for source in SOURCES}
    here = {name.removeprefix("mezzotint::") for name in here}
    assert not here & set(ELSEWHERE)
    assert here | set(ELSEWHERE) == library_ops()


@pytest.mark.parametrize("op", ELSEWHERE)
def test_elsewhere_is_there(op: str) -> None:
    text = Path(__file__).with_name(ELSEWHERE[op]).read_text()
    assert f"opcheck(torch.ops.mezzotint.{op}.default" in text
