"""The router's functions against a loop over tokens, in FP64."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mezzotint.moe import router

TOKENS, EXPERTS = 5, 8
SCORES = {
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def softmax(values: list[float]) -> list[float]:
    shifted = [math.exp(value - max(values)) for value in values]
    return [value / sum(shifted) for value in shifted]


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def one_token(
    x: list[float], topk: int, pre: bool, groups: int | None, group_topk: int | None, score: str, bias: list[float]
) -> dict[int, float]:
    """Expert → probability."""
    scores = (softmax(x) if pre else x) if score == "softmax" else [SCORES[score](value) for value in x]
    wanted = [a + b for a, b in zip(scores, bias, strict=True)]
    allowed = set(range(len(x)))
    if groups and group_topk:
        size = len(x) // groups
        sums = [sum(sorted(wanted[g * size : (g + 1) * size])[-(topk // group_topk) :]) for g in range(groups)]
        allowed = {g * size + i for g in best(sums, group_topk) for i in range(size)}
    chosen = best([value if i in allowed else -math.inf for i, value in enumerate(wanted)], topk)
    found = [scores[i] for i in chosen]
    if score == "softmax":
        found = found if pre else softmax(found)
    elif topk > 1:
        found = [value / sum(found) for value in found]
    return dict(zip(chosen, found, strict=True))


CASES = [
    *itertools.product(["softmax"], [1, 3], [False, True], [(None, None)], [False]),
    *itertools.product(["sigmoid", "sqrtsoftplus"], [1, 4], [False], [(None, None), (-1, -1)], [False, True]),
    *itertools.product(["softmax", "sigmoid"], [4], [True], [(4, 2), (2, 1), (8, 4)], [False]),
    ("sigmoid", 4, False, (4, 2), True),
]


@pytest.mark.cover(2)
@pytest.mark.parametrize(("score", "topk", "pre", "groups", "biased"), CASES)
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_topk(score: str, topk: int, pre: bool, groups: Any, biased: bool, scaling: float | None) -> None:
    logits = draw(TOKENS, EXPERTS).requires_grad_()
    bias = draw(EXPERTS, seed=1) if biased else None
    probs, routing_map = router.fused_topk_with_score_function(
        logits, topk, pre, *groups, scaling, score, bias, "bytemap"
    )
    limits = [None if value is None or value < 1 else value for value in groups]
    shift = [0.0] * EXPERTS if bias is None else bias.tolist()
    expected = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    for token, line in enumerate(logits.tolist()):
        for expert, value in one_token(line, topk, pre, *limits, score, shift).items():
            expected[token, expert] = value * (scaling or 1.0)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(routing_map, expected > 0)
    if topk > 1 or pre or score != "softmax":  # else constant
        check_gradient(logits, probs, routing_map, score, pre, topk, scaling or 1.0)


def check_gradient(
    logits: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor, score: str, pre: bool, topk: int, scaling: float
) -> None:
    """Of the formula over the chosen experts, in FP64."""
    leaf = logits.detach().double().requires_grad_()
    if score == "softmax":
        made = leaf.softmax(-1) * chosen if pre else leaf.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        made = (leaf.sigmoid() if score == "sigmoid" else torch.log1p(leaf.exp()).sqrt()) * chosen
        made = made / made.sum(-1, keepdim=True) if topk > 1 else made
    slopes = draw(TOKENS, EXPERTS, seed=3)
    (expected,) = torch.autograd.grad(made * scaling, leaf, slopes.double())
    (gradient,) = torch.autograd.grad(probs, logits, slopes)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    logits = draw(2, 3, EXPERTS, dtype=dtype).requires_grad_()
    probs, routing_map = router.fused_topk_with_score_function(logits, 2, False, None, None, None, "sigmoid", None)
    exact, same = router.fused_topk_with_score_function(logits.float(), 2, False, None, None, None, "sigmoid", None)
    assert (probs.dtype, probs.shape, routing_map.shape) == (dtype, logits.shape, (6, EXPERTS))
    assert torch.equal(probs, exact.to(dtype))
    assert torch.equal(routing_map, same)
    assert torch.autograd.grad(probs.float().square().sum(), logits)[0].dtype == dtype


def test_logits_far_out() -> None:
    logits = torch.tensor([[-200.0, -80.0, 300.0, 5.0]]).requires_grad_()
    for score in router.SCORES:
        for topk in (2, 4):
            probs, _ = router.fused_topk_with_score_function(logits, topk, False, None, None, None, score, None)
            (gradient,) = torch.autograd.grad(probs.square().sum(), logits)
            assert probs.isfinite().all()
            assert gradient.isfinite().all()


def test_given_choice() -> None:
    logits, chosen = draw(TOKENS, EXPERTS), torch.tensor([[0, 7]] * TOKENS)
    probs, routing_map = router.fused_topk_with_score_function(
        logits, 2, False, None, None, None, "softmax", None, topk_indices=chosen
    )
    assert torch.equal(probs[:, [0, 7]], logits[:, [0, 7]].softmax(-1))
    assert routing_map.nonzero()[:, 1].tolist() == [0, 7] * TOKENS


@pytest.mark.parametrize("experts", [3, 8, 17])
def test_maps_of_bits(experts: int) -> None:
    logits = draw(TOKENS, experts)
    _, routing_map = router.fused_topk_with_score_function(logits, 2, True, None, None, None, "softmax", None)
    _, bits = router.fused_topk_with_score_function(logits, 2, True, None, None, None, "softmax", None, "bitmap_u8")
    assert (bits.dtype, bits.shape) == (torch.uint8, (TOKENS, -(-experts // 8)))
    for token, expert in itertools.product(range(TOKENS), range(experts)):
        assert bool(bits[token, expert // 8] >> (expert % 8) & 1) == bool(routing_map[token, expert])
    scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax", router.RoutingMapFormat.BITMAP_U8)
    assert torch.equal(scores[0], bits)


@pytest.mark.parametrize("score", router.SCORES)
def test_scores_and_loss(score: str) -> None:
    logits = draw(TOKENS, EXPERTS, dtype=torch.bfloat16).requires_grad_()
    routing_map, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, score)
    leaf = logits.detach().double().requires_grad_()
    made = leaf.softmax(-1)
    if score != "softmax":
        raw = leaf.sigmoid() if score == "sigmoid" else torch.log1p(leaf.exp()).sqrt()
        made = raw / raw.sum(-1, keepdim=True)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), made, rtol=1e-6, atol=0)
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, made.topk(2).indices, True))
    counts = routing_map.sum(0)
    loss = router.fused_moe_aux_loss(scores, counts, TOKENS, EXPERTS, 2, 0.1)
    expected = sum(made[:, e].sum() * counts[e] for e in range(EXPERTS)) * 0.1 * EXPERTS / (2 * TOKENS**2)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, leaf)[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=2**-8, atol=1e-6)
    assert router.fused_moe_aux_loss(scores.bfloat16(), counts, TOKENS, EXPERTS, 2, 0.1).dtype == torch.bfloat16


def test_the_loss_is_over_the_tokens_that_are_counted() -> None:
    """Of all processes, where each gives its own: their losses add up to that of all tokens at once."""
    _, scores = router.fused_compute_score_for_moe_aux_loss(draw(2 * TOKENS, EXPERTS), 2, "softmax")
    counts = torch.arange(EXPERTS)
    options = (counts, 2 * TOKENS, EXPERTS, 2, 0.1)
    parts = [router.fused_moe_aux_loss(part, *options) for part in scores.split(TOKENS)]
    by_hand = (scores.double().sum(0) * counts).sum() * 0.1 * EXPERTS / (2 * (2 * TOKENS) ** 2)
    torch.testing.assert_close(parts[0] + parts[1], by_hand.float())
    torch.testing.assert_close(router.fused_moe_aux_loss(scores, *options), by_hand.float())


def test_no_tokens() -> None:
    logits = torch.zeros(0, EXPERTS).requires_grad_()
    probs, routing_map = router.fused_topk_with_score_function(logits, 4, True, 4, 2, None, "sigmoid", None)
    assert probs.shape == routing_map.shape == (0, EXPERTS)
    assert torch.autograd.grad(probs.sum(), logits)[0].shape == (0, EXPERTS)


@pytest.mark.compile
def test_compiled() -> None:
    def route(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        probs, chosen = router.fused_topk_with_score_function(logits, 4, False, 4, 2, 2.5, "sigmoid", bias)
        _, scores = router.fused_compute_score_for_moe_aux_loss(logits, 4, "softmax")
        return probs.sum(-1) + router.fused_moe_aux_loss(scores, chosen.sum(0), TOKENS, EXPERTS, 4, 0.1)

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(route, fullgraph=True, backend=counter)
    for seed in range(2):
        logits = draw(TOKENS, EXPERTS, seed=seed).requires_grad_()
        made = []
        for function in (call, route):
            y = function(logits, draw(EXPERTS, seed=9))
            made.append((y, torch.autograd.grad(y.square().sum(), logits)[0]))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])
    assert counter.frame_count == 1


def test_bad_input() -> None:
    logits = draw(TOKENS, EXPERTS)
    good: dict[str, Any] = {
        "topk": 2,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "sigmoid",
        "expert_bias": None,
    }
    for said, changed in (
        ("score_function is 'tanh'", {"score_function": "tanh"}),
        ("topk is 9", {"topk": 9}),
        ("topk is 0", {"topk": 0}),
        ("expert_bias is given with", {"score_function": "softmax", "expert_bias": draw(EXPERTS)}),
        ("expert_bias has shape", {"expert_bias": draw(3)}),
        ("num_groups is 3", {"num_groups": 3, "group_topk": 1}),
        ("num_groups is None", {"group_topk": 1}),
        ("group_topk is 3", {"num_groups": 4, "group_topk": 3}),
        ("routing_map_format is 'list'", {"routing_map_format": "list"}),
        ("topk_indices has shape", {"topk_indices": torch.zeros(TOKENS, 3, dtype=torch.int64)}),
    ):
        with pytest.raises(ValueError, match=said):
            router.fused_topk_with_score_function(logits, **{**good, **changed})
    with pytest.raises(TypeError, match="logits are torch"):
        router.fused_topk_with_score_function(logits.double(), **good)
    with pytest.raises(ValueError, match="tokens_per_expert has shape"):
        router.fused_moe_aux_loss(logits, torch.ones(3), TOKENS, EXPERTS, 2, 0.1)
