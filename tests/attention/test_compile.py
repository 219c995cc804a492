"""DotProductAttention compiles whole: one graph for repeated steps, whatever the lengths, two for several sizes."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz

pytestmark = pytest.mark.compile

HEADS, GROUPS, CHANNELS, BATCH = 4, 2, 8, 2


CASES = (
    "causal",
    "recomputed",
    "padding",
    "padding_causal_bottom_right",
    "padding mask",
    "arbitrary",
    "window",
    "alibi",
    "bias",
    "thd",
    "thd window",
)
QUICK = ("causal", "padding mask", "bias", "thd window")  # one of each kind of mask


def cumulated(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def options_of(case: str, size: int, seed: int) -> dict[str, Any]:
    """Arguments of a call, with lengths and masks that differ from step to step."""
    lengths = cumulated(size - seed, 2 + seed)
    cu = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    make = torch.Generator().manual_seed(seed)
    return {
        "causal": {},
        "recomputed": {"checkpoint_core_attention": True, "window_size": (3, 0)},
        "padding": {"attn_mask_type": "padding", **cu},
        "padding_causal_bottom_right": {"attn_mask_type": "padding_causal_bottom_right", **cu},
        "padding mask": {
            "attn_mask_type": "padding_causal",
            "attention_mask": (torch.arange(size) >= torch.tensor([[size - seed], [2]]))[:, None, None],
        },
        "arbitrary": {
            "attn_mask_type": "arbitrary",
            "attention_mask": torch.rand(BATCH, 1, size, size, generator=make) < 0.3,
        },
        "window": {"window_size": (2, 0)},
        "alibi": {"core_attention_bias_type": "alibi"},
        "bias": {
            "core_attention_bias_type": "pre_scale_bias",
            "core_attention_bias": torch.randn(1, HEADS, size, size, generator=make),
        },
        "thd": {"attn_mask_type": "padding_causal", "qkv_format": "thd", **cu},
        "thd window": {"attn_mask_type": "padding_causal", "qkv_format": "thd", "window_size": (2, 0), **cu},
    }[case]


def sample(layout: str, size: int, seed: int) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    shape = (size + 3,) if layout == "thd" else (size, BATCH)
    return [
        torch.randn(*shape, n, CHANNELS, generator=make).to(torch.bfloat16).requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    ]


def results(call: Any, size: int, seed: int, options: dict[str, Any]) -> list[torch.Tensor]:
    parts = sample(options.get("qkv_format", "sbhd"), size, seed)
    torch.manual_seed(seed)
    y = call(*parts, **options)
    y, *extra = y if isinstance(y, tuple) else (y,)
    return [y, *extra, *torch.autograd.grad(y.float().square().sum(), parts)]


def compiled(module: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    counters.clear()
    return torch.compile(module, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_one_graph_for_repeated_steps(case: str) -> None:
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS)
    call, counter = compiled(module)
    for seed in range(3):
        options = options_of(case, 8, seed)
        for one, other in zip(results(call, 8, seed, options), results(module, 8, seed, options), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.cover(0)
@pytest.mark.parametrize("case", ["causal", "padding mask", "arbitrary", "alibi", "thd window"])
def test_two_graphs_for_several_sizes(case: str) -> None:
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS)
    call, counter = compiled(module)
    for seed, size in enumerate((6, 9, 12, 7)):
        options = options_of(case, size, seed)
        for one, other in zip(results(call, size, seed, options), results(module, size, seed, options), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_type": "learnable"},
        {"softmax_type": "off-by-one"},
        {"return_max_logit": True},
        {"attention_dropout": 0.3},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    """With a sink and with dropout PyTorch's kernel is a decomposition, the same in both."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, **options).cpu()
    call, counter = compiled(module)
    for seed in range(2):
        for one, other in zip(results(call, 8, seed, {}), results(module, 8, seed, {}), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-9)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["thd window", "padding_causal_bottom_right", "alibi"])
def test_inductor(case: str) -> None:
    """The kernel is not looked into, and masks are exact: the same bits."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS)
    call, counter = compiled(module, "inductor")
    for seed in range(2):
        options = options_of(case, 8, seed)
        for one, other in zip(results(call, 8, seed, options), results(module, 8, seed, options), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1
