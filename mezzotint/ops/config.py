"""The configuration of an operation: all that a run of it reads besides tensors, as one value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzotint.functional.linear import LinearQuantizers
from mezzotint.layer.plan import LayerConfig, Plan, delayed_request
from mezzotint.recipe import QuantizerRequest, Recipe


@dataclass(frozen=True)
class OperationConfig(LayerConfig):
    """An `OperationConfig` adds to a `LayerConfig` what an operation of this package reads, and so can make a stand-in
    of it: an operation of the same class that computes the same on other tensors."""

    operation: type | None = None  # None: a class of a user's, of which nobody knows what it reads
    values: tuple[tuple[str, Any, str], ...] = ()  # name, value, and its text, since 0.0 == -0.0 and 1 == True
    tensors: tuple[str, ...] = ()  # the names of its parameters
    has_quantizers: bool = False
    input_channels: tuple[tuple[int, str], ...] = ()
    output_channels: tuple[tuple[int, tuple[str, bool]], ...] = ()

    def quantize_plan(self, recipe: Recipe, name: str, forward: bool, backward: bool) -> Plan:
        """Return the plan of a `Quantize` of this name, which quantizes the input, its gradient, or both."""
        asked = [
            own.quantizer(self.role(name, 0, tensor_type)) if wanted and own is not None else None
            for tensor_type, wanted, own in (
                ("input", forward, recipe.of(0, "input")),
                ("grad_output", backward, recipe.of(0, "grad_output")),
            )
        ]
        requests = [delayed_request(each) for each in asked if isinstance(each, QuantizerRequest)]
        x, dy = [
            delayed_request(each).scaled_quantizer(is_forward) if isinstance(each, QuantizerRequest) else each
            for each, is_forward in zip(asked, (True, False), strict=True)
        ]
        return self.state_plan(requests[0] if requests else None, (LinearQuantizers(x, None, dy),))

    def stand_in(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return an operation with these parameters. An attribute that the configuration does not have is an error when
        it is read."""
        assert self.operation is not None
        made: Any = object.__new__(self.operation)
        nn.Module.__init__(made)
        made._parameters.update(dict.fromkeys(made._parameter_names))
        made._parameters.update(zip(self.tensors, tensors, strict=True))
        made.__dict__.update({name: value for name, value, _ in self.values})
        made.__dict__.update(
            _config=self,
            _extra_input_channels=dict(self.input_channels),
            _extra_output_channels=dict(self.output_channels),
        )
        return made
