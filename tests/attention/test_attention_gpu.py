"""Attention on a GPU: near the formula in FP32, eager and compiled, FlexAttention where it serves, decoding."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from tests.recipes import RECIPES, gradient

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

HEADS, GROUPS, CHANNELS, SIZE, BATCH = 8, 2, 64, 200, 2
BOUND = 0.02  # norm of the difference over norm: BF16 inside of kernels


def cumulated(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def options_of(case: str, size: int, seed: int = 0) -> dict[str, Any]:
    lengths = cumulated(size - 3 - seed, 150 + seed)
    cu = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    hidden = torch.rand(BATCH, 1, size, size, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[1, :, 5] = True  # a query that sees nothing
    return {
        "causal": {},
        "no_mask": {"attn_mask_type": "no_mask"},
        "window": {"window_size": (20, 0)},
        "padding": {"attn_mask_type": "padding", **cu},
        "padding_causal_bottom_right": {"attn_mask_type": "padding_causal_bottom_right", **cu},
        "alibi": {"core_attention_bias_type": "alibi"},
        "thd": {"attn_mask_type": "padding_causal", "qkv_format": "thd", **cu},
        "thd window": {"attn_mask_type": "padding_causal", "qkv_format": "thd", "window_size": (20, 0), **cu},
        "arbitrary": {"attn_mask_type": "arbitrary", "attention_mask": hidden},
        "recomputed window": {"window_size": (20, 0), "checkpoint_core_attention": True},
        "recomputed": {"checkpoint_core_attention": True},
    }[case]


CASES = ("causal", "no_mask", "window", "padding", "padding_causal_bottom_right", "alibi", "thd", "thd window")
CASES += ("arbitrary", "recomputed window", "recomputed")
FLEX = ("window",)


def moved(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value


def run(call: Any, options: dict[str, Any], size: int, seed: int, device: str, dtype: torch.dtype) -> list[Any]:
    """Output and gradients, of the same numbers everywhere."""
    make = torch.Generator().manual_seed(seed)
    shape = (size + 160,) if options.get("qkv_format") == "thd" else (size, BATCH)
    parts = [
        torch.randn(*shape, n, CHANNELS, generator=make).to(torch.bfloat16).to(device, dtype).requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    ]
    if device == "cuda":
        options = {name: moved(value) for name, value in options.items()}
    y = call(*parts, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(device)
    return [y, *torch.autograd.grad((y.float() * weights).sum(), parts)]


def near(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.isfinite().all()
        away = (one.detach().float().cpu() - other.detach().float()).norm() / other.detach().float().norm()
        assert away.item() < BOUND


@pytest.mark.parametrize("case", CASES)
def test_eager_and_compiled_are_near_the_cpu(case: str) -> None:
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS)
    counter = CompileCounterWithBackend("inductor")
    counters.clear()
    call = torch.compile(module, fullgraph=True, backend=counter)
    for seed in range(2):
        options = options_of(case, SIZE, seed)
        expected = run(module, options, SIZE, seed, "cpu", torch.float32)
        near(run(module, options, SIZE, seed, "cuda", torch.bfloat16), expected)
        near(run(call, options, SIZE, seed, "cuda", torch.bfloat16), expected)
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    assert ("flex_attention" in counter.graphs[0].print_readable(print_output=False)) == (case in FLEX)


@pytest.mark.parametrize("mask", ["no_mask", "causal_bottom_right"])
@pytest.mark.parametrize("sizes", [(200, 300), (300, 200)])
def test_windows_without_gradients(mask: str, sizes: tuple[int, int]) -> None:
    """Compiled; with fewer keys than queries the first queries see nothing."""
    parts = [
        torch.randn(size, BATCH, n, CHANNELS)
        for size, n in zip((*sizes, sizes[1]), (HEADS, GROUPS, GROUPS), strict=True)
    ]
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type=mask, window_size=(20, 3))
    with torch.no_grad():
        y = torch.compile(module, fullgraph=True)(*[x.to("cuda", torch.bfloat16) for x in parts])
        near([y], [module(*parts)])


@pytest.mark.parametrize("case", ["window", "thd window"])
def test_two_graphs_for_several_sizes(case: str) -> None:
    """Multiples of 8: masks of other sizes are padded for the kernel, by PyTorch, in a graph of their own."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS)
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(module, fullgraph=True, backend=counter)
    for seed, size in enumerate((200, 264, 312)):
        options = options_of(case, size, seed)
        expected = run(module, options, size, seed, "cpu", torch.float32)
        near(run(call, options, size, seed, "cuda", torch.bfloat16), expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("options", [{"softmax_type": "learnable"}, {"return_max_logit": True}], ids=str)
def test_options(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, **options).cpu()
    parts = [torch.randn(32, BATCH, n, CHANNELS) for n in (HEADS, GROUPS, GROUPS)]
    expected, got = module(*parts), copy.deepcopy(module).cuda()(*[x.cuda() for x in parts])
    both = zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),)
    for one, other in both:
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_layer(recipe: str) -> None:
    """Eager and compiled: what is fused is rounded once, and a number that is quantized may fall to its neighbour."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    module = mz.TransformerLayer(
        256, 512, 4, num_gqa_groups=2, activation="swiglu", normalization="RMSNorm", device="cuda", **options
    )
    eager = copy.deepcopy(module)
    counter = CompileCounterWithBackend("inductor")
    counters.clear()
    call = torch.compile(module, fullgraph=True, backend=counter)
    angles = mz.RotaryPositionEmbedding(64)(128)
    for seed in range(2):
        x = torch.randn(128, BATCH, 256, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        results = []
        for target, function in ((module, call), (eager, eager)):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(seed)
            with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                y = function(leaf, rotary_pos_emb=angles)
            gradient(y).backward()
            results.append([y, leaf.grad, *[parameter.grad for parameter in target.parameters()]])
            target.zero_grad()
        for one, other in zip(*results, strict=True):
            assert ((one - other).float().norm() / other.float().norm()) < (0.15 if "nvfp4" in recipe else 0.03)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("is_paged", [False, True])
def test_decoding(is_paged: bool) -> None:
    torch.manual_seed(0)
    layer = mz.TransformerLayer(256, 512, 4, num_gqa_groups=2, device="cuda").eval()
    angles = mz.RotaryPositionEmbedding(64)(64)
    pages = {"is_paged": True, "page_size": 16, "total_num_pages": 8} if is_paged else {}
    params = mz.InferenceParams(2, 64, 2, 64, torch.float32, **pages)
    params.allocate_memory(1)
    x = torch.randn(20, 2, 256, device="cuda")
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(layer, fullgraph=True, backend=counter)
    options: dict[str, Any] = {"self_attn_mask_type": "padding_causal", "rotary_pos_emb": angles}
    with torch.no_grad():
        whole = layer(x, rotary_pos_emb=angles)
        made, done = [], 0
        for count in (14, 1, 1, 1, 1, 1, 1):
            params.pre_step(OrderedDict({0: count, 1: count}))
            made.append(call(x[done : done + count], inference_params=params, **options))
            done += count
    torch.testing.assert_close(torch.cat(made), whole, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 2


def test_cross_entropy() -> None:
    logits = torch.randn(64, 1000).to(torch.bfloat16)
    target = torch.randint(0, 1000, (64,))
    results = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device).requires_grad_()
        loss = mz.parallel_cross_entropy(leaf, target.to(device), 0.1)
        results.append((loss.detach().cpu(), torch.autograd.grad(loss.sum(), leaf)[0].cpu()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2**-7, atol=1e-6)
