"""This program draws the figures of docs/concepts, and prints the table of errors of docs/recipes.md.

    python -m docs.figures              every figure, into docs/concepts
    python -m docs.figures --out DIR    into another folder
    python -m docs.figures --table      the errors of casts, as rows of a table, and no figure

Nothing in a figure is drawn by hand: values of formats are decoded by Mezzotint's own code, errors are measured by
`mezzotint.quantization_error`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

import mezzotint as mz
from mezzotint.constants import FP8_TORCH
from mezzotint.kernels.elements import E2M1_VALUES

ORANGE, SKY, GREEN, BLUE, RED, PINK, GREY = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999"
BITS = {"BF16": (8, 7), "E5M2": (5, 2), "E4M3": (4, 3), "E3M2": (3, 2), "E2M3": (2, 3), "E2M1": (2, 1)}
RECIPES = ("current", "rowwise", "block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
STYLE = {
    "svg.hashsalt": "mezzotint",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def positive_values(name: str) -> np.ndarray:
    """Return the positive finite values of an element type, in order."""
    codes = {"E4M3": mz.DType.kFloat8E4M3, "E5M2": mz.DType.kFloat8E5M2}
    if name in codes:
        every = torch.arange(128, dtype=torch.uint8).view(FP8_TORCH[codes[name]]).double()
        values = every[every.isfinite() & (every > 0)].numpy()
    elif name == "E2M1":
        values = np.array(E2M1_VALUES[1:])
    else:  # no infinities and no NaN: every code is a number
        exponent_bits, mantissa_bits = BITS[name]
        bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
        values = np.array(
            [
                m / ones * 2.0 ** (1 - bias) if e == 0 else (1 + m / ones) * 2.0 ** (e - bias)
                for e in range(2**exponent_bits)
                for m in range(ones)
            ][1:]
        )
    return np.sort(values)


def draw_formats(out: Path) -> None:
    """Draw the bits of each element type, and where its values lie."""
    fig, (bits, line) = plt.subplots(2, 1, figsize=(7, 5.6), height_ratios=(5, 6), layout="constrained")
    for row, (name, (exponent, mantissa)) in enumerate(BITS.items()):
        for i in range(1 + exponent + mantissa):
            colour = GREY if i == 0 else ORANGE if i <= exponent else SKY
            bits.add_patch(Rectangle((i, -row - 0.35), 0.92, 0.7, color=colour))
        bits.text(-0.4, -row, name, ha="right", va="center", weight="bold")
        bits.text(16.4, -row, f"{1 + exponent + mantissa} bits", va="center")
    for i, (label, colour) in enumerate((("sign", GREY), ("exponent", ORANGE), ("mantissa", SKY))):
        bits.add_patch(Rectangle((6 * i, -6.35), 0.7, 0.6, color=colour))
        bits.text(6 * i + 1, -6.05, label, va="center")
    bits.set(xlim=(-3, 19), ylim=(-6.6, 0.7))
    bits.axis("off")
    names = [name for name in BITS if name != "BF16"]
    for row, name in enumerate(names):
        values = positive_values(name)
        line.vlines(values, -row - 0.4, -row + 0.15, color=BLUE, lw=0.8)
        text = f"{len(values)} values, largest {values[-1]:g}, smallest {format_power(values[0])}"
        line.text(2.0**-16, -row + 0.25, text, fontsize=7.5, color="#444444")
    line.set_xscale("log", base=2)
    line.set(yticks=[-i for i in range(len(names))], yticklabels=names, ylim=(-4.6, 0.8))
    line.set_xlabel("positive values, each a line")
    save(fig, out / "formats.svg")


def format_power(value: float) -> str:
    """Return a power of two as one, and other numbers as they are."""
    power = np.log2(value)
    return f"2^{power:.0f}" if power == round(power) and abs(power) > 3 else f"{value:g}"


def draw_scales(out: Path) -> None:
    """Draw which elements of a matrix share a scale, in each recipe."""
    rows, columns = 8, 256
    row, column = np.mgrid[:rows, :columns]
    shared = {
        "delayed, current: the whole tensor": 0 * row,
        "rowwise: each row (and, in the copy for the other products, each column)": row,
        "block, activations and gradients: 128 in a row": row + column // 128,
        "block, weights: a tile of 128x128 (8 of its rows are drawn)": column // 128,
        "mxfp8, mxfp6, mxfp4: 32 in a row": row + column // 32,
        "nvfp4: 16 in a row, under one more scale of the whole tensor": row + column // 16,
    }
    fig, axes = plt.subplots(6, 1, figsize=(8, 6.4), layout="constrained")
    shades = mpl.colors.ListedColormap(["#BFE3F7", "#56B4E9"])
    for axis, (title, ids) in zip(axes, shared.items(), strict=True):
        axis.imshow(ids % 2, cmap=shades, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axis.set_title(title, loc="left", fontsize=9)
        axis.set(yticks=[], xticks=[])
        for edge in axis.spines.values():
            edge.set_visible(True)
    axes[-1].set_xticks([-0.5, 63.5, 127.5, 191.5, 255.5], ["0", "64", "128", "192", "256"])
    axes[-1].set_xlabel("column of the matrix; each row of a strip is a row of the matrix")
    save(fig, out / "scales.svg")


def draw_scaling(out: Path) -> None:
    """Draw a tensor before and after its scale, and the scales of delayed and current scaling over steps."""
    generator = np.random.default_rng(0)
    fig, (before, over) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    x = np.abs(generator.standard_normal(100_000)) * 1e-4
    values = positive_values("E4M3")
    bins = np.arange(-32, 11, 0.5)
    scale = values[-1] / x.max()
    before.hist(np.log2(x), bins, color=GREY, alpha=0.8, label="a gradient as it is")
    before.hist(np.log2(x * scale), bins, color=BLUE, alpha=0.8, label="times its scale")
    before.axvspan(np.log2(values[0]), np.log2(values[-1]), color=ORANGE, alpha=0.25, lw=0, label="range of E4M3")
    before.set(xlabel="log2 |x|", yticks=[], title="One scale moves a tensor into the range")
    before.legend(loc="upper left", fontsize=7.5, frameon=False)

    steps = np.arange(40)
    amax = np.exp(0.25 * generator.standard_normal(40)) * np.where(steps < 20, 1.0, 3.0)
    history = [amax[max(0, step - 8) : step].max() if step else amax[0] for step in steps]
    over.plot(steps, amax, "o-", ms=3, color=SKY, label="amax of the step: what current scaling takes")
    over.step(steps, history, where="mid", color=ORANGE, label="largest of the 8 steps before: delayed scaling")
    late = amax > np.array(history)
    over.plot(steps[late], amax[late], "o", ms=6, mfc="none", color=RED, label="larger than the history: saturates")
    over.set(xlabel="step", ylabel="amax", title="Delayed scaling reads the past", ylim=(0, amax.max() * 1.6))
    over.legend(loc="upper left", fontsize=7.5, frameon=False)
    save(fig, out / "scaling.svg")


def tensors() -> dict[str, torch.Tensor]:
    """Return three tensors of 1024x1024: normal values, with outliers, and with rows of different sizes."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1024, 1024, generator=generator)
    outliers = torch.where(torch.rand(1024, 1024, generator=generator) < 1e-3, 100 * normal, normal)
    rows = normal * 2.0 ** torch.randint(-8, 9, (1024, 1), generator=generator)
    return {"normal": normal, "outliers": outliers, "rows of many sizes": rows}


