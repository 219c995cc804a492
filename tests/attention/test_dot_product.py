"""DotProductAttention against the formula, in every layout: masks, windows, biases, sinks, groups, packed inputs."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import hw
from mezzotint.attention.masks import alibi_slopes
from tests.attention.reference import MASKS, attention, slopes_of_alibi

BATCH, Q_SIZE, K_SIZE, HEADS, CHANNELS = 2, 5, 7, 4, 8
Q_LENGTHS, K_LENGTHS = [3, 5], [7, 4]
LAYOUTS = ("sbhd", "bshd", "thd")


def heads(
    q_size: int = Q_SIZE, k_size: int = K_SIZE, groups: int = HEADS, v_channels: int = CHANNELS, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v as [b, s, h, d]."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((q_size, HEADS, CHANNELS), (k_size, groups, CHANNELS), (k_size, groups, v_channels))
    return [torch.randn(BATCH, *shape, generator=make).requires_grad_() for shape in shapes]


def cumulated(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[b, s, ..] → [t, ..]."""
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def run(module: Any, parts: list[torch.Tensor], layout: str, mask: str, **options: Any) -> torch.Tensor:
    """In the layout; the output as [b, s, h · d] again, padding of a packed batch as zeros."""
    q_lengths, k_lengths = options.pop("lengths", (Q_LENGTHS, K_LENGTHS))
    if "padding" in mask:
        options |= {"cu_seqlens_q": cumulated(q_lengths), "cu_seqlens_kv": cumulated(k_lengths)}
    if layout == "sbhd":
        return module(*[x.transpose(0, 1) for x in parts], attn_mask_type=mask, **options).transpose(0, 1)
    if layout == "bshd":
        return module(*parts, attn_mask_type=mask, qkv_format=layout, **options)
    flat = [packed(parts[0], q_lengths), packed(parts[1], k_lengths), packed(parts[2], k_lengths)]
    y = module(*flat, attn_mask_type=mask, qkv_format=layout, **options)
    rows = y.split(q_lengths)
    size = parts[0].shape[1]
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, size - row.shape[0])) for row in rows])


