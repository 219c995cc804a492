"""Extra inputs and outputs of a pipeline: this module tells which come from the caller, and which from another
operation by a channel."""

from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.pointwise import add
from mezzotint.ops.op import BasicOperation


class Wiring:
    """A `Wiring` says, for each operation in order, where its extra inputs come from and where its extra outputs go.

    `inputs[place]` has for each a position among the caller's extra inputs, or the name of a channel. `outputs[place]`
    has for each the name of a channel or None, and a position among the caller's extra outputs or None.
    """

    __slots__ = ("inputs", "num_caller_inputs", "num_caller_outputs", "outputs")

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        self.inputs: list[tuple[int | str, ...]] = []
        self.outputs: list[tuple[tuple[str | None, int | None], ...]] = []
        self.num_caller_inputs = self.num_caller_outputs = 0
        written: list[str] = []
        for place, op in enumerate(basic_ops):
            sources: list[int | str] = []
            for index in range(op.num_extra_inputs):
                channel = op._extra_input_channels.get(index)
                if channel is None:
                    sources.append(self.num_caller_inputs)
                    self.num_caller_inputs += 1
                elif channel in written:
                    sources.append(channel)
                else:
                    later = [i for i, other in enumerate(basic_ops) if _writes(other, channel)]
                    why = f"no earlier producer, only operation {later[0]}" if later else "no producer"
                    raise ValueError(
                        f"operation {place} ({type(op).__name__}) reads the channel {channel!r}, which has {why}: call "
                        "set_extra_output_channel on an operation before it"
                    )
            targets: list[tuple[str | None, int | None]] = []
            for index in range(op.num_extra_outputs):
                channel, to_caller = op._extra_output_channels.get(index, (None, True))
                if channel is not None and channel in written:
                    raise ValueError(
                        f"operation {place} ({type(op).__name__}) writes the channel {channel!r}, which would have "
                        "multiple producers: give it another name"
                    )
                if channel is not None:
                    written.append(channel)
                targets.append((channel, self.num_caller_outputs if to_caller else None))
                self.num_caller_outputs += 1 if to_caller else 0
            self.inputs.append(tuple(sources))
            self.outputs.append(tuple(targets))

    # Forward

    def read(self, basic_ops: Sequence[BasicOperation], extra_inputs: Sequence[Any]) -> list[Any]:
        """Return the caller's extra inputs as their operations want them."""
        made = list(extra_inputs)
        for op, sources in zip(basic_ops, self.inputs, strict=True):
            for index, source in enumerate(sources):
                if not isinstance(source, str):
                    made[source] = op._read_extra_input(index, made[source])
        return made

    def inputs_of(self, place: int, extra_inputs: Sequence[Any], channels: dict[str, Any]) -> tuple[Any, ...]:
        """Return the extra inputs of an operation, from the caller or from channels. One from a channel that the same
        fused operation writes is None, because that operation has it inside."""
        return tuple(
            [
                self._read(place, source, channels) if isinstance(source, str) else extra_inputs[source]
                for source in self.inputs[place]
            ]
        )

    def _read(self, place: int, channel: str, channels: dict[str, Any]) -> Any:
        if channel in channels and channels[channel] is None:
            raise RuntimeError(
                f"operation {place} reads the channel {channel!r} outside its forward fusion, and the operation that "
                "writes it gave None: a fused operation gives what others read"
            )
        return channels.get(channel)

    def give_outputs(self, place: int, op: Any, made: tuple[Any, ...], channels: dict[str, Any]) -> list[Any]:
        """Put extra outputs into their channels, and return those for the caller. `op` is the operation that made
        them."""
        if len(made) != len(self.outputs[place]):
            raise RuntimeError(
                f"operation {place} ({type(op).__name__}) gave {len(made)} extra outputs: it has "
                f"{len(self.outputs[place])}"
            )
        out = []
        for (channel, position), value in zip(self.outputs[place], made, strict=True):
            if channel is not None:
                if value is None and position is not None:
                    raise RuntimeError(
                        f"operation {place} ({type(op).__name__}) gave None for the channel {channel!r}, which is "
                        "public: the caller gets it, so give a tensor, or set output_to_caller=False"
                    )
                channels[channel] = value
            if position is not None:
                out.append(value)
        return out

    def outputs_that_need_grad(self, first: int) -> list[bool]:
        """Return, for each of the caller's extra outputs, whether backward reaches the operation that made it."""
        return [place >= first for place, targets in enumerate(self.outputs) for _, to in targets if to is not None]

    # Backward

    def grads_of_outputs(self, place: int, grads: Sequence[Any], channels: dict[str, Any]) -> tuple[Any, ...]:
        """Return the gradients of an operation's extra outputs: the sum of the caller's and those of the channel's
        readers."""
        found = []
        for channel, position in self.outputs[place]:
            gradient = None if position is None else grads[position]
            found.append(_sum(gradient, None if channel is None else channels.get(channel)))
        return tuple(found)

    def take_input_grads(self, place: int, grads: tuple[Any, ...], channels: dict[str, Any]) -> None:
        for source, gradient in zip(self.inputs[place], grads, strict=True):
            if isinstance(source, str):
                channels[source] = _sum(channels.get(source), gradient)

    def caller_input_grads(self, grads: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the gradients of the caller's extra inputs, in the caller's order."""
        found: list[Any] = [None] * self.num_caller_inputs
        for sources, given in zip(self.inputs, grads, strict=True):
            for source, gradient in zip(sources, given, strict=False):
                if not isinstance(source, str):
                    found[source] = gradient
        return found


def _writes(op: BasicOperation, channel: str) -> bool:
    return any(name == channel for name, _ in op._extra_output_channels.values())


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None:
        return b
    return a if b is None else run_op(add, a, b)
