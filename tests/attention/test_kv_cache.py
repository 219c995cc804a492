"""Decoding through the cache gives what a forward over the whole sequence gives."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from mezzotint.attention.kv_cache import KVCacheManager

HEADS, GROUPS, CHANNELS, LONGEST, BATCH = 4, 2, 8, 12, 3
LAYOUTS = ("bshd", "sbhd", "thd")
# Sequence → new tokens. A ragged prefill; one token each; chunks; 1 ends and 7 comes in its place, before the others;
# 0 ends; all but one end; 1 begins anew.
STEPS: list[dict[int, int]] = [
    {0: 5, 1: 3},
    {0: 1, 1: 1},
    {0: 2, 1: 4, 2: 1},
    {7: 6, 2: 1, 0: 1},
    {7: 1, 2: 2, 0: 3},
    {2: 1, 7: 1},
    {2: 1},
    {1: 4, 2: 1},
]
over_caches = pytest.mark.parametrize("is_paged", [False, True])


def params_of(is_paged: bool, **options: Any) -> mz.InferenceParams:
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 8} if is_paged else {}
    return mz.InferenceParams(BATCH, LONGEST, GROUPS, CHANNELS, torch.float32, device="cpu", **pages, **options)


class Stream:
    """Queries, keys and values of sequences that grow; a sequence that comes back is another one."""

    def __init__(self) -> None:
        self.held: dict[int, list[torch.Tensor]] = {}
        self.make = torch.Generator().manual_seed(0)

    def grow(self, step: dict[int, int]) -> dict[int, list[torch.Tensor]]:
        """What each sequence has of new: [n, heads, channels]."""
        self.held = {name: parts for name, parts in self.held.items() if name in step}
        fresh = {}
        for name, count in step.items():
            fresh[name] = [torch.randn(count, n, CHANNELS, generator=self.make) for n in (HEADS, GROUPS, GROUPS)]
            before = self.held.get(name, [part[:0] for part in fresh[name]])
            self.held[name] = [torch.cat(pair) for pair in zip(before, fresh[name], strict=True)]
        return fresh

    def whole(self, module: Any, name: int, **options: Any) -> torch.Tensor:
        """A forward over all of the sequence: [s, h · d]."""
        return module(*[part[None] for part in self.held[name]], qkv_format="bshd", attn_mask_type="causal", **options)[
            0
        ]


def arrange(fresh: dict[int, list[torch.Tensor]], layout: str) -> list[torch.Tensor]:
    """As a batch, with padding that must not matter."""
    rows = [*fresh.values()]
    if layout == "thd":
        return [torch.cat([*parts, torch.full_like(parts[0][:1], 9.0)]) for parts in zip(*rows, strict=True)]
    longest = max(row[0].shape[0] for row in rows)
    padded = [
        torch.stack([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.shape[0]), value=9.0) for x in parts])
        for parts in zip(*rows, strict=True)
    ]
    return [x.transpose(0, 1) for x in padded] if layout == "sbhd" else padded


def rows_of(y: torch.Tensor, step: dict[int, int], layout: str) -> dict[int, torch.Tensor]:
    """The output of each sequence."""
    if layout == "thd":
        parts = y[: sum(step.values())].split([*step.values()])
    else:
        y = y.transpose(0, 1) if layout == "sbhd" else y
        parts = tuple(row[:count] for row, count in zip(y, step.values(), strict=True))
    return dict(zip(step, parts, strict=True))


@over_caches
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}, {"core_attention_bias_type": "alibi"}])
def test_steps_equal_the_whole(layout: str, is_paged: bool, options: dict[str, Any]) -> None:
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format=layout, layer_number=2)
    params, stream = params_of(is_paged), Stream()
    params.allocate_memory(2)
    for step in STEPS:
        fresh = stream.grow(step)
        params.pre_step(OrderedDict(step))
        y = module(*arrange(fresh, layout), attn_mask_type="padding_causal", inference_params=params, **options)
        for name, got in rows_of(y, step, layout).items():
            expected = stream.whole(module, name, **options)[-step[name] :]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert params.sequences == {1: 4, 2: 7}


@over_caches
def test_the_cache_holds_the_keys(is_paged: bool) -> None:
    """Bit for bit, in the order of the batch."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd", layer_number=1)
    params, stream = params_of(is_paged), Stream()
    params.allocate_memory(1)
    for step in STEPS:
        fresh = stream.grow(step)
        before = [params.sequences.get(name, 0) for name in step]
        params.pre_step(OrderedDict(step))
        assert params.get_seqlens_pre_step()[: len(step)].tolist() == before
        module(*arrange(fresh, "bshd"), attn_mask_type="padding_causal", inference_params=params)
        keys, values = params.convert_paged_to_nonpaged(1) if is_paged else params.cache_manager.cache[1]
        for row, name in enumerate(step):
            size = len(stream.held[name][1])
            assert torch.equal(keys[row, :size], stream.held[name][1])
            assert torch.equal(values[row, :size], stream.held[name][2])
    params.reset()
    assert not params.sequences
    assert not params.cu_seqlens_kv.any()


