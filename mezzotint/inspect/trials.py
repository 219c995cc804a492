"""Trials of other formats: this module has the quantizers that an inspected tensor is tried with, one for each recipe
that needs no state."""

from functools import lru_cache

import torch

from mezzotint.functional.observation import Others
from mezzotint.recipe import RECIPES, QuantizerRole
from mezzotint.tensor.quantizer import Quantizer


@lru_cache
def trials_of(role: str) -> tuple[tuple[str, ...], Others]:
    """Return names of recipes, and their quantizers of a linear's "input", "weight" or "grad_output".

    Delayed scaling is not among them, because its scales come from earlier tensors. If a gradient would be rounded by
    random numbers, the input's quantizer stands for it, since drawing them would change what the model computes.
    """
    found: dict[str, Quantizer] = {}
    for name, kind in RECIPES.items():
        for tensor_type in (role, "input"):
            made = kind().quantizer(QuantizerRole("linear", tensor_type))
            if isinstance(made, Quantizer) and not _draws(made):
                found[name] = made.with_usage(rowwise=True, columnwise=False)
                break
    return tuple(found), Others(tuple(found.values()))


def _draws(quantizer: Quantizer) -> bool:
    call = quantizer.call_for(torch.bfloat16)
    return call is not None and "rng!" in call.tensors