def relative_errors() -> dict[str, list[tuple[float, float]]]:
    """Return for each recipe the signal to noise in dB, and the share of values that became 0, of each tensor."""
    given = tensors().values()
    errors = {name: [mz.quantization_error(x, name) for x in given] for name in RECIPES}
    return {name: [(float(each.snr_db), float(each.underflow)) for each in row] for name, row in errors.items()}


def print_table() -> None:
    """Print the errors as a table in Markdown."""
    kinds = list(tensors())
    print(
        f"| recipe | {' | '.join(f'{kind}, dB' for kind in kinds)} | {' | '.join(f'{kind}, to 0' for kind in kinds)} |"
    )
    print("|---|" + "---:|" * 2 * len(kinds))
    for name, row in relative_errors().items():
        print(f"| `{name}` | {' | '.join(f'{snr:.1f}' for snr, _ in row)} | {' | '.join(f'{u:.2%}' for _, u in row)} |")


def draw_errors(out: Path) -> None:
    """Draw the signal to noise of a cast in each recipe, and the share of values that became 0."""
    fig, axes = plt.subplots(2, 1, figsize=(9, 5), layout="constrained", sharex=True)
    errors, width = relative_errors(), 0.27
    for axis, part, factor, label in ((axes[0], 0, 1, "signal to noise, dB"), (axes[1], 1, 100, "became 0, %")):
        for i, (kind, colour) in enumerate(zip(tensors(), (SKY, ORANGE, GREEN), strict=True)):
            places = np.arange(len(errors)) + (i - 1) * width
            heights = [factor * row[i][part] for row in errors.values()]
            bars = axis.bar(places, heights, width * 0.92, color=colour, label=kind)
            axis.bar_label(bars, fmt="%.0f" if part == 0 else "%.1f", fontsize=7)
        axis.set_ylabel(label)
        axis.margins(y=0.2)
    axes[0].legend(loc="upper right", frameon=False, ncols=3, fontsize=8)
    axes[1].set_xticks(range(len(errors)), list(errors))
    save(fig, out / "errors.svg")


