"""The picture of a quantization error; matplotlib is imported when one is drawn."""

import importlib
import math
from typing import Any


def draw_error(error: Any, axes: Any = None) -> Any:
    """Draw exponents and map of a `QuantizationError`; return the figure."""
    if axes is None:
        try:
            pyplot = importlib.import_module("matplotlib.pyplot")
        except ImportError as missing:
            raise ImportError(
                "plot() draws with matplotlib, which is not installed: pip install 'mezzotint[cli]'"
            ) from missing
        _, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    left, right = axes
    counts = error.exponents
    places = list(counts)
    left.bar([e - 0.2 for e in places], [before for before, _ in counts.values()], 0.4, label="before")
    left.bar([e + 0.2 for e in places], [after for _, after in counts.values()], 0.4, label="quantized")
    left.set(xlabel="exponent: 2^e ≤ |x| < 2^(e+1)", ylabel="elements", yscale="log", title=error.title)
    left.legend()
    noise = [[_height(cell.snr_db) for cell in row] for row in error.map]
    shown = right.imshow(noise, cmap="viridis", aspect="auto", interpolation="nearest")
    right.set(title="signal to noise, dB", xlabel="columns", ylabel="rows", xticks=[], yticks=[])
    right.figure.colorbar(shown, ax=right)
    return right.figure


def _height(value: float | None) -> float:
    """Return the value, or NaN, which has no colour, for a cell without a value or without noise."""
    return math.nan if value is None or math.isinf(value) else value
