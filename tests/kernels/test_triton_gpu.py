"""The Triton kernels on a GPU against the CPU reference, byte for byte: many shapes, every path, beyond 2^31 elements.

Triton compiles a kernel anew for each dtype, direction and option, and for sizes that are a multiple of 16 or not. So a
variant goes through each group of shapes, all of one kind, with one dtype and direction; the next variant of the format
with the next. What depends on values (NaN, infinity, subnormals, ...) rotates over the shapes.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from mezzotint.constants import E4M3, E5M2
from mezzotint.kernels.float8 import float8_amax, float8_dequantize
from mezzotint.kernels.float8_block import float8_block_dequantize
from mezzotint.kernels.float8_rowwise import float8_rowwise_amax, float8_rowwise_dequantize, float8_rowwise_quantize
from mezzotint.kernels.mxfp8 import mxfp8_dequantize
from mezzotint.kernels.quantize_ops import of_groups
from tests.formats import HIGH, PLACES, VARIANTS, Variant, variants_of
from tests.kernels.test_opcheck import group_arguments
from tests.values import CONTENTS, VIEWS, as_view, fill, raw

pytestmark = pytest.mark.gpu

FORMATS = tuple(PLACES)
TESTED = [variant for variant in VARIANTS if variant.format in FORMATS]
Usage = tuple[bool, ...]

# Whole tiles: kernels leave masks out. Then rows, columns a multiple of 16: both, columns alone, rows alone, neither.
GROUPS: dict[str, list[tuple[int, ...]]] = {
    "whole": [(256, 1024), (2, 256, 2048)],
    "even": [*product((16, 112, 128, 272), (16, 64, 128, 400)), (2, 64, 48), (4, 4, 256)],
    "ragged_rows": [*product((2, 33, 127, 129), (16, 48, 128, 528)), (3, 5, 64)],
    "ragged_columns": [*product((16, 128, 272), (3, 33, 130))],
    "ragged": [*product((3, 31, 129, 257), (5, 33, 127, 1000)), (2, 3, 7)],
}
# Sizes that Triton takes as constants, and empty ones.
SMALL = ((1, 1), (1, 300), (300, 1), (17,), (1, 64))
EMPTY = ((0, 16), (16, 0), (0,), (2, 0, 32), (2, 32, 0))


def assert_same(variant: Variant, x: torch.Tensor, on_cuda: torch.Tensor, usage: Usage, note: str = "") -> None:
    """The op on both devices."""
    want, got = variant.buffers(x, usage), variant.buffers(on_cuda, usage)
    for name, expected in want.items():
        case = f"{name} of {tuple(x.shape)}, {x.dtype}, {usage} {note}"
        assert (got[name].shape, got[name].dtype) == (expected.shape, expected.dtype), case
        assert_bytes(got[name], expected, case)


def assert_bytes(got: torch.Tensor, want: torch.Tensor, case: str) -> None:
    got, want = raw(got.cpu()), raw(want)
    if not torch.equal(got, want):
        wrong = (got != want).nonzero().view(-1)
        raise AssertionError(f"{case}: {len(wrong)} of {len(want)} bytes differ, first {wrong[:8].tolist()}")


def combinations(variant: Variant) -> Iterator[tuple[str, torch.dtype, Usage]]:
    """Groups of shapes with a dtype and a direction each; over the variants of a format they meet in other ways."""
    siblings = variants_of(variant.format)
    first = siblings.index(variant)
    for index, group in enumerate(GROUPS):
        if len(siblings) > 8 and (first + index) % 2:
            continue  # enough of them: each takes half of the groups
        usages, dtypes = variant.usages(), variant.dtypes
        yield group, dtypes[(first + index) % len(dtypes)], usages[(2 + first // 3 + index) % len(usages)]


@pytest.mark.parametrize("variant", TESTED, ids=str)
def test_shapes(variant: Variant) -> None:
    for group, dtype, usage in combinations(variant):
        for index, shape in enumerate(GROUPS[group]):
            content = CONTENTS[index % len(CONTENTS)]
            x = fill(shape, dtype, content, index)
            assert_same(variant, x, x.cuda(), usage, content)


@pytest.mark.parametrize("name", FORMATS)
def test_small_and_empty(name: str) -> None:
    variant = variants_of(name)[0]
    for shape in SMALL:
        x = fill(shape, torch.bfloat16, "normal", 5)
        assert_same(variant, x, x.cuda(), variant.usages()[-1])
    for shape, usage, tested in product(EMPTY, variant.usages(), variants_of(name)[:3]):
        x = torch.empty(shape, dtype=torch.bfloat16)
        assert_same(tested, x, x.cuda(), usage)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FORMATS)
def test_views(name: str, view: str) -> None:
    variant = variants_of(name)[0]
    for shape in ((128, 256), (33, 70), (2, 3, 48)):
        x = as_view(fill(shape, torch.bfloat16, "normal", 7).cuda(), view)
        assert_same(variant, x.cpu(), x, variant.usages()[-1], view)


def test_one_program_sees_all_of_a_copy() -> None:
    """Row-wise alone is flat where x is contiguous, or becomes so, and else goes by tiles, which hold more."""
    variant = variants_of("float8")[0]
    for shape, view in product(((64, 128), (8, 8, 128), (64, 64)), VIEWS):
        x = as_view(fill(shape, torch.bfloat16, "normal", 8).cuda(), view)
        assert_same(variant, x.cpu(), x, (True, False), view)


@pytest.mark.parametrize("name", FORMATS)
def test_noop(name: str) -> None:
    """1: nothing is written. Anything else: every byte is."""
    variant = variants_of(name)[0]
    for usage in variant.usages():
        x = fill((130, 272), torch.bfloat16, "normal", 9)
        want = variant.buffers(x, usage)
        out = [torch.full((b.nbytes,), 0xA5, dtype=torch.uint8, device="cuda") for b in want.values()]
        typed = [o.view(b.dtype).view(b.shape) for o, b in zip(out, want.values(), strict=True)]
        variant.refresh(x.cuda(), typed, torch.ones(1, device="cuda"), usage)
        assert all((o == 0xA5).all() for o in out)
        variant.refresh(x.cuda(), typed, torch.zeros(1, device="cuda"), usage)
        for (buffer, expected), got in zip(want.items(), typed, strict=True):
            assert_bytes(got, expected, f"{buffer}, {usage}")


# Rows of groups, and columns: whole tiles, multiples of 16, ragged with empty ones, more groups than a launch takes.
SPLITS = (([256, 128, 512], 256), ([16, 0, 144, 32], 80), ([0, 33, 1, 130, 0], 90), ([24, 3] * 10, 128))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_groups(name: str, splits: tuple[list[int], int]) -> None:
    """Each group of rows on its own, and nothing past its end; twice, since the second launch takes another way."""
    sizes, columns = splits
    variants = variants_of(name)
    for index, usage in enumerate(variants[0].usages()):
        variant = variants[index % len(variants)]
        if usage not in variant.usages():
            continue
        x = fill((sum(sizes), columns), variant.dtypes[0], CONTENTS[-index], index)
        xs = list(x.split(sizes))
        wanted = of_groups(variant.quantize)(xs, *group_arguments(variant, "cpu", usage, len(xs)))
        on_cuda = list(x.cuda().split(sizes))
        for _ in range(2):
            made = of_groups(variant.quantize)(on_cuda, *group_arguments(variant, "cuda", usage, len(xs)))
            for i, (got, want) in enumerate(zip(made, wanted, strict=True)):
                assert_bytes(got, want, f"{variant}, {usage}, {splits}, buffer {i}")


def test_rows_of_every_length() -> None:
    """Row-wise scaling holds rows in registers, padded to a power of two, up to 16384 elements."""
    variant = variants_of("float8_rowwise")[0]
    for cols in (128, 200, 512, 1000, 2048, 4000, 8192, 14336, 16384, 16400, 40000):
        x = fill((3, cols), torch.bfloat16, "mixed", cols)
        assert_same(variant, x, x.cuda(), (True, False))


def test_amax() -> None:
    """Below, at and above one block per program, and several blocks per program; strides; nothing at all."""
    for size in (0, 1, 2, 8191, 8192, 8193, 512 * 8192 - 1, 512 * 8192 + 1, 1500 * 8192 + 77):
        for dtype in HIGH:
            x = torch.randn(size).to(dtype)
            if size:
                x[-1], x[size // 2] = 9.0, -11.0
            assert_bytes(float8_amax(x.cuda()), float8_amax(x), f"{size}, {dtype}")
    for content, view in product(CONTENTS, VIEWS):
        x = as_view(fill((33, 70), torch.bfloat16, content, 0).cuda(), view)
        assert_bytes(float8_amax(x), float8_amax(x.cpu()), f"{content}, {view}")


def test_row_and_column_amax() -> None:
    """Below, at and above a strip of 256 rows; strides; nothing at all. Then the quantization that they are given to,
    also of rows that no program holds whole."""
    for rows, cols, dtype in product((0, 1, 255, 256, 257, 1000), (1, 128, 130, 0), HIGH):
        x = torch.randn(rows, cols).to(dtype)
        for way in (False, True):
            assert_bytes(float8_rowwise_amax(x.cuda(), way), float8_rowwise_amax(x, way), f"{rows}, {cols}, {dtype}")
    cases = [((300, 70), content, view) for content, view in product(CONTENTS, VIEWS)]
    for shape, content, view in [*cases, ((3, 16386), "normal", VIEWS[0])]:
        x = as_view(fill(shape, torch.bfloat16, content, 0).cuda(), view)
        tops = [float8_rowwise_amax(x, way) for way in (False, True)]
        for top, way in zip(tops, (False, True), strict=True):
            assert_bytes(top, float8_rowwise_amax(x.cpu(), way), f"{content}, {view}")
        usages = ((True, True), (False, True), (True, False))
        for usage, given in product(usages, ((True, False), (False, True), (True, True))):
            twice = [top * 2 if is_given else None for top, is_given in zip(tops, given, strict=True)]
            got = float8_rowwise_quantize(x, *twice, E4M3, True, 0.0, *usage)
            on_cpu = [None if top is None else top.cpu() for top in twice]
            want = float8_rowwise_quantize(x.cpu(), *on_cpu, E4M3, True, 0.0, *usage)
            for buffer, expected in zip(got, want, strict=True):
                assert_bytes(buffer, expected, f"{content}, {view}, {usage}, {given}")


@pytest.mark.parametrize("out_dtype", HIGH)
@pytest.mark.parametrize("name", ["float8", "float8_rowwise", "float8_block", "mxfp8"])
def test_dequantize(name: str, out_dtype: torch.dtype) -> None:
    """Every code, NaN and infinity included, from both directions, over two kinds of shapes."""
    generator = torch.Generator().manual_seed(0)
    for (rows, cols), dtype in (((128, 256), E4M3), ((131, 333), E5M2)):

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

        def scales(*shape: int) -> torch.Tensor:
            return torch.exp2(torch.randint(-30, 30, shape, generator=generator).float()) * 1.1

        logical, transposed = codes(rows, cols), codes(cols, rows)
        calls: list[tuple] = []
        if name == "float8":
            calls = [
                (float8_dequantize, logical, scales(1), dtype, False),
                (float8_dequantize, transposed, scales(1), dtype, True),
            ]
        elif name == "float8_rowwise":
            calls = [
                (float8_rowwise_dequantize, logical, scales(rows), dtype, False),
                (float8_rowwise_dequantize, transposed, scales(cols), dtype, True),
            ]
        elif name == "float8_block":
            down, across = -(-rows // 128), -(-cols // 128)
            calls = [
                (float8_block_dequantize, logical, scales(across, -(-rows // 4) * 4), dtype, False, False),
                (float8_block_dequantize, transposed, scales(down, -(-cols // 4) * 4), dtype, False, True),
                (float8_block_dequantize, logical, scales(down, -(-across // 4) * 4), dtype, True, False),
                (float8_block_dequantize, transposed, scales(across, -(-down // 4) * 4), dtype, True, True),
            ]
        else:
            high, wide = -(-rows // 128) * 128, -(-cols // 128) * 128
            calls = [
                (mxfp8_dequantize, logical, codes(*shape), dtype, swizzled, columnwise)
                for columnwise, shape in ((False, (high, wide // 32)), (True, (high // 32, wide)))
                for swizzled in (False, True)
            ]
        for op, *args in calls:
            on_cuda = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
            assert_bytes(op(*on_cuda, out_dtype), op(*args, out_dtype), f"{op}, {rows}x{cols}, {args[2:]}")


@pytest.fixture(scope="module")
def large() -> Iterator[torch.Tensor]:
    """BF16, 2^31 elements and 128 rows more: an index that is 32 bits wide would wrap."""
    generator = torch.Generator("cuda").manual_seed(0)
    yield torch.randn((1 + 2**10) * 128, 2**14, dtype=torch.bfloat16, device="cuda", generator=generator)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", FORMATS)
def test_more_elements_than_32_bits_count(name: str, large: torch.Tensor) -> None:
    """Blocks of rows at the start, in the middle and past 2^31, each against the reference of these rows alone.

    Formats with one scale for all of x take it from outside, so that rows do not depend on each other.
    """
    variants = variants_of(name)
    variant = next((v for v in variants if "given" in v.traits), variants[0])
    got = variant.buffers(large)
    rows = len(large)
    for first in (0, rows // 256 * 128, rows - 128):
        want = variant.buffers(large[first : first + 128].cpu())
        for buffer, place in PLACES[name].items():
            part = got[buffer]
            if place is not None:
                dim, step = place
                part = part.narrow(dim, first // step, 128 // step)
            assert_bytes(part, want[buffer], f"{buffer}, rows from {first}")
    if name == "float8":
        assert float8_amax(large).item() == large.abs().amax().item()
    if name == "float8_rowwise":  # a column's scale does depend on all rows
        for first in (0, large.shape[1] - 16):
            want = variant.buffers(large[:, first : first + 16].cpu(), (False, True))
            for buffer, expected in want.items():
                assert_bytes(got[buffer][first : first + 16], expected, f"{buffer}, columns from {first}")


@pytest.mark.parametrize("usage", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["float8", "float8_scaled"])
def test_one_direction_of_more_than_32_bits_count(name: str, usage: Usage, large: torch.Tensor) -> None:
    """The flat cast, and current scaling with its own amax."""
    variant = variants_of(name)[0]
    got = variant.buffers(large, usage)
    both = variant.buffers(large)
    for buffer, value in got.items():
        assert torch.equal(value, both[buffer]), buffer
