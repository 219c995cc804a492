"""quantization_error: this function says what one tensor loses when it is quantized."""

from typing import Any

import torch

from mezzotint.functional.observation import statistics_of
from mezzotint.inspect.figures import COUNTED, Figures, exponents_of, figures_of, map_of
from mezzotint.inspect.plot import draw_error
from mezzotint.kernels._lib import run_op
from mezzotint.kernels.statistics import statistics_whole
from mezzotint.notebook import html_table
from mezzotint.recipe import QuantizerRole, Recipe, as_recipe
from mezzotint.tensor.quantize import quantize_scaled
from mezzotint.tensor.quantizer import Quantizer


class QuantizationError:
    """A `QuantizationError` has the figures of a tensor against its quantized copy (`inspect/figures.py` defines each).

    `error.snr_db`, `error.underflow`, … are read as attributes; `exponents` is e → (elements of x, of the copy) with
    2^e ≤ |·| < 2^(e+1), and `map` is 16 rows of 16 cells, each with the same figures. `table` is what was gathered on
    the device: nothing waits for it until a figure is read.
    """

    def __init__(self, table: torch.Tensor, shape: tuple[int, ...], title: str) -> None:
        self.table, self.shape, self.title = table, shape, title

    @property
    def figures(self) -> Figures:
        """Return the figures of the whole tensor."""
        return figures_of(run_op(statistics_whole, self.table).tolist())

    @property
    def exponents(self) -> dict[int, tuple[int, int]]:
        return exponents_of(self.table)

    @property
    def map(self) -> list[list[Figures]]:
        return map_of(self.table)

    def __getattr__(self, name: str) -> Any:
        if name not in Figures.__slots__ and name != "nonfinite":
            raise AttributeError(f"QuantizationError has no figure {name!r}: it has {', '.join(Figures.__slots__)}")
        return getattr(self.figures, name)

    def __repr__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([self._head(), *(f"  {name:{width}} {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        """Return the figures as a table for a notebook."""
        return html_table(self._rows(), note=self._head())

    def _head(self) -> str:
        return f"QuantizationError of {tuple(self.shape)} by {self.title}"

    def _rows(self) -> list[tuple[str, str]]:
        """Return the names and values of the figures that are printed."""
        found = self.figures
        odd = [f"{name} {getattr(found, name)}" for name in COUNTED if getattr(found, name)]
        return [
            ("signal to noise", _number(found.snr_db, "dB")),
            ("mean square error", _number(found.mse)),
            ("largest relative", _number(found.relative_error)),
            ("became zero", _share(found.underflow)),
            ("saturated", _share(found.saturated)),
            ("amax", _number(found.amax)),
            ("scale", _scales(found)),
            ("not finite", ", ".join(odd) or "none"),
        ]

    def plot(self, axes: Any = None) -> Any:
        """Draw the exponents of x and of its copy, and the noise over the tensor; return the matplotlib figure.

        `axes` may be two axes of your own to draw on.
        """
        return draw_error(self, axes)


def quantization_error(
    x: torch.Tensor, quantizer: "Quantizer | Recipe | str", role: str = "input"
) -> QuantizationError:
    """Quantize a tensor and return what was lost.

    Args:
        x: The tensor, of a floating-point dtype.
        quantizer: A quantizer, or a recipe or its short name, which is asked for its quantizer.
        role: Which tensor of a linear layer a recipe is asked for: "input" (the default), "weight" or "grad_output".

    Returns:
        A `QuantizationError`, which prints as a table and can draw itself (`plot`).

    Raises:
        TypeError: If `x` is no tensor of a floating-point dtype.
        ValueError: If there is no such role or recipe, or the recipe is `DelayedScaling`, whose scales come from
            earlier tensors: give a `Float8Quantizer` with its scale instead.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> error = mz.quantization_error(torch.ones(32, 32), "mxfp8")
        >>> error.shape
        (32, 32)
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x is {kind}: give a floating-point torch.Tensor")
    if role not in ("input", "weight", "grad_output"):
        raise ValueError(f"role is {role!r}: give 'input', 'weight' or 'grad_output'")
    title = quantizer if isinstance(quantizer, str) else type(quantizer).__name__
    made: Any = quantizer
    if not isinstance(made, Quantizer):
        made = as_recipe(made).quantizer(QuantizerRole("linear", role))
        if not isinstance(made, Quantizer):
            raise ValueError(
                f"quantizer is {title}, whose scales come from earlier tensors: give a recipe that scales by the "
                "tensor at hand, or a Float8Quantizer with its scale"
            )
    with torch.no_grad():
        x_q = quantize_scaled(x.detach(), made.frozen().with_usage(rowwise=True, columnwise=False), None)[0]
        return QuantizationError(statistics_of(x, x_q), tuple(x.shape), title)


def _number(value: float | None, unit: str = "") -> str:
    return "nothing to compare" if value is None else f"{value:.4g} {unit}".rstrip()


def _share(value: float | None) -> str:
    return "nothing to compare" if value is None else f"{100 * value:.3g} %"


def _scales(found: Figures) -> str:
    low, high = found.smallest_scale, found.largest_scale
    if low is None or high is None:
        return "none"
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
