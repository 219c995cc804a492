"""Queries, keys and values out of one projection, split and turned at once: bit for bit what split, turn, and a
concatenation of gradients give, in every layout; and that is what attention does."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import mezzotint as mz
from mezzotint import hw
from mezzotint.attention import multihead
from mezzotint.attention.rope import apply_fused_qkv_rotary_pos_emb, split_turned
from mezzotint.kernels.rope import rope_join, rope_split
from tests.attention.test_rope import turn
from tests.recipes import RECIPES
from tests.values import raw

BF16 = torch.bfloat16
HEADS, GROUPS, CHANNELS, SIZE, BATCH, HIDDEN = 4, 2, 8, 5, 3, 24
WIDTH = (HEADS + 2 * GROUPS) * CHANNELS
ANGLES = mz.RotaryPositionEmbedding(CHANNELS).cpu()(SIZE + 3)
PAIRED = mz.RotaryPositionEmbedding(CHANNELS, 0.5, interleaved=True).cpu()(SIZE + 3)
LENGTHS = torch.tensor([0, 4, 4, SIZE * BATCH], dtype=torch.int32)
LAYOUTS = {"sbhd": (SIZE, BATCH), "bshd": (BATCH, SIZE), "thd": (SIZE * BATCH,)}
KINDS = (
    {"fuse_qkv_params": True},
    {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "rotary_pos_interleaved": True},
    {"fuse_qkv_params": False},
)


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def split_heads(mixed: torch.Tensor, heads: int, groups: int, blocks: int) -> list[torch.Tensor]:
    """mixed [.., width] → q [.., h, d], k and v [.., g, d], head by head."""
    found: list[list[torch.Tensor]] = [[], [], []]
    rest = list(mixed.chunk(heads + 2 * groups, -1))
    for _ in range(blocks):
        for part, count in zip(found, (heads, groups, groups), strict=True):
            part += [rest.pop(0) for _ in range(count // blocks)]
    return [torch.stack(part, -2) for part in found]


def turned_apart(
    mixed: torch.Tensor, heads: int, groups: int, blocks: int, freqs: Any, layout: str, *others: Any
) -> tuple[torch.Tensor, ...]:
    """`split_turned` by its parts."""
    q, k, v = split_heads(mixed, heads, groups, blocks)
    starts, interleaved, cu = others
    q = mz.apply_rotary_pos_emb(q, freqs[0], layout, starts, interleaved, cu_seqlens=cu[0])
    k = mz.apply_rotary_pos_emb(k, freqs[1], layout, starts, interleaved, cu_seqlens=cu[1])
    return q, k, v


def assert_same(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(raw(one), raw(other))


@pytest.mark.parametrize("blocks", [1, GROUPS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_and_gradients(layout: str, blocks: int) -> None:
    """Angles of one shape or for each sequence, of queries and keys alike or not; gradients as SDPA lays them."""
    starts = torch.tensor([2, 0, 3, 9], dtype=torch.int32)
    cu = (LENGTHS, LENGTHS) if layout == "thd" else (None, None)
    mixed = draw(*LAYOUTS[layout], WIDTH).requires_grad_()
    for freqs in ((ANGLES, ANGLES), (ANGLES, 2 * ANGLES), (PAIRED, PAIRED)):
        for begin in (None, starts):
            arguments = (HEADS, GROUPS, blocks, freqs, layout, begin, freqs[0] is PAIRED, cu)
            got, wanted = split_turned(mixed, *arguments), turned_apart(mixed, *arguments)
            assert all(part.is_contiguous() for part in got)
            assert_same(got, wanted)
            grads = [draw(*part.transpose(0, -2).shape, seed=1).transpose(0, -2) for part in got]
            (dmixed,) = torch.autograd.grad(got, mixed, grads)
            assert dmixed.is_contiguous()
            assert_same([dmixed], torch.autograd.grad(wanted, mixed, grads))


@pytest.mark.parametrize("interleaved", [False, True])
def test_against_complex_numbers(interleaved: bool) -> None:
    mixed = draw(SIZE, 1, WIDTH, dtype=torch.float32).requires_grad_()
    freqs = mz.RotaryPositionEmbedding(4, interleaved=interleaved).cpu()(SIZE)
    got = split_turned(mixed, HEADS, GROUPS, GROUPS, (freqs, freqs), "sbhd", None, interleaved)
    q, k, v = split_heads(mixed, HEADS, GROUPS, GROUPS)
    wanted = [
        torch.stack([torch.stack([turn(x, s, 4, interleaved) for x in part[s, 0]])[None] for s in range(SIZE)])
        for part in (q, k)
    ]
    weights = [draw(*part.shape, dtype=torch.float32, seed=2) for part in got]
    sums = [
        sum((part.double() * weight).sum() for part, weight in zip(parts, weights, strict=True))
        for parts in (got, (*wanted, v))
    ]
    for part, expected in zip(got, (*wanted, v), strict=True):
        torch.testing.assert_close(part.double(), expected.double(), rtol=1e-5, atol=1e-5)
    (dmixed,), (expected,) = (torch.autograd.grad(total, mixed) for total in sums)
    torch.testing.assert_close(dmixed, expected, rtol=1e-5, atol=1e-5)


def test_values_pass() -> None:
    """Every bit, of what is not a number too; so do channels behind the turned ones."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(1, -1, 4, 8)
    cos, sin = (draw(1, codes.shape[1], 4, dtype=torch.float32, seed=seed) for seed in range(2))
    parts = rope_split(codes.view(BF16).flatten(2), [cos, sin], 2, 1, 1, False)
    q, k, v = (part.view(torch.int16) for part in parts)
    assert torch.equal(v, codes[:, :, 3:])
    assert torch.equal(torch.cat((q, k), 2)[..., 4:], codes[:, :, :3, 4:])
    back = rope_join(*parts, [cos, sin], 1, False).view(torch.int16).view(codes.shape)
    assert torch.equal(back[:, :, 3:], codes[:, :, 3:])
    assert torch.equal(back[..., 4:], codes[..., 4:])


