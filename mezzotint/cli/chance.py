"""This module tells what chance does: runs that differ in nothing but the seed end at different losses.

The band is the distance between the lowest and the highest of them. Two runs of one recipe can be as far apart, so a
gap that is no larger says nothing about what was changed.
"""

from collections.abc import Sequence

WITHIN = "within chance"


def band_width(losses: Sequence[float]) -> float | None:
    """Return how far apart the final losses of several seeds are, or None for less than two."""
    return max(losses) - min(losses) if len(losses) > 1 else None


def in_bands(gap: float, width: float | None) -> str:
    """Return a gap in units of the band, "+2.5 bands", or that it is within chance, or "" if no band is known."""
    if width is None:
        return ""
    return WITHIN if abs(gap) <= width else f"{gap / width:+.1f} bands" if width else "beyond a band of 0"
