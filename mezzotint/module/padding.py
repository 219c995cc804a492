"""Fp8Padding and Fp8Unpadding: they fill groups of rows up with zeros to sizes that a format needs, and cut them again.

The modules of Mezzotint pad inside. These are for code that pads before a GEMM of its own.
"""

from typing import Any

import torch
from torch import nn

from mezzotint.constants import rup
from mezzotint.layer.parameters import check_features
from mezzotint.quantization import get_default_recipe
from mezzotint.region import current_state


def _align_size(given: int | None) -> int:
    if given is not None:
        return given
    recipe = current_state().recipe
    return (get_default_recipe() if recipe is None else recipe).alignment()


class Fp8Padding(nn.Module):
    """This module pads each group of rows with zeros to a multiple of a number, as quantized products of groups need
    it.

    Args:
        num_gemms: The number of groups.
        align_size: The multiple, or None (the default) for what the recipe in force asks for.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> padded, sizes = mz.Fp8Padding(2, align_size=16)(torch.randn(24, 8), [20, 4])
        >>> padded.shape, sizes
        (torch.Size([48, 8]), [32, 16])
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        _check_options(num_gemms, align_size)
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, list[int]]:
        """Return the padded rows (Σ padded, K) of `inp` (Σ m, K), and the padded sizes. `m_splits` holds the rows of
        each group, as a list or a tensor."""
        splits = _as_list(m_splits)
        _check(inp, splits, self.num_gemms)
        align = _align_size(self.align_size)
        sizes = [rup(size, align) for size in splits]
        if sizes == splits:
            return inp, sizes
        parts: list[Any] = []
        for part, size in zip(inp.split(splits), sizes, strict=True):
            parts.append(torch.nn.functional.pad(part, (0, 0, 0, size - part.shape[0])))
        return torch.cat(parts), sizes


class Fp8Unpadding(nn.Module):
    """This module removes the padding of `Fp8Padding`; it is called with the sizes of groups before padding.

    Args:
        num_gemms: The number of groups.
        align_size: The multiple to which groups were padded, or None (the default) for what the recipe in force asks
            for.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> mz.Fp8Unpadding(2, align_size=16)(torch.randn(48, 8), [20, 4]).shape
        torch.Size([24, 8])
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        _check_options(num_gemms, align_size)
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: Any) -> torch.Tensor:
        """Return the rows (Σ m, K) without padding, given `inp` (Σ padded, K)."""
        splits, align = _as_list(m_splits), _align_size(self.align_size)
        sizes = [rup(size, align) for size in splits]
        _check(inp, sizes, self.num_gemms)
        if sizes == splits:
            return inp
        parts = zip(inp.split(sizes), splits, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def _as_list(m_splits: Any) -> list[int]:
    return m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)


def _check_options(num_gemms: int, align_size: int | None) -> None:
    check_features(num_gemms=num_gemms, **({} if align_size is None else {"align_size": align_size}))


def _check(inp: torch.Tensor, sizes: list[int], groups: int) -> None:
    if len(sizes) != groups:
        raise ValueError(f"m_splits has {len(sizes)} entries: this module has {groups} groups")
    if sum(sizes) != inp.shape[0]:
        raise ValueError(f"inp has {inp.shape[0]} rows, the groups {sum(sizes)}: they must be equal")