def test_public_function() -> None:
    """By groups; values with channels of their own are not in the kernel."""
    starts = torch.tensor([1, 0, 2])
    for of_v in (CHANNELS, CHANNELS + 2):
        sizes = [2 * CHANNELS, CHANNELS, of_v]
        mixed = draw(SIZE, BATCH, GROUPS, sum(sizes)).requires_grad_()
        got = apply_fused_qkv_rotary_pos_emb(mixed, ANGLES, 2 * ANGLES, sizes, "sbhd", starts)
        q, k, v = mixed.split(sizes, -1)
        q, k = q.reshape(SIZE, BATCH, HEADS, CHANNELS), k.reshape(SIZE, BATCH, GROUPS, CHANNELS)
        wanted = (mz.apply_rotary_pos_emb(t, n * ANGLES, "sbhd", starts) for n, t in enumerate((q, k), 1))
        wanted = (*wanted, v)
        assert_same(got, wanted)
        grads = [draw(*part.shape, seed=3) for part in got]
        assert_same(torch.autograd.grad(got, mixed, grads), torch.autograd.grad(wanted, mixed, grads))
    long = mz.RotaryPositionEmbedding(CHANNELS).cpu()(2 * SIZE)
    mixed = draw(SIZE - 1, BATCH, GROUPS, 4 * CHANNELS)
    sizes = [2 * CHANNELS, CHANNELS, CHANNELS]
    _, k, _ = apply_fused_qkv_rotary_pos_emb(mixed, long, long, sizes, cp_size=2, cp_rank=1)
    assert_same([k], [mz.apply_rotary_pos_emb(mixed.split(sizes, -1)[1], long, cp_size=2, cp_rank=1)])
    for message, options in (
        ("the first is a multiple", {"qkv_split_arg_list": [CHANNELS + 2, CHANNELS, 2 * CHANNELS - 2]}),
        ("the first is a multiple", {"qkv_split_arg_list": [3 * CHANNELS, 0, CHANNELS]}),
        ("freqs turn 8 channels of queries and 4 of keys", {"k_freqs": PAIRED}),
        ("give s, b, groups, channels", {"qkv": mixed[0]}),
    ):
        given = {"qkv": mixed, "q_freqs": long, "k_freqs": long, "qkv_split_arg_list": sizes, **options}
        with pytest.raises(ValueError, match=message):
            apply_fused_qkv_rotary_pos_emb(**given)


def make(layout: str, **options: Any) -> mz.MultiheadAttention:
    torch.manual_seed(0)
    return mz.MultiheadAttention(
        HIDDEN,
        HEADS,
        CHANNELS,
        num_gqa_groups=GROUPS,
        attention_dropout=0.0,
        qkv_format=layout,
        attn_mask_type="padding_causal" if layout == "thd" else "causal",
        params_dtype=BF16,
        device="cpu",
        **options,
    )


def options_of(layout: str, module: mz.MultiheadAttention) -> dict[str, Any]:
    cu = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS} if layout == "thd" else {}
    return {"rotary_pos_emb": PAIRED if module.rotary_pos_interleaved else ANGLES, **cu}


