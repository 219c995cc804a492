"""This module says where the parameters of a rank lie in the whole model when experts are spread over ranks: each rank
numbers its own experts from 0 (`distributed/parts.py` does the rest)."""

from dataclasses import replace

from torch import nn

from mezzotint.comm.groups import rank_in
from mezzotint.distributed import parts
from mezzotint.trainer.mixture import Mixture


def find_numbered_placements(model: nn.Module) -> dict[str, parts.ShardPlacement]:
    """Return where each parameter lies in the whole model, by the parameter's name on this rank."""
    numbers = _expert_numbers(model)
    return {name: replace(place, name=numbers.get(name, name)) for name, place in parts.find_placements(model).items()}


def _expert_numbers(model: nn.Module) -> dict[str, str]:
    """Return the names in the whole model of the expert weights on this rank, by their names here."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, Mixture):
            continue
        rank = rank_in(module.group)
        for part in ("fc1", "fc2"):
            count = getattr(module.experts, part).num_gemms
            for number in range(count):
                stem = f"{path}.experts.{part}.weight"
                found[f"{stem}{number}"] = f"{stem}{rank * count + number}"
    return found
