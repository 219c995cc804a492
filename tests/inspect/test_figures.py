"""Every figure against its formula in FP64 (NumPy), for every format, eager and compiled."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib import pyplot

import mezzotint as mz
from mezzotint import recipe
from mezzotint.functional.observation import statistics_of
from mezzotint.inspect.figures import exponents_of, figures_of, map_of
from mezzotint.inspect.maps import UNITS, pack_maps, unpack_map
from mezzotint.kernels.statistics import MAXIMA, SIDE, SUMS, statistics_whole
from tests.dynamo.graphs import firsts, over_every_format
from tests.quantizer_formats import Format

# Largest value of an element type, and half of the step that leads there.
EDGES = {"E4M3": 464.0, "E5M2": 61440.0, "E2M1": 7.0, "E3M2": 30.0, "E2M3": 7.75}


def numbers(x: Any, x_hat: Any, limit: Any) -> dict[str, float]:
    """The rows of a table, of arrays in FP64; `limit`: what is saturated above, or None."""
    with np.errstate(all="ignore"):
        finite, held = np.isfinite(x), np.isfinite(x_hat)
        both = finite & held
        error = (x - x_hat)[both]
        nonzero = both & (x != 0)
        relative = np.abs(x - x_hat)[nonzero] / np.abs(x)[nonzero]
    known = np.abs(x)[~np.isnan(x)]
    return {
        "count": x.size,
        "nan": np.isnan(x).sum(),
        "posinf": (x == np.inf).sum(),
        "neginf": (x == -np.inf).sum(),
        "hidden": (~finite & held).sum(),
        "broken": (finite & ~held).sum(),
        "underflow": (finite & (x != 0) & (x_hat == 0)).sum(),
        "saturated": 0 if limit is None else (finite & (np.abs(x) > limit)).sum(),
        "signal": math.fsum(np.square(x[both])),
        "noise": math.fsum(np.square(error)),
        "exponents": (finite & (x != 0)).sum(),
        "quantized": (held & (x_hat != 0)).sum(),
        "amax": known.max(initial=-np.inf),
        "relative": relative.max(initial=-np.inf),
    }


def as_array(x: torch.Tensor) -> Any:
    return x.double().numpy().reshape(-1, x.shape[-1])


def check_table(x: torch.Tensor, x_q: Any, table: torch.Tensor, limit: Any) -> None:
    """Counts and maxima exactly, sums of squares to the rounding of FP64; the same of each cell of the map."""
    a, b = as_array(x), as_array(x_q.dequantize(dtype=torch.float32))
    high, wide = max(1, -(-a.shape[0] // SIDE)), max(1, -(-a.shape[1] // SIDE))
    rows = {name: table[row] for row, name in enumerate((*SUMS, *MAXIMA))}
    whole = dict(zip((*SUMS, *MAXIMA), statistics_whole(table).tolist(), strict=True))
    for name, value in numbers(a, b, limit).items():
        assert whole[name] == pytest.approx(value, rel=1e-14, abs=0), name
    for i in (0, 1, SIDE - 1):
        for j in (0, SIDE // 2):
            at = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            want = numbers(a[at], b[at], None if limit is None else np.broadcast_to(limit, a.shape)[at])
            for name in want.keys() - {"exponents", "quantized"}:
                made = float(rows[name][SIDE * i + j])
                assert made == pytest.approx(want[name], rel=1e-14, abs=0), (name, i, j)
    counted = exponents_of(table)
    for index, values in enumerate((a, b)):
        values = np.abs(values[np.isfinite(values) & (values != 0)])
        exponents = np.maximum(np.frexp(values)[1] - 1, -127)
        assert {e: n[index] for e, n in counted.items() if n[index]} == {
            int(e): int(n) for e, n in zip(*np.unique(exponents, return_counts=True), strict=True)
        }


def odd_tensor(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Sizes over many powers of two, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 6, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    x[torch.rand(shape, generator=generator) < 0.1] = -0.0
    return x.to(dtype)


@over_every_format(firsts())
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 99),
    values=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-30, 3e4]), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(shape=(33, 257), seed=0, values=[math.nan, math.inf], dtype=torch.bfloat16)
@settings(max_examples=8, deadline=None)
def test_a_table_is_what_its_formulas_say(
    fmt: Format, shape: tuple[int, int], seed: int, values: list[float], dtype: torch.dtype
) -> None:
    x = odd_tensor(shape, seed, dtype)
    for place, value in enumerate(values):
        x.view(-1)[(place * 7919 + seed) % x.numel()] = value
    x_q, name = fmt.quantize(x, columnwise=False), fmt.name
    limit = None if "identity" in name or "hybrid" in name else limit_of(x_q)
    table = statistics_of(x, x_q)
    if "hybrid" in name:  # as of its row-wise part, which is another format of the list
        table[SUMS.index("saturated")] = 0
    check_table(x, x_q, table, limit)


def limit_of(x_q: Any) -> Any:
    """What is saturated above: the edge of the element type under the scale, which is what codes of 1 are read as."""
    ones = x_q.clone()
    element = next(
        getattr(ones, name).name[-4:] for name in ("_fp8_dtype", "_fp6_dtype", "_fp4_dtype") if hasattr(ones, name)
    )
    data = ones._rowwise_data if hasattr(ones, "_rowwise_data") else ones._data
    if element in ("E3M2", "E2M3"):  # four codes of six bits, in three bytes
        code = {"E3M2": 0b001100, "E2M3": 0b001000}[element]
        bits = code | code << 6 | code << 12 | code << 18
        for byte in range(3):
            data.view(-1, 3)[:, byte] = bits >> 8 * byte & 0xFF
    else:
        data.fill_({"E4M3": 0x38, "E5M2": 0x3C, "E2M1": 0x22}[element])
    with np.errstate(all="ignore"):
        return EDGES[element] * as_array(ones.dequantize(dtype=torch.float32))


def test_figures_follow_from_a_table() -> None:
    """Shares, ratios and decibels, of numbers that can be worked out by hand: E4M3 under a scale of 1."""
    x = torch.tensor([[448.0, 480.0, 0.0, -17.0], [1e-9, math.nan, math.inf, 1.0]])
    error = mz.quantization_error(x, mz.Float8Quantizer(torch.ones(1), torch.zeros(1), mz.DType.kFloat8E4M3))
    noise = (480 - 448) ** 2 + (17 - 16) ** 2 + 1e-9**2
    signal = 448**2 + 480**2 + 17**2 + 1 + 1e-9**2
    assert error.count == 8
    assert error.amax == math.inf
    assert (error.smallest_scale, error.largest_scale) == (1.0, 1.0)
    assert error.underflow == 1 / 8
    assert error.saturated == 1 / 8
    assert error.snr_db == pytest.approx(10 * math.log10(signal / noise), rel=1e-7)
    assert error.mse == pytest.approx(noise / 6, rel=1e-7)
    assert error.relative_error == 1.0
    assert (error.nan, error.posinf, error.neginf, error.hidden, error.broken) == (1, 1, 0, 1, 0)
    assert error.nonfinite == 2
    assert error.exponents[8] == (2, 3)  # infinity comes back as 448
    assert error.map[0][1].saturated == 1.0
    assert error.map[1][0].underflow == 1.0
    assert error.map[2][0].count == 0
    assert error.map[2][0].snr_db is None


def test_a_map_survives_its_file() -> None:
    """Tenths of a decibel, ten-thousandths of the elements; None where a cell has no figure."""
    x = torch.randn(64, 96) * torch.logspace(-6, 3, 96)
    x[:8] = 0.0
    found = mz.quantization_error(x, recipe.Float8CurrentScaling())
    unpacked = unpack_map(pack_maps(torch.stack([torch.zeros_like(found.table), found.table]))[1])
    cells = [cell for row in map_of(found.table) for cell in row]
    for name, units in UNITS.items():
        figures = [getattr(cell, name) for cell in cells]
        finite = [None if value is None or not math.isfinite(value) else value for value in figures]
        assert unpacked[name] == [None if value is None else pytest.approx(value, abs=0.51 / units) for value in finite]
    assert None in unpacked["snr_db"]


def test_without_loss_and_without_elements() -> None:
    exact = mz.quantization_error(torch.ones(4, 32), "mxfp8")
    assert exact.snr_db == math.inf
    assert exact.mse == exact.relative_error == 0.0
    empty = figures_of(statistics_whole(mz.quantization_error(torch.ones(0, 32), "mxfp8").table).tolist())
    assert empty.count == 0
    assert [empty.amax, empty.snr_db, empty.mse, empty.underflow, empty.largest_scale] == [None] * 5


@pytest.mark.compile
@pytest.mark.parametrize("name", ["current", "rowwise", "block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_compiled_whole_and_equal(name: str) -> None:
    x = odd_tensor((48, 80), 1, torch.bfloat16)
    x[0, 0], x[5, 5] = math.nan, math.inf

    def table(x: torch.Tensor) -> torch.Tensor:
        return mz.quantization_error(x, name).table

    torch._dynamo.reset()
    assert torch.equal(torch.compile(table, fullgraph=True, backend="aot_eager")(x), table(x))


def test_it_reads_well() -> None:
    text = repr(mz.quantization_error(torch.linspace(-1, 1, 64).view(2, 32), "mxfp8"))
    assert text.startswith("QuantizationError of (2, 32) by mxfp8\n  signal to noise   3")
    assert "not finite        none" in text


def test_it_draws() -> None:
    figure = mz.quantization_error(torch.randn(40, 64), "nvfp4").plot()
    assert [axes.get_title() for axes in figure.axes][:2] == ["nvfp4", "signal to noise, dB"]
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        (([1.0], "mxfp8"), TypeError, "x is list: give a floating-point"),
        ((torch.ones(2, dtype=torch.int32), "mxfp8"), TypeError, "x is a tensor of torch.int32"),
        ((torch.ones(2), "fp3"), ValueError, "there is no recipe 'fp3'"),
        ((torch.ones(2), "delayed"), ValueError, "quantizer is delayed, whose scales come from earlier tensors"),
        ((torch.ones(2), "mxfp8", "output"), ValueError, "role is 'output'"),
    ],
)
def test_bad_arguments(arguments: Any, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        mz.quantization_error(*arguments)


def test_an_unknown_figure() -> None:
    with pytest.raises(AttributeError, match="has no figure 'snr'"):
        _ = mz.quantization_error(torch.ones(2, 2), "mxfp8").snr


def read_table() -> dict[str, tuple[str, str, str]]:
    """Recipe → what the page says of NaN, infinity, and what is beside them."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("## NaN and infinity")[1].splitlines() if "`" in line]
    return {row[0].strip("`"): (row[1], row[2], row[3]) for row in rows if len(row) == 4}


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_what_becomes_of_nan_and_infinity(name: str) -> None:
    """As `docs/numerics.md` says."""
    makes = recipe.RECIPES[name]().quantizer(mz.QuantizerRole("linear", "input"))
    if name == "delayed":
        makes = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), mz.DType.kFloat8E4M3)
    for value, told in zip((math.nan, math.inf), read_table()[name], strict=False):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        x[3, 3] = value
        error = mz.quantization_error(x, makes)
        made = makes.quantize(x).dequantize()  # type: ignore[union-attr]
        kind = "NaN" if math.isnan(made[3, 3]) else "infinity" if math.isinf(made[3, 3]) else "finite"
        assert kind == told
        assert error.hidden == (told == "finite")
        kind = "NaN" if math.isnan(value) else "infinity"
        beside = {part.split(": ")[0]: part.split(": ")[1] for part in read_table()[name][2].split("; ") if ":" in part}
        block, others = made[3, :32], beside.get(kind, "")
        assert error.broken == {"its block becomes NaN": 31, "the tensor becomes NaN": x.numel() - 1}.get(others, 0)
        assert (block.count_nonzero() <= 1) == (others == "its block becomes 0")
        if others.endswith("has a scale of 1"):
            assert error.largest_scale == 1  # those of the others are smaller
            assert (error.smallest_scale == 1) == others.startswith("the tensor")