def box(
    axis: Axes, x: float, y: float, text: str, colour: str = "#EEEEEE", width: float = 1.7, tall: float = 0.62
) -> None:
    """Draw a box with a text in its middle."""
    shape = FancyBboxPatch(
        (x - width / 2, y - tall / 2),
        width,
        tall,
        boxstyle="round,pad=0.02,rounding_size=0.08",
        fc=colour,
        ec="#444444",
    )
    axis.add_patch(shape)
    axis.text(x, y, text, ha="center", va="center", fontsize=8.5)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draw an arrow, with a text beside its middle."""
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#444444", "shrinkA": 0, "shrinkB": 0})
    if text:
        axis.text(
            (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12, text, ha="center", fontsize=7.5, color="#444444"
        )


def draw_linear(out: Path) -> None:
    """Draw the three products of a linear layer, and the casts before them."""
    fig, axis = plt.subplots(figsize=(9.5, 3.9), layout="constrained")
    low, high, product = "#CDE9F8", "#F3F3F3", "#FBE3B5"
    sources = {"x\ninput": 3.2, "W\nweight": 1.8, "dy\noutput gradient": 0.4}
    for label, y in sources.items():
        box(axis, 0.9, y, label, high, 1.5, 0.8)
        box(axis, 3.4, y, "cast: codes and scales,\nrow-wise and column-wise", low, 2.4, 0.8)
        arrow(axis, (1.66, y), (2.18, y))
    products = {
        "output\ny = x · Wᵀ": (3.2, (3.2, 1.8)),
        "input gradient\ndx = dy · W": (1.8, (1.8, 0.4)),
        "weight gradient\ndW = dyᵀ · x": (0.4, (0.4, 3.2)),
    }
    for label, (y, operands) in products.items():
        box(axis, 7.0, y, label, product, 1.9, 0.8)
        for i, operand in enumerate(operands):
            arrow(axis, (4.62, operand), (6.03, y + 0.12 - 0.24 * i))
        arrow(axis, (7.97, y), (8.7, y))
        axis.text(8.78, y, "BF16\nor FP32", va="center", fontsize=8)
    axis.text(0.9, 3.85, "BF16 or FP32", ha="center", fontsize=8)
    axis.text(3.4, 3.85, "8, 6 or 4 bits", ha="center", fontsize=8)
    axis.text(7.0, 3.85, "products", ha="center", fontsize=8)
    axis.set(xlim=(0, 9.4), ylim=(-0.1, 4.1))
    axis.axis("off")
    save(fig, out / "linear.svg")


def draw_data_flow(out: Path) -> None:
    """Draw the way of a call from a region to a kernel, with the folder that each step is in."""
    fig, axis = plt.subplots(figsize=(9.5, 3.1), layout="constrained")
    upper = [
        ("autocast(recipe)", "quantization.py"),
        ("module.forward", "module/, ops/"),
        ("plan", "layer/"),
        ("x_forward(args)", "functional/"),
    ]
    lower = [
        ("quantizer", "tensor/"),
        ("leaf operator", "kernels/"),
        ("reference, or launch", "kernels/, kernels/triton/"),
        ("quantized tensor", "tensor/"),
    ]
    for y, row, colour in ((2.2, upper, "#FBE3B5"), (0.6, lower, "#CDE9F8")):
        for i, (label, folder) in enumerate(row):
            x = 1.1 + 2.45 * i
            box(axis, x, y, label, colour, 1.9, 0.7)
            axis.text(x, y - 0.58, folder, ha="center", fontsize=7.5, family="monospace", color="#444444")
            if i:
                arrow(axis, (x - 1.48, y), (x - 0.97, y))
    axis.plot([8.45, 8.45, 1.1, 1.1], [1.5, 1.32, 1.32, 1.32], color="#444444", lw=1)
    arrow(axis, (1.1, 1.32), (1.1, 0.97))
    axis.set(xlim=(0, 9.6), ylim=(-0.2, 2.7))
    axis.axis("off")
    save(fig, out / "data-flow.svg")


def draw_graph(out: Path) -> None:
    """Draw what each part of the compiler sees of a module's call."""
    fig, axis = plt.subplots(figsize=(9.5, 3.3), layout="constrained")
    rows = [
        (2.7, "Dynamo", "reads Python", ["model code", "module.forward", "one call,\nplan as a constant"], "#FBE3B5"),
        (1.5, "AOTAutograd", "traces tensors", ["cast x", "cast W", "product", "what backward needs"], "#CDE9F8"),
        (
            0.3,
            "Inductor",
            "writes code",
            ["launch of our kernel", "launch of our kernel", "scaled product of PyTorch"],
            "#D5EFE6",
        ),
    ]
    for y, name, does, boxes, colour in rows:
        axis.text(0.1, y + 0.1, name, weight="bold", va="center")
        axis.text(0.1, y - 0.22, does, va="center", fontsize=8, color="#444444")
        step = 7.6 / len(boxes)
        for i, label in enumerate(boxes):
            x = 1.7 + step * (i + 0.5)
            box(axis, x, y, label, colour, step - 0.45, 0.75)
            if i:
                arrow(axis, (x - step / 2 - 0.21, y), (x - step / 2 + 0.21, y))
    axis.set(xlim=(0, 9.5), ylim=(-0.2, 3.2))
    axis.axis("off")
    save(fig, out / "graphs.svg")


def save(fig: plt.Figure, path: Path) -> None:
    """Write a figure without the date, so that the same figure is the same file."""
    fig.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(fig)


FIGURES: tuple[Callable[[Path], None], ...] = (
    draw_formats,
    draw_scales,
    draw_scaling,
    draw_errors,
    draw_linear,
    draw_data_flow,
    draw_graph,
)


def main() -> None:
    """Draw every figure, or print the table."""
    parser = argparse.ArgumentParser(description="Draw the figures of docs/concepts.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "concepts", help="the folder to write into")
    parser.add_argument("--table", action="store_true", help="print the errors of casts, and draw nothing")
    given = parser.parse_args()
    if given.table:
        print_table()
        return
    mpl.use("agg")
    given.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for draw in FIGURES:
            draw(given.out)


if __name__ == "__main__":
    main()
