"""What if: the quantizers that an inspected tensor is tried out with, one for each recipe that can do without state."""

from functools import lru_cache

import torch

from mezzotint.functional.observation import Others
from mezzotint.recipe import RECIPES, QuantizerRole
from mezzotint.tensor.quantizer import Quantizer


@lru_cache
def trials_of(role: str) -> tuple[tuple[str, ...], Others]:
    """Return names of recipes, and their quantizers of a linear's "input", "weight" or "grad_output".

    Delayed scaling is not among them: its scales come from earlier tensors. Where a gradient would be rounded by random
    numbers the input's quantizer stands for it, since to draw them would change what the model computes.
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
