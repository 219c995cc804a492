"""What holds for every quantization op, whatever the shape, the strides, the dtype and the values.

Hypothesis draws an option set of the format, a shape (rank 1 to 4, sizes 0, 1, odd, past a block), the kind of view and
the kind of content; the numbers come from a seeded generator.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzotint.constants import rup
from mezzotint.kernels._lib import matrix_shape
from mezzotint.kernels.elements import amax
from mezzotint.kernels.float8 import float8_quantize
from mezzotint.kernels.hadamard import RANDOM_SIGN_MASK, hadamard16
from tests.formats import ELEMENTS, FORMATS, HIGH, VARIANTS, Tensors, Variant, variants_of
from tests.values import CONTENTS, FINITE, VIEWS, as_view, fill, raw

TWO_WAYS = tuple(name for name in FORMATS if name != "identity")
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, 16, 32, 64, 128, 256, 15, 17, 31, 33, 127, 129, 160, 260]), st.integers(1, 70)
)
EXAMPLES = settings(max_examples=12)
MAX_ROWS = 300  # the product of all sizes but the last

# Those with a variant whose scales are of a tensor, or of square tiles.
ALIKE = tuple(
    name
    for name in FORMATS
    if name in ("float8", "float8_scaled") or any("two_d" in variant.traits for variant in variants_of(name))
)


class Drawn:
    """One drawn case: `x` is a view of some kind, `dense` the same values, contiguous."""

    def __init__(self, variant: Variant, x: torch.Tensor, note: str) -> None:
        self.variant, self.x, self.note = variant, x, note

    @property
    def dense(self) -> torch.Tensor:
        return self.x.clone(memory_format=torch.contiguous_format)

    def __repr__(self) -> str:
        return f"{self.variant}, {tuple(self.x.shape)}, {self.x.dtype}, {self.note}"


@st.composite
def cases(
    draw: st.DrawFn,
    name: str,
    *,
    contents: tuple[str, ...] = CONTENTS,
    views: tuple[str, ...] = VIEWS,
    min_rank: int = 1,
    max_rank: int = 4,
    when: Callable[[Variant], bool] = lambda variant: True,
) -> Drawn:
    variant = draw(st.sampled_from([variant for variant in variants_of(name) if when(variant)]))
    rank = draw(st.integers(min_rank, max_rank))
    shape: list[int] = []
    for _ in range(rank - 1):
        shape.append(min(draw(SIZES), MAX_ROWS // max(1, math.prod(shape))))
    shape.append(draw(SIZES))
    dtype = draw(st.sampled_from(variant.dtypes))
    content, view, seed = draw(st.sampled_from(contents)), draw(st.sampled_from(views)), draw(st.integers(0, 99))
    return Drawn(variant, as_view(fill(tuple(shape), dtype, content, seed), view), f"{content}, {view}, {seed}")


def same(a: Tensors, b: Tensors) -> None:
    """Equal names, shapes, dtypes and bytes."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert torch.equal(raw(a[name]), raw(b[name])), name


def decoded(variant: Variant, buffers: Tensors, way: str, x: torch.Tensor) -> torch.Tensor:
    """FP64, as a matrix (M, K); with a Hadamard transform and column-wise, (K, rup(M, 16)) of the transformed xᵀ."""
    value = variant.dequantize(buffers, way, x.shape).double()
    if way == "columnwise" and "rht" in variant.traits:
        return value
    return value.reshape(matrix_shape(x.shape))


def source(variant: Variant, way: str, x: torch.Tensor) -> torch.Tensor:
    """FP64: what `decoded` is an approximation of."""
    rows, cols = matrix_shape(x.shape)
    matrix = x.reshape(rows, cols)
    if way == "columnwise" and "rht" in variant.traits:
        padded = torch.zeros(cols, rup(rows, 16), dtype=x.dtype)
        padded[:, :rows] = matrix.t()
        return hadamard16(padded, RANDOM_SIGN_MASK if "signs" in variant.traits else 0).double()
    return matrix.double()


