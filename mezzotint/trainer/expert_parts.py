"""Where the parameters of a model of the command line lie in the whole one: experts are numbered from 0 on each
process (`distributed/parts.py` has the rest)."""

from dataclasses import replace

from torch import nn

from mezzotint.comm.groups import rank_in
from mezzotint.distributed import parts
from mezzotint.trainer.mixture import Mixture


def find_numbered_placements(model: nn.Module) -> dict[str, parts.ShardPlacement]:
    """Of each parameter, by its name on this process."""
    numbers = _expert_numbers(model)
    return {name: replace(place, name=numbers.get(name, name)) for name, place in parts.find_placements(model).items()}


def _expert_numbers(model: nn.Module) -> dict[str, str]:
    """Names of the weights of experts on this process → in the whole model."""
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