def compare(got: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Outputs, and gradients of a loss of many values. FP32 against FP64."""
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-6)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(9))
    actual = torch.autograd.grad((got * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(actual, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-6)


def module_of(groups: int = HEADS, **options: Any) -> mz.DotProductAttention:
    return mz.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=groups, **options)


def fits(layout: str, mask: str) -> bool:
    return layout != "thd" or "padding" in mask


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_bf16_where_its_product_is_slow(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of FP32 copies, rounded once; gradients too."""
    monkeypatch.setattr(hw, "SLOW_BF16", True)
    parts = [x.detach().bfloat16().requires_grad_() for x in heads()]
    copies = [x.detach().float().requires_grad_() for x in parts]
    got, wanted = run(module_of(), parts, "bshd", mask), run(module_of(), copies, "bshd", mask)
    assert torch.equal(got, wanted.bfloat16())
    got.sum().backward()
    wanted.sum().backward()
    for x, copy in zip(parts, copies, strict=True):
        assert x.grad is not None
        assert copy.grad is not None
        assert torch.equal(x.grad, copy.grad.bfloat16())


CASES = [(layout, mask) for layout in LAYOUTS for mask in MASKS if fits(layout, mask)]


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(("layout", "mask"), CASES)
def test_masks(layout: str, mask: str, groups: int) -> None:
    parts = heads(groups=groups)
    hidden = torch.rand(BATCH, HEADS, Q_SIZE, K_SIZE, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[1, :, 2] = True  # a query that sees nothing
    options = {"attention_mask": hidden} if mask == "arbitrary" else {}
    got = run(module_of(groups), parts, layout, mask, **options)
    expected, _ = attention(*parts, mask, lengths=(Q_LENGTHS, K_LENGTHS), hidden=hidden)
    compare(got, expected, parts)


@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_as_many_keys_as_queries(mask: str) -> None:
    """Where the kernel's own mask serves."""
    parts = heads(6, 6, groups=2)
    compare(run(module_of(2), parts, "sbhd", mask), attention(*parts, mask)[0], parts)


@pytest.mark.parametrize("window", [(2, 0), (1, 2), (-1, 1), (0, -1), (0, 0)])
@pytest.mark.parametrize(("layout", "mask"), CASES)
def test_windows(layout: str, mask: str, window: tuple[int, int]) -> None:
    parts = heads(groups=2)
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    options = {"attention_mask": hidden} if mask == "arbitrary" else {}
    got = run(module_of(2), parts, layout, mask, window_size=window, **options)
    expected, _ = attention(*parts, mask, lengths=(Q_LENGTHS, K_LENGTHS), window=window)
    compare(got, expected, parts)


@pytest.mark.parametrize("mask", ["no_mask", "padding"])
def test_the_diagonal_of_a_window(mask: str) -> None:
    parts = heads()
    got = {}
    for bottom_right in (True, False):
        got[bottom_right] = run(module_of(window_size=(1, 1)), parts, "bshd", mask, bottom_right_diagonal=bottom_right)
        options: Any = {"window": (1, 1), "bottom_right": bottom_right, "lengths": (Q_LENGTHS, K_LENGTHS)}
        compare(got[bottom_right], attention(*parts, mask, **options)[0], parts)
    assert not torch.equal(got[True], got[False])
    assert torch.equal(got[True], run(module_of(window_size=(1, 1)), parts, "bshd", mask))


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(1, HEADS), (BATCH, HEADS), (BATCH, 1), (1, 1)])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
def test_biases(mask: str, shape: tuple[int, int], bias_type: str) -> None:
    parts = heads(groups=2)
    bias = torch.randn(*shape, Q_SIZE, K_SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    got = run(module_of(2), parts, "sbhd", mask, core_attention_bias_type=bias_type, core_attention_bias=bias)
    options: Any = {"lengths": (Q_LENGTHS, K_LENGTHS), "bias_type": bias_type, "bias": bias}
    compare(got, attention(*parts, mask, **options)[0], [*parts, bias])


@pytest.mark.parametrize(("layout", "mask"), [case for case in CASES if case[1] != "arbitrary"])
def test_alibi(layout: str, mask: str) -> None:
    parts = heads()
    got = run(module_of(), parts, layout, mask, core_attention_bias_type="alibi")
    options: Any = {"lengths": (Q_LENGTHS, K_LENGTHS), "bias_type": "alibi"}
    compare(got, attention(*parts, mask, **options)[0], parts)


@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS)])
def test_own_slopes(shape: tuple[int, ...]) -> None:
    parts = heads()
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(4))
    got = run(module_of(), parts, "bshd", "causal", core_attention_bias_type="alibi", alibi_slopes=slopes)
    expected, _ = attention(*parts, "causal", bias_type="alibi", slopes=slopes.view(-1, HEADS))
    compare(got, expected, parts)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12])
def test_slopes_of_any_number_of_heads(count: int) -> None:
    torch.testing.assert_close(alibi_slopes(count, torch.device("cpu")), torch.tensor(slopes_of_alibi(count)))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize(("layout", "mask"), [("sbhd", "causal"), ("bshd", "no_mask"), ("thd", "padding_causal")])
def test_sinks(layout: str, mask: str, softmax_type: str) -> None:
    parts = heads(groups=2)
    module = module_of(2, softmax_type=softmax_type).cpu()
    sink = torch.zeros(HEADS)
    leaves = parts
    if softmax_type == "learnable":
        assert [*module.state_dict()] == ["softmax_offset"]
        with torch.no_grad():
            module.softmax_offset.normal_(generator=torch.Generator().manual_seed(5))
        sink, leaves = module.softmax_offset, [*parts, module.softmax_offset]
    for bias_type in ("no_bias", "alibi"):
        got = run(module, parts, layout, mask, core_attention_bias_type=bias_type)
        options: Any = {"lengths": (Q_LENGTHS, K_LENGTHS), "bias_type": bias_type, "sink": sink}
        compare(got, attention(*parts, mask, **options)[0], leaves)