def unit_of(variant: Variant, buffers: Tensors, way: str, x: torch.Tensor) -> torch.Tensor:
    """FP64: what a code of 1.0 in each place decodes to, the scale of the place."""
    element = ELEMENTS[variant.elem]
    one = element.packed(element.one)
    ones = {name: one.expand(b.shape).contiguous() if is_data(name) else b for name, b in buffers.items()}
    return decoded(variant, ones, way, x)


def is_data(name: str) -> bool:
    return name.endswith("data") or name == "transpose"


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_fake_is_real(name: str, data: st.DataObject) -> None:
    check_fake_is_real(data.draw(cases(name)))


@pytest.mark.cover(2)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(64, 256), (2, 32, 48), (5, 7)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fake_is_real_for_every_view(variant: Variant, shape: tuple[int, ...], view: str) -> None:
    x = as_view(fill(shape, variant.dtypes[0], "normal", 0), view)
    check_fake_is_real(Drawn(variant, x, view))


def check_fake_is_real(case: Drawn) -> None:
    """The fake op, the geometry and the real op agree on every buffer, for every usage; all are contiguous."""
    for usage in case.variant.usages():
        real = case.variant.buffers(case.x, usage)
        told = case.variant.geometry(tuple(case.x.shape), *(usage or (True, False)))
        with FakeTensorMode() as mode:
            args = [
                mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in case.variant.arguments("cpu", usage)
            ]
            fake = case.variant.quantize(mode.from_tensor(case.x), *args)
        assert len(fake) == len(real) == len(told)
        for (buffer, b), f in zip(real.items(), fake, strict=True):
            assert (tuple(b.shape), b.dtype) == (tuple(f.shape), f.dtype) == told[buffer], buffer
            assert b.is_contiguous(), buffer
            assert f.is_contiguous(), buffer
            assert b.device == case.x.device, buffer


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_usages_agree(name: str, data: st.DataObject) -> None:
    """A direction does not depend on whether the other one is asked for."""
    case = data.draw(cases(name))
    both = case.variant.buffers(case.x)
    for usage in case.variant.usages()[:-1]:
        one = case.variant.buffers(case.x, usage)
        same(one, {buffer: both[buffer] for buffer in one})


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_a_view_is_its_copy(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, views=VIEWS[1:]))
    before = raw(case.x).clone()
    same(case.variant.buffers(case.x), case.variant.buffers(case.dense))
    assert torch.equal(raw(case.x), before), "the input is not written to"


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_any_rank_is_the_matrix(name: str, data: st.DataObject) -> None:
    """The bytes are those of the 2-D view; only the data's shape follows the rank."""
    case = data.draw(cases(name))
    matrix = case.dense.view(matrix_shape(case.x.shape))
    got, want = case.variant.buffers(case.x), case.variant.buffers(matrix)
    assert got.keys() == want.keys()
    for buffer in got:
        assert torch.equal(raw(got[buffer]), raw(want[buffer])), buffer


@pytest.mark.parametrize("name", TWO_WAYS)
@EXAMPLES
@given(data=st.data())
def test_columns_of_x_are_rows_of_its_transpose(name: str, data: st.DataObject) -> None:
    """Column-wise is row-wise of xᵀ. MXFP8 keeps the logical order: data and scales are transposed back.

    Not so, by design, with a Hadamard transform (column-wise only) and with stochastic rounding (other random bytes).
    """
    case = data.draw(cases(name, min_rank=2, max_rank=2, when=lambda v: not v.traits & {"rht", "stochastic"}))
    columns = case.variant.buffers(case.x, (False, True))
    rows = case.variant.buffers(case.x.t(), (True, False))
    assert len(columns) == len(rows)
    for got, want in zip(columns.values(), rows.values(), strict=True):
        if name == "mxfp8" and not (got is columns["columnwise_scale_inv"] and "swizzled" in case.variant.traits):
            want = want.t()  # swizzled scale bytes lie in the GEMM's order, the same for both
        assert got.dtype == want.dtype
        assert torch.equal(raw(got), raw(want))


