"""This module has the cases of `bench peers`: a model for each kind of candidate, the sizes of its
input and output, and the work."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bench._by_hand import LinearByHand
from bench._models import (
    GroupedExperts,
    LlamaSizes,
    LoopedExperts,
    OurExperts,
    OurLlama,
    PlainLlama,
    converted_llama,
    our_linear,
    plain_linear,
)

INPUTS = 3  # repetitions take them in turn
MICRO_BATCHES = 4
EXPERTS = 8
# RAGGED is how many of 64 equal shares of the tokens each expert gets when they are not spread evenly. MOVED are tokens
# that go from one expert to another, so that the sizes are multiples of nothing.
RAGGED, MOVED = (1, 17, 5, 8, 0, 3, 19, 11), (7, -7, 13, -13, 0, 21, -21, 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A `Case` is one model at one size."""

    part: str
    name: str
    models: dict[str, Callable[[], nn.Module]]  # a candidate's kind → its model
    x: tuple[int, ...]  # shape of the input
    y: tuple[int, ...]  # and of the output
    flops: float  # of a forward and backward
    linear: tuple[int, int, int] | None = None  # M, K, N, where it is one linear
    micro_batches: int = 1
    is_small: bool = False

    def inputs(self, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return inputs, each with a gradient of the output."""
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        return [
            (torch.randn(self.x, **options).requires_grad_(), torch.randn(self.y, **options)) for _ in range(INPUTS)
        ]


def linear_cases(shapes: list[tuple[int, int, int]], device: str) -> list[Case]:
    smallest = min(map(math.prod, shapes))
    return [
        Case(
            "a",
            f"{m}x{k}x{n}",
            {
                "plain": partial(plain_linear, k, n, device),
                "torchao": partial(plain_linear, k, n, device),
                "mezzotint": partial(our_linear, k, n, device),
                "by hand": partial(LinearByHand, k, n, device, dynamic=True),
                "by hand, scales given": partial(LinearByHand, k, n, device, dynamic=False),
            },
            (m, k),
            (m, n),
            6.0 * m * k * n,
            linear=(m, k, n),
            is_small=math.prod((m, k, n)) == smallest,
        )
        for m, k, n in shapes
    ]


def llama_cases(sizes: LlamaSizes, device: str) -> list[Case]:
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    models: dict[str, Callable[[], nn.Module]] = {
        "plain": partial(PlainLlama, sizes, device),
        "torchao": partial(PlainLlama, sizes, device),
        "mezzotint": partial(OurLlama, sizes, device),
    }
    flops = 6.0 * sizes.batch * sizes.sequence * sizes.weights
    name = f"{sizes.layers} layer{'s' * (sizes.layers > 1)}"
    converted = {**models, "mezzotint": partial(converted_llama, sizes, device)}
    return [
        Case("b", name, models, shape, shape, flops),
        Case("b", f"{name}, converted", converted, shape, shape, flops),
        Case("b", f"{MICRO_BATCHES} micro-batches", models, shape, shape, flops, micro_batches=MICRO_BATCHES),
    ]


def expert_cases(tokens: int, k: int, n: int, device: str) -> list[Case]:
    splits = {
        "balanced": [tokens // EXPERTS] * EXPERTS,
        "ragged": [tokens * part // sum(RAGGED) + moved for part, moved in zip(RAGGED, MOVED, strict=True)],
    }
    return [
        Case(
            "d",
            f"{EXPERTS} experts, {name}",
            {
                "plain": partial(GroupedExperts, sizes, k, n, device),
                "loop": partial(LoopedExperts, sizes, k, n, device),
                "mezzotint": partial(OurExperts, sizes, k, n, device),
            },
            (tokens, k),
            (tokens, n),
            6.0 * tokens * k * n,
        )
        for name, sizes in splits.items()
    ]