def test_padding_between_sequences() -> None:
    """Of a packed batch; what stands there neither sees nor is seen."""
    parts = heads(6, 6)
    lengths, starts = [3, 4], [0, 5]
    expected, _ = attention(*parts, "padding_causal", lengths=(lengths, lengths))
    flat = [
        torch.cat((x[0, :3], torch.full_like(x[0, :2], 7.0), x[1, :4], torch.full_like(x[0, :1], 7.0))) for x in parts
    ]
    cu, cu_padded = cumulated(lengths), cumulated([5, 5])
    y = module_of()(
        *flat,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
    )
    assert not y[3:5].any()
    assert not y[9:].any()
    rows = [torch.nn.functional.pad(y[s : s + n], (0, 0, 0, 6 - n)) for s, n in zip(starts, lengths, strict=True)]
    compare(torch.stack(rows), expected, parts)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_padding_as_a_mask(layout: str) -> None:
    """True where a token is none: the same as lengths."""
    parts = heads()
    masks = [torch.arange(size) >= torch.tensor(n)[:, None] for size, n in ((Q_SIZE, Q_LENGTHS), (K_SIZE, K_LENGTHS))]
    given = tuple(mask[:, None, None] for mask in masks)
    swapped = [x.transpose(0, 1) for x in parts] if layout == "sbhd" else parts
    for mask in ("padding", "padding_causal", "padding_causal_bottom_right"):
        module = module_of(attention_type="cross", qkv_format=layout)
        y = module(*swapped, attention_mask=given, attn_mask_type=mask)
        y = y.transpose(0, 1) if layout == "sbhd" else y
        assert torch.equal(y, run(module, parts, layout, mask))
    square = [x.transpose(0, 1) if layout == "sbhd" else x for x in heads(5, 5)]
    module = module_of(qkv_format=layout, attn_mask_type="padding")
    one = module(*square, attention_mask=given[0])
    assert torch.equal(one, module(*square, attention_mask=(given[0], given[0])))


def test_heads_of_values_may_be_of_another_size() -> None:
    parts = heads(v_channels=6, groups=2)
    module = mz.DotProductAttention(HEADS, (CHANNELS, 6), num_gqa_groups=2)
    for mask in ("no_mask", "padding_causal"):
        got = run(module, parts, "sbhd", mask)
        compare(got, attention(*parts, mask, lengths=(Q_LENGTHS, K_LENGTHS))[0], parts)


def test_softmax_scale() -> None:
    parts = heads()
    got = run(module_of(softmax_scale=0.7), parts, "bshd", "no_mask")
    compare(got, attention(*parts, "no_mask", scale=0.7)[0], parts)