@pytest.mark.parametrize("name", ALIKE)
@EXAMPLES
@given(data=st.data())
def test_both_ways_decode_alike(name: str, data: st.DataObject) -> None:
    """One scale per tensor or per tile: both directions stand for the same numbers.

    With four over six each direction adds up its errors in its own order and may decide otherwise.
    """
    per_tensor = name in ("float8", "float8_scaled")
    case = data.draw(
        cases(name, when=lambda v: per_tensor or ("two_d" in v.traits and "four_over_six" not in v.traits))
    )
    both = case.variant.buffers(case.x)
    rows, columns = (decoded(case.variant, both, way, case.x) for way in case.variant.directions)
    assert torch.equal(raw(rows), raw(columns))


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_in_place_is_functional(name: str, data: st.DataObject) -> None:
    """The in-place op overwrites all of every buffer, scale padding included; `noop` 0 changes nothing about it."""
    case = data.draw(cases(name))
    usage = data.draw(st.sampled_from(case.variant.usages()))
    noop = data.draw(st.sampled_from([None, torch.zeros(1)]))
    want = case.variant.buffers(case.x, usage)
    out = [poisoned(b) for b in want.values()]
    case.variant.refresh(case.x, out, noop, usage)
    same(dict(zip(want, out, strict=True)), want)


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_noop_writes_nothing(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    usage = data.draw(st.sampled_from(case.variant.usages()))
    out = [poisoned(b) for b in case.variant.buffers(case.x, usage).values()]
    before = [raw(b).clone() for b in out]
    case.variant.refresh(case.x, out, torch.ones(1), usage)
    assert all(torch.equal(raw(b), a) for b, a in zip(out, before, strict=True))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_gives_nothing(variant: Variant, shape: tuple[int, ...]) -> None:
    """No elements: buffers of the told shapes, an amax of 0 where it is taken here, and nothing decodes."""
    x = torch.empty(shape, dtype=variant.dtypes[0])
    check_fake_is_real(Drawn(variant, x, "empty"))
    both = variant.buffers(x)
    for buffer, b in both.items():
        if buffer.startswith("amax") and "given" not in variant.traits:
            assert not b.any(), buffer
    for way in variant.directions:
        assert variant.dequantize(both, way, shape).numel() == 0


def poisoned(buffer: torch.Tensor) -> torch.Tensor:
    """The same kind of buffer full of 0xA5, in no dtype a number that a quantization gives everywhere."""
    return torch.full((buffer.nbytes,), 0xA5, dtype=torch.uint8).view(buffer.dtype).view(buffer.shape)


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_nothing_aliases(name: str, data: st.DataObject) -> None:
    check_nothing_aliases(data.draw(cases(name)))


@pytest.mark.parametrize("shape", [(1, 128), (128, 1), (1, 1), (64,)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_aliases_in_one_row_or_column(variant: Variant, shape: tuple[int, ...]) -> None:
    """A transpose that moves nothing is still a copy."""
    check_nothing_aliases(Drawn(variant, fill(shape, variant.dtypes[0], "normal", 0), "thin"))


def check_nothing_aliases(case: Drawn) -> None:
    """No output shares memory with an input or another output."""
    for usage in case.variant.usages():
        arguments = case.variant.arguments("cpu", usage)
        out = case.variant.quantize(case.x, *arguments)
        inputs = {id(a): a for a in (case.x, *arguments) if isinstance(a, torch.Tensor)}  # one may be given twice
        pointers = [t.untyped_storage().data_ptr() for t in (*inputs.values(), *out) if t.numel()]
        assert len(set(pointers)) == len(pointers), usage


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_zeros_stay_zeros(name: str, data: st.DataObject) -> None:
    """Zeros have code 0 and decode to zeros; -0 decodes to zeros. Scales are finite."""
    case = data.draw(cases(name, contents=("zeros", "neg_zero")))
    both = case.variant.buffers(case.x)
    for buffer, b in both.items():
        if is_data(buffer) and case.note.startswith("zeros"):
            assert not raw(b).any(), buffer
        if b.dtype == torch.float32:
            assert b.isfinite().all(), buffer
    for way in case.variant.directions:
        assert (decoded(case.variant, both, way, case.x) == 0).all()


@pytest.mark.parametrize("name", TWO_WAYS)
@EXAMPLES
@given(data=st.data())
def test_finite_stays_finite(name: str, data: st.DataObject) -> None:
    """Finite numbers give finite codes and scales, the largest of the dtype too.

    They decode to finite numbers as long as rounding up the largest one leaves FP32's range alone: up to 2^127, or for
    NVFP4, which multiplies its amax by a scale of up to 448 first, up to 2^119.
    """
    case = data.draw(cases(name, contents=FINITE))
    largest = case.x.abs().amax().double() if case.x.numel() else 0.0
    assume("rht" not in case.variant.traits or largest < 2.0**119)  # a sum of 16 may overflow
    both = case.variant.buffers(case.x)
    for buffer, b in both.items():
        if b.dtype == torch.float32:
            assert b.isfinite().all(), buffer
        elif is_data(buffer) and ELEMENTS[case.variant.elem].bits == 8:
            kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[case.variant.elem]
            assert b.view(kind).float().isfinite().all(), buffer
        elif not is_data(buffer):
            assert (b < (0x7F if name == "nvfp4" else 255)).all(), buffer  # E4M3, E8M0
    if largest > (2.0**119 if name == "nvfp4" else 2.0**127):
        return
    for way in case.variant.directions:
        assert decoded(case.variant, both, way, case.x).isfinite().all()


@pytest.mark.parametrize("name", TWO_WAYS)
@EXAMPLES
@given(data=st.data())
def test_error_bound(name: str, data: st.DataObject) -> None:
    """What decodes is within the rounding of the format from x.

    Half a step of the element type: relative to |x| for a normal code, in units of the scale for a subnormal one. On
    top of it, where the format has it: saturation (an OCP scale, a given scale or amax), stochastic rounding (a whole
    step), and NVFP4's E4M3 scales, which are coarse when subnormal and may be zero.
    """
    case = data.draw(cases(name, contents=FINITE))
    traits = case.variant.traits
    element = ELEMENTS[case.variant.elem]
    both = case.variant.buffers(case.x)
    for way in case.variant.directions:
        want = source(case.variant, way, case.x)
        if want.numel() == 0 or want.abs().amax() > (2.0**119 if name == "nvfp4" else 2.0**127):
            continue
        unit = unit_of(case.variant, both, way, case.x)
        step = torch.full_like(want, element.relative)
        floor = element.absolute * unit
        if "floor" in traits:  # the largest code stands for what is below the next power of two
            step = step.clamp_min(1 - element.largest / 2 ** math.ceil(math.log2(element.largest)))
        if "stochastic" in traits:
            step, floor = torch.full_like(want, 0.5), 2 * floor
        if name == "nvfp4":
            tensor = tensor_amax(case.variant, both, way, want)
            if tensor.min() < 1e-30:
                continue  # 2688 / amax overflows: numerics.md, section 6
            level = tensor / (6 * (256 if "256" in traits else 448))  # what a scale of 1 decodes to
            step = torch.where(unit < level * 2.0**-6 * (1 - 2.0**-20), step.clamp_min(1 / 3), step)
            floor = torch.where(unit == 0, 6 * level * 2.0**-10, floor)
        if "given" in traits:
            want = want.clamp(-element.largest * unit, element.largest * unit)
        error = (decoded(case.variant, both, way, case.x) - want).abs()
        bound = torch.maximum(step * want.abs(), floor) * (1 + 2.0**-20) + 2.0**-148
        assert (error <= bound).all(), f"{way}: {(error / bound).nan_to_num().max()} times the bound"


def tensor_amax(variant: Variant, buffers: Tensors, way: str, want: torch.Tensor) -> torch.Tensor:
    """NVFP4's amax buffer, so that it broadcasts against what `source` gives."""
    top = buffers[f"amax_{way}"].double()
    if "row_scaled" in variant.traits:
        return top[:, None] if way == "rowwise" else top[None, :]
    return top


@pytest.mark.parametrize("name", TWO_WAYS)
@EXAMPLES
@given(data=st.data())
def test_nan_and_infinity(name: str, data: st.DataObject) -> None:
    """A NaN has its code, or the largest where there is none, and the others do not notice it, unless the scale says
    that all of the block is NaN. An infinity becomes the largest code.

    Not so with a Hadamard transform, which spreads them over their group.
    """
    case = data.draw(cases(name, contents=("nan", "inf", "all_nan"), when=lambda v: "rht" not in v.traits))
    both = case.variant.buffers(case.x)
    without = case.variant.buffers(torch.where(case.x.isnan(), 0.0, case.x))
    matrix, element = case.x.reshape(matrix_shape(case.x.shape)), ELEMENTS[case.variant.elem]
    for way in case.variant.directions:
        codes, others = (elements_of(case.variant, b, way, case.x) for b in (both, without))
        nan, inf = matrix.isnan(), matrix.isinf()
        assert (codes[nan] == element.nan).all()
        lost = torch.zeros_like(nan)
        if "nan_blocks" in case.variant.traits:
            lost = decoded(case.variant, both, way, case.x).isnan()
            assert (lost | ~nan).all()
            assert not lost.any() or nan.any()
        if "four_over_six" not in case.variant.traits:  # a NaN makes both its errors NaN: map to six
            assert torch.equal(codes[~nan & ~lost], others[~nan & ~lost])
        if name != "nvfp4":  # whose scale of an infinite amax is 1
            sign = torch.where(matrix < 0, 1 << element.bits - 1, 0).to(torch.uint8)
            assert torch.equal(codes[inf & ~lost], (sign | element.largest_code)[inf & ~lost])
    if not case.variant.traits & {"four_over_six", "nan_blocks"}:
        same(*({k: v for k, v in b.items() if not is_data(k)} for b in (both, without)))


def elements_of(variant: Variant, buffers: Tensors, way: str, x: torch.Tensor) -> torch.Tensor:
    """Codes as a matrix (M, K)."""
    rows, cols = matrix_shape(x.shape)
    if variant.format in ("float8", "float8_scaled"):
        packed = buffers["data" if way == "rowwise" else "transpose"]
    else:
        packed = buffers[f"{way}_data"]
    turned = way == "columnwise" and variant.format != "mxfp8"
    codes = ELEMENTS[variant.elem].codes(packed, *((cols, rows) if turned else (rows, cols)))
    return codes.t() if turned else codes


@pytest.mark.parametrize("dtype", HIGH, ids=str)
@EXAMPLES
@given(data=st.data())
def test_rowwise_is_a_tensor_per_row(dtype: torch.dtype, data: st.DataObject) -> None:
    """FP8 with a scale per row gives what FP8 with one scale gives for each row alone."""
    case = data.draw(cases("float8_rowwise", min_rank=2, max_rank=2))
    rows = case.x[:20].to(dtype)
    _, _, elem, pow2, eps = case.variant.options  # no amaxes are given
    got = case.variant.buffers(rows, (True, False))
    for index, row in enumerate(rows):
        codes, scale_inv = float8_quantize(row, None, elem, pow2, eps, True, False)
        assert torch.equal(codes, got["rowwise_data"][index])
        assert torch.equal(scale_inv, got["rowwise_scale_inv"][index : index + 1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("content", CONTENTS)
def test_the_amax_kept_is_the_amax(name: str, content: str) -> None:
    """Where a buffer is an amax: max |x|, NaN dropped, of the (transformed) input."""
    x = fill((48, 80), torch.bfloat16, content, 0)
    for variant in variants_of(name):
        both = variant.buffers(x)
        if "amax" in both:
            assert both["amax"].item() == amax(x).item()
        for way in ("rowwise", "columnwise"):
            if f"amax_{way}" in both and not variant.traits & {"row_scaled", "given"}:
                kept = both[f"amax_{way}"].double()
                if content not in ("nan", "all_nan", "mixed") or "rht" not in variant.traits:
                    finite = source(variant, way, x).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
                    assert kept.item() == finite.abs().amax().item()