@over_caches
def test_a_finished_sequence_leaves_nothing(is_paged: bool) -> None:
    """A masked value counts 0, but 0 · NaN is NaN."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd")
    params, stream = params_of(is_paged), Stream()
    params.allocate_memory(1)
    params.pre_step(OrderedDict({0: 9}))
    poison = [torch.full((1, 9, n, CHANNELS), torch.nan) for n in (HEADS, GROUPS, GROUPS)]
    module(*poison, attn_mask_type="padding_causal", inference_params=params)
    fresh = stream.grow({1: 2})
    params.pre_step(OrderedDict({1: 2}))
    y = module(*arrange(fresh, "bshd"), attn_mask_type="padding_causal", inference_params=params)
    torch.testing.assert_close(y[0], stream.whole(module, 1), rtol=1e-5, atol=1e-6)


def test_pages_are_taken_and_given_back() -> None:
    params = params_of(True)
    manager = params.cache_manager
    for step in STEPS:
        params.pre_step(OrderedDict(step))
        used = sum(-(-size // 4) for size in params.sequences.values())
        assert len(manager.free_pages) == 8 - used
        taken = [page for pages in manager.allocated_pages.values() for page in pages]
        assert sorted(taken + manager.free_pages) == [*range(8)]
    small = mz.InferenceParams(2, 8, GROUPS, CHANNELS, torch.float32, is_paged=True, page_size=4, total_num_pages=2)
    small.pre_step(OrderedDict({0: 5}))
    with pytest.raises(RuntimeError, match="free pages"):
        small.pre_step(OrderedDict({0: 1, 1: 1}))
    assert small.sequences == {0: 5}
    small.pre_step(OrderedDict({1: 8}))  # 0 ends


@pytest.mark.cover(0)
@pytest.mark.compile
@over_caches
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_for_every_step(layout: str, is_paged: bool) -> None:
    """Sequences grow, end and begin: nothing of it is in the graph."""
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format=layout)
    params, other, stream = params_of(is_paged), params_of(is_paged), Stream()
    for each in (params, other):
        each.allocate_memory(1)
    counter = CompileCounterWithBackend("aot_eager")
    counters.clear()
    call = torch.compile(module, fullgraph=True, backend=counter)
    decoding: list[dict[int, int]] = [{0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1, 0: 1}, {1: 1, 5: 1}, {5: 1, 6: 1}]
    for step in decoding:
        parts = arrange(stream.grow(step), layout)
        results = []
        for function, held in ((call, params), (module, other)):
            held.pre_step(OrderedDict(step))
            with torch.no_grad():
                results.append(function(*parts, attn_mask_type="padding_causal", inference_params=held))
        assert torch.equal(*results)
        for name, got in rows_of(results[0], step, layout).items():
            torch.testing.assert_close(got, stream.whole(module, name)[-1:], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


def attend(module: Any, params: mz.InferenceParams, layout: str = "bshd", tokens: int = 2, batch: int = 2) -> Any:
    shape = {"bshd": (batch, tokens), "sbhd": (tokens, batch), "thd": (batch * tokens,)}[layout]
    q, k, v = (torch.randn(*shape, n, CHANNELS) for n in (HEADS, GROUPS, GROUPS))
    return module(q, k, v, qkv_format=layout, attn_mask_type="padding_causal", inference_params=params)


@over_caches
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_pre_step_was_not_told_of(layout: str, is_paged: bool) -> None:
    """Fewer than it was told: the cache would hold zeros for the rest."""
    module, params = mz.DotProductAttention(HEADS, CHANNELS, GROUPS), params_of(is_paged)
    with pytest.raises(ValueError, match="call its pre_step"):
        attend(module, params, layout)
    params.pre_step(OrderedDict({0: 2, 1: 3}))
    with pytest.raises(ValueError, match=r"told of \[2, 3\] new tokens"):
        attend(module, params, layout)
    attend(module, params, layout, tokens=3)
    params.pre_step(OrderedDict({0: 1, 1: 1, 2: 1}))
    with pytest.raises(ValueError, match=r"told of \[1, 1, 1\] new tokens"):
        attend(module, params, layout, tokens=1)
    params.reset()
    with pytest.raises(ValueError, match="call its pre_step"):
        attend(module, params, layout)


def test_a_layer_of_the_cache_is_one_attentions() -> None:
    """Layers without a number are all number 1."""
    first, second, params = (
        mz.DotProductAttention(HEADS, CHANNELS, GROUPS),
        mz.DotProductAttention(HEADS, CHANNELS, GROUPS),
        params_of(False),
    )
    params.pre_step(OrderedDict({0: 2, 1: 2}))
    attend(first, params)
    attend(first, params)
    with pytest.raises(ValueError, match="layer_number is 1 in two attentions"):
        attend(second, params)
    params.reset()
    params.pre_step(OrderedDict({0: 2, 1: 2}))
    attend(second, params)


@over_caches
def test_gradients_and_modes(is_paged: bool) -> None:
    """The cache keeps no graph of a step, and is written to in any mode, whichever it was made in."""
    module, params = mz.DotProductAttention(HEADS, CHANNELS, GROUPS), params_of(is_paged)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.enable_grad()):
        params.pre_step(OrderedDict({0: 1, 1: 1}))
        with mode:
            q, k, v = (torch.randn(2, 1, n, CHANNELS).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
            y = module(q, k, v, qkv_format="bshd", attn_mask_type="padding_causal", inference_params=params)
            if torch.is_grad_enabled():
                y.sum().backward()
                assert q.grad is not None
                assert k.grad is None
        assert not any(buffer.requires_grad for buffer in params.cache_manager.cache[1])


def test_own_cache_manager() -> None:
    class Own(KVCacheManager):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

    manager = mz.InferenceParams(1, 8, 2, 4, torch.float32, custom_cache_manager=Own, device="cpu").cache_manager
    assert manager.options == {
        "max_batch_size": 1,
        "max_seqlen": 8,
        "num_heads": 2,
        "head_dim_k": 4,
        "dtype": torch.float32,
        "head_dim_v": 4,
    }
    with pytest.raises(NotImplementedError):
        manager.allocate_memory(1)


def test_bad_input() -> None:
    params = params_of(False)
    with pytest.raises(ValueError, match="sequence 0 has 13 new tokens"):
        params.pre_step(OrderedDict({0: LONGEST + 1}))
    with pytest.raises(ValueError, match="sequence 0 has 0 new tokens"):
        params.pre_step(OrderedDict({0: 0}))
    with pytest.raises(ValueError, match="step_dict has 4 sequences"):
        params.pre_step(OrderedDict.fromkeys(range(4), 1))
    with pytest.raises(ValueError, match="qkv_format is 'hd'"):
        params.step(1, torch.zeros(1), torch.zeros(1), "hd")
    with pytest.raises(ValueError, match="num_heads_kv is None"):
        mz.InferenceParams(1, 8)
    with pytest.raises(ValueError, match="dtype is None"):
        mz.InferenceParams(1, 8, 2, 4)
    with pytest.raises(ValueError, match="page_size is None"):
        mz.InferenceParams(1, 8, 2, 4, torch.float32, is_paged=True, total_num_pages=2)
    with pytest.raises(ValueError, match="no multiple of page_size=3"):
        mz.InferenceParams(1, 8, 2, 4, torch.float32, is_paged=True, total_num_pages=2, page_size=3)
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd")
    parts = [torch.zeros(BATCH + 1, 1, n, CHANNELS) for n in (HEADS, GROUPS, GROUPS)]
    with pytest.raises(ValueError, match="needs a padding mask"):
        module(*parts, inference_params=params)
    with pytest.raises(ValueError, match="the batch has 4 rows"):
        module(*parts, attn_mask_type="padding_causal", inference_params=params)
    narrow = mz.InferenceParams(BATCH, LONGEST, GROUPS, CHANNELS // 2, torch.float32, device="cpu")
    narrow.pre_step(OrderedDict({0: 1}))
    with pytest.raises(ValueError, match="was made for 2 heads of 4 channels"):
        attend(module, narrow)
    assert "max_batch_size=3" in repr(params)
    assert "page_size=4" in repr(params_of(True))