@pytest.mark.parametrize("mask", ["causal", "padding", "no_mask"])
def test_largest_logit(mask: str) -> None:
    parts = heads(groups=2)
    y, largest = module_of(2, return_max_logit=True, qkv_format="bshd")(
        *parts,
        attn_mask_type=mask,
        cu_seqlens_q=cumulated(Q_LENGTHS),
        cu_seqlens_kv=cumulated(K_LENGTHS),
        core_attention_bias_type="alibi",
    )
    expected, top = attention(*parts, mask, lengths=(Q_LENGTHS, K_LENGTHS), bias_type="alibi")
    torch.testing.assert_close(largest.double(), top, rtol=1e-5, atol=1e-6)
    compare(y, expected, parts)


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_inputs(layout: str, dim: int) -> None:
    shape = {"sbhd": (Q_SIZE, BATCH), "bshd": (BATCH, Q_SIZE), "thd": (8,)}[layout]
    parts = torch.randn(3, *shape, HEADS, CHANNELS, generator=torch.Generator().manual_seed(6))
    cu = cumulated([3, 5])
    options: Any = {"qkv_format": layout}
    if layout == "thd":
        options |= {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    module = module_of()
    expected = module(*parts, **options)
    qkv = torch.stack(tuple(parts), dim).requires_grad_()
    y = module(qkv_layer=qkv, qkv_interleave_dim=dim, **options)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert qkv.grad.any()
    kv = torch.stack((parts[1], parts[2]), dim)
    assert torch.equal(module(parts[0], kv_layer=kv, qkv_interleave_dim=dim, **options), expected)


def test_dropout_is_for_training() -> None:
    parts = [x.transpose(0, 1) for x in heads(32, 32)]
    module = module_of(attention_dropout=0.5)
    exact = module_of()(*parts)
    torch.manual_seed(0)
    first, second = module(*parts), module(*parts)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(module(*parts), first)
    assert torch.equal(module.eval()(*parts), exact)
    mean = torch.stack([module.train()(*parts) for _ in range(300)]).mean(0)
    assert ((mean - exact).norm() / exact.norm()).item() < 0.15


@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0)}, {"core_attention_bias_type": "alibi"}])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_gives_the_same(options: dict[str, Any], dropout: float) -> None:
    module = module_of(attention_dropout=dropout)
    results = []
    for recomputes in (False, True):
        parts = heads(6, 6)
        torch.manual_seed(0)
        y = run(module, parts, "sbhd", "causal", checkpoint_core_attention=recomputes, **options)
        results.append([y, *torch.autograd.grad(y.square().sum(), parts)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_half_precision(dtype: torch.dtype, mask: str) -> None:
    parts = [x.detach().to(dtype) for x in heads(groups=2)]
    for bias_type in ("no_bias", "alibi"):
        got = run(module_of(2), parts, "bshd", mask, core_attention_bias_type=bias_type)
        assert got.dtype == dtype
        options: Any = {"lengths": (Q_LENGTHS, K_LENGTHS), "bias_type": bias_type}
        torch.testing.assert_close(got.double(), attention(*parts, mask, **options)[0], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("of_bias", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype(dtype: torch.dtype, of_bias: torch.dtype) -> None:
    parts = [x.detach().transpose(0, 1).to(dtype) for x in heads(6, 6)]
    bias = torch.tensor([0.0, -1.0, 0.5, 2.0, 0.0, 1.0])  # of each key; in any dtype the same
    options: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "no_mask"}
    got = module_of()(*parts, core_attention_bias=bias.to(of_bias), **options)
    assert got.dtype == dtype
    assert torch.equal(got, module_of()(*parts, core_attention_bias=bias.to(dtype).expand(6, 6), **options))
    seen = module_of()(*parts, bias < 0.0, attn_mask_type="arbitrary")
    assert torch.equal(seen, module_of()(*parts, (bias < 0.0).expand(6, 6), attn_mask_type="arbitrary"))


def test_a_quantized_input_is_dequantized() -> None:
    parts = [x.detach().transpose(0, 1).contiguous() for x in heads(6, 6)]
    quantizer = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3, torch.device("cpu"))
    quantized = [quantizer.quantize(x) for x in parts]
    assert torch.equal(module_of()(*quantized), module_of()(*[x.dequantize() for x in quantized]))


def test_bad_input() -> None:
    parts = [x.detach().transpose(0, 1) for x in heads(6, 6)]
    module = module_of()
    cu = cumulated([3, 3])
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "attn_mask_type is 'casual'", {"attn_mask_type": "casual"}),
        (ValueError, "window_size is \\(-2, 0\\)", {"window_size": (-2, 0)}),
        (ValueError, "window_size is 3: give a pair", {"window_size": 3}),
        (ValueError, "qkv_format is 'hsbd'", {"qkv_format": "hsbd"}),
        (
            ValueError,
            "cu_seqlens_kv has shape \\(2,\\): give \\[3\\]",
            {"attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu[:2]},
        ),
        (
            ValueError,
            "cu_seqlens_kv is \\[0, 5, 3\\]: it must begin with 0, and no entry be less",
            {"attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": torch.tensor([0, 5, 3])},
        ),
        (
            ValueError,
            "cu_seqlens_q is \\[1, 3, 6\\]: it must begin with 0",
            {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([1, 3, 6]), "cu_seqlens_kv": cu},
        ),
        (ValueError, "needs attention_mask", {"attn_mask_type": "padding"}),
        (
            ValueError,
            "attention_mask has shape",
            {"attn_mask_type": "padding", "attention_mask": torch.ones(2, 5) > 0},
        ),
        (ValueError, "attention_mask is None", {"attn_mask_type": "arbitrary"}),
        (ValueError, "core_attention_bias missing", {"core_attention_bias_type": "pre_scale_bias"}),
        (ValueError, "core_attention_bias given", {"core_attention_bias": torch.zeros(1)}),
        (ValueError, "core_attention_bias_type is 'tilt'", {"core_attention_bias_type": "tilt"}),
        (ValueError, "give 'alibi'", {"alibi_slopes": torch.ones(4)}),
        (ValueError, "alibi_slopes has", {"alibi_slopes": torch.ones(3), "core_attention_bias_type": "alibi"}),
        (ValueError, "qkv_layer alone", {"qkv_layer": parts[0]}),
        (ValueError, "qkv_interleave_dim is 1", {"qkv_interleave_dim": 1}),
        (NotImplementedError, "fp8_output=True", {"fp8_output": True}),
        (NotImplementedError, "score_mod", {"score_mod": print}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            module(*parts, **options)
    with pytest.raises(ValueError, match="query_layer has shape"):
        module(parts[0][..., :4], *parts[1:])
    with pytest.raises(ValueError, match="key_layer has shape"):
        module(parts[0], parts[1][..., :2, :], parts[2])
    with pytest.raises(ValueError, match="give as many tokens"):
        module(parts[0], parts[1][:3], parts[2])
    with pytest.raises(ValueError, match="give one dtype"):
        module(parts[0], parts[1].half(), parts[2])
    flat = [x.flatten(0, 1) for x in parts]
    with pytest.raises(ValueError, match="'thd' needs a padding mask"):
        module(*flat, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with pytest.raises(ValueError, match="needs cu_seqlens_q"):
        module(*flat, qkv_format="thd", attn_mask_type="padding")
    packed = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_kv": cu}
    with pytest.raises(ValueError, match="cu_seqlens_q is \\[0, 8, 6\\]"):
        module(*flat, **packed, cu_seqlens_q=torch.tensor([0, 8, 6]))
    with pytest.raises(ValueError, match="cu_seqlens_q_padded is \\[0, 8, 6\\]"):
        module(*flat, **packed, cu_seqlens_q=cu, cu_seqlens_q_padded=torch.tensor([0, 8, 6]))
    freqs = mz.RotaryPositionEmbedding(8)(12)
    with pytest.raises(ValueError, match="cu_seqlens is \\[0, 8, 6\\]"):
        mz.apply_rotary_pos_emb(flat[0], freqs, tensor_format="thd", cu_seqlens=torch.tensor([0, 8, 6]))
    recipe = mz.recipe.DelayedScaling(fp8_dpa=True)
    with pytest.raises(NotImplementedError, match="fp8_dpa"), mz.autocast(recipe=recipe):
        module(*parts)


def test_bad_options() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("num_gqa_groups is 3", {"groups": 3}),
        ("softmax_type is 'hard'", {"softmax_type": "hard"}),
        ("attention_type is 'own'", {"attention_type": "own"}),
        ("attn_mask_type is 'none'", {"attn_mask_type": "none"}),
        ("qkv_format is 'hd'", {"qkv_format": "hd"}),
        ("attention_dropout is -1.0", {"attention_dropout": -1.0}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            module_of(**options)
    with pytest.raises(ValueError, match=r"num_attention_heads is .*: it must be divisible by the 7 ranks"):
        module_of(tp_size=7)