def step(call: Any, module: Any, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and every gradient."""
    y = call(x, **options)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_from_its_parts(layout: str, kind: dict[str, Any]) -> None:
    module = make(layout, **kind)
    x = draw(*LAYOUTS[layout], HIDDEN).requires_grad_()
    options = options_of(layout, module)
    cu = {name: value for name, value in options.items() if name != "rotary_pos_emb"}

    def by_hand(x: torch.Tensor, **options: Any) -> torch.Tensor:
        freqs, length = options["rotary_pos_emb"], options.get("cu_seqlens_q")
        blocks = GROUPS if module.qkv_weight_interleaved else 1
        others = (None, module.rotary_pos_interleaved, (length, length))
        q, k, v = turned_apart(module.qkv(x), HEADS, GROUPS, blocks, (freqs, freqs), layout, *others)
        return module.proj(module.core_attention(q, k, v, **cu))

    assert_same(step(module, module, x, **options), step(by_hand, module, x, **options))


@pytest.mark.parametrize("norm", [{}, {"qk_norm_type": "RMSNorm"}, {"qk_norm_type": "RMSNorm", "before": True}])
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_a_layer_has_the_bits(recipe: str, norm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a norm of queries and keys behind the turn, and with one before it, where they are split first."""
    torch.manual_seed(0)
    norm = {"qk_norm_before_rope" if name == "before" else name: value for name, value in norm.items()}
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16, "device": "cpu"}
    layer = mz.TransformerLayer(32, 64, HEADS, GROUPS, kv_channels=CHANNELS, fuse_qkv_params=True, **options, **norm)
    x = draw(SIZE, BATCH, 32).requires_grad_()
    calls = []

    def apart(*arguments: Any) -> Any:
        calls.append(len(arguments))
        return turned_apart(*arguments)

    def run() -> list[torch.Tensor]:
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            return step(layer, layer, x, rotary_pos_emb=ANGLES)

    got = run()
    monkeypatch.setattr(multihead, "split_turned", apart)
    assert_same(got, run())
    assert len(calls) == ("qk_norm_before_rope" not in norm)


def test_what_is_held() -> None:
    """Not what the projection wrote: only parts of it, each in memory of its own."""
    module = make("bshd", fuse_qkv_params=True)
    x = draw(BATCH, SIZE, HIDDEN).requires_grad_()
    sizes = set()

    def note(t: torch.Tensor) -> torch.Tensor:
        sizes.add(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        module(x, rotary_pos_emb=ANGLES)
    each = BATCH * SIZE * CHANNELS * (4 if hw.SLOW_BF16 else 2)  # attention multiplies FP32 copies there
    assert {HEADS * each, GROUPS * each} <= sizes
    assert (HEADS + 2 * GROUPS) * each not in sizes


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.split("::")[-1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", [{}, {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}])
def test_angles_are_made_once(layout: str, norm: dict[str, Any]) -> None:
    module = make(layout, fuse_qkv_params=True, **norm)
    x = draw(*LAYOUTS[layout], HIDDEN).requires_grad_()
    with Calls() as calls:
        y = module(x, **options_of(layout, module))
    with Calls() as back:
        y.sum().backward()
    assert (calls.count["cos"], calls.count["sin"]) == (1, 1)
    if layout != "thd":  # positions that are counted from 0 are a slice
        assert not {"arange", "clamp", "index"} & set(calls.count)
    if not norm:
        assert (calls.count["rope_split"], back.count["rope_join"]) == (1, 1)
        assert not {"cat", "rope"} & {*calls.count, *back.count}


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("layout", "kind", "backend"),
    [("sbhd", 0, "aot_eager"), ("bshd", 1, "inductor"), ("thd", 2, "aot_eager"), ("thd", 0, "aot_eager")],
)
def test_compiled(layout: str, kind: int, backend: str) -> None:
    """One graph, also for angles of queries and of keys that are one tensor."""
    module = make(layout, **KINDS[kind])
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(module, fullgraph=True, backend=counter)
    options = options_of(layout, module)
    options["rotary_pos_emb"] = (options["rotary_pos_emb"],) * 2
    for seed in range(2):
        x = draw(*LAYOUTS[layout], HIDDEN, seed=seed).requires_grad_()
        assert_same(step(call, module, x, **options), step(module, module, x, **options))
    assert counter.frame_count == 1


@pytest.mark.compile
def test_compiled_for_several_sizes() -> None:
    module = make("bshd", fuse_qkv_params=True)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter)
    for batch, size in ((3, 5), (2, 6), (4, 7)):
        x = draw(batch, size, HIDDEN).requires_grad_()
        options = {"rotary_pos_emb": ANGLES}
        assert_same(step(call, module, x, **options), step(module, module, x, **options))
    assert counter.frame_count == 2


@pytest.mark.compile
def test_compiled_without_gradients() -> None:
    """As in decoding; angles that are one tensor, and two."""
    module = make("bshd", fuse_qkv_params=True)
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = draw(BATCH, SIZE, HIDDEN)
    with torch.no_grad():
        for freqs in (ANGLES, (ANGLES, 2 * ANGLES)):
            assert_same([call(x, rotary_pos_emb=freqs)], [module(x, rotary_pos_emb=freqs)])


def test_bad_input() -> None:
    module = make("bshd", fuse_qkv_params=True)
    with pytest.raises(ValueError, match=r"the projection of hidden_states has shape .* 'bshd' needs 3 dimensions"):
        module(draw(SIZE, HIDDEN), rotary_pos_emb=ANGLES)
    with pytest.raises(ValueError, match="freqs has 16 channels"):
        module(draw(1, SIZE, HIDDEN), rotary_pos_emb=mz.RotaryPositionEmbedding(16).cpu()(SIZE))
