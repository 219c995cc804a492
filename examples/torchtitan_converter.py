"""This model converter for torchtitan lets its linears run under one of Mezzotint's recipes.

    python examples/torchtitan_converter.py        converts a small model, without torchtitan

A configuration of torchtitan (of 2026, whose converters have a `Config` with `build`) names it so:

    model_converters=ModelConvertersContainer.Config(converters=[MezzotintConverter.Config(recipe="mxfp8")])

torchtitan asks a converter for what is below and for nothing else, so that it need not be imported here. This file was
run without it. Its `has_quantization()` knows torchao's converters alone: what depends on that stays off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mezzotint as mz
from mezzotint.recipe import as_recipe


class MezzotintConverter:
    """A `MezzotintConverter` swaps the linears of a model; those whose paths end with
    one of `keep` stay as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """A `Config` holds what a user sets."""

        recipe: str = "current"
        memory: str = "default"
        keep: Sequence[str] = ("output",)

        def build(self, **_: Any) -> "MezzotintConverter":
            """Return the converter, which needs neither the layout of the ranks nor whether the model is compiled."""
            return MezzotintConverter(self)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model: nn.Module) -> None:
        """Convert the model in place, before torchtitan shards and compiles it."""
        keep = tuple(self.config.keep)
        mz.convert(
            model,
            as_recipe(self.config.recipe),
            filter=lambda module, path: False if path.endswith(keep) else None,
            memory=self.config.memory,
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: weights are quantized when they are used."""

    def key_filter(self) -> None:
        """Return None: state dicts have the keys of the model before it was converted."""

    state_dict_transform = format_adapter = key_filter


if __name__ == "__main__":
    layers = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to(torch.bfloat16)
    keys = list(layers.state_dict())
    MezzotintConverter.Config(recipe="mxfp8", memory="lean").build(parallel_dims=None).convert(layers)
    layers(torch.randn(32, 128, dtype=torch.bfloat16)).sum().backward()
    assert list(layers.state_dict()) == keys
    print(mz.convert_report(layers))
