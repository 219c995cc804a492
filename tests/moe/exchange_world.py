"""What each process computes with experts that are spread over all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint.moe.exchange import Exchange, combine, dispatch, plan_exchange
from tests.recipes import RECIPES, VARIANTS
from tests.worlds import Result

EXPERTS, TOPK, WIDTH, STEPS = 4, 2, 32, 2
EMPTY = 2  # an expert that nobody wants
TOKENS = {2: (9, 3), 4: (5, 0, 6, 1)}  # of each process, by the size of the world
CHOSEN = {**RECIPES, "nvfp4-plain": VARIANTS["nvfp4-plain"]}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens_of(size: int, rank: int | None, step: int) -> dict[str, torch.Tensor]:
    """Of one process of a world, or of all (None): inputs, who wants whom, with what weight, gradients."""
    counts = TOKENS[size]
    total = sum(counts)
    scores = draw(total, EXPERTS, seed=step, dtype=torch.float32)
    scores[:, EMPTY] = -torch.inf
    made = {
        "x": draw(total, WIDTH, seed=10 + step),
        "mask": torch.zeros(total, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(TOPK).indices, True),
        "probs": draw(total, EXPERTS, seed=20 + step, dtype=torch.float32).abs(),
        "dy": draw(total, WIDTH, seed=30 + step),
    }
    start = 0 if rank is None else sum(counts[:rank])
    return {name: value[start : total if rank is None else start + counts[rank]] for name, value in made.items()}


def experts_of(size: int, rank: int | None) -> mz.GroupedLinear:
    """Those of one process, or all of them: the same weights."""
    count = EXPERTS if rank is None else EXPERTS // size
    made = mz.GroupedLinear(count, WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            kind = name.rstrip("0123456789")
            number = int(name.removeprefix(kind))
            expert = number + (0 if rank is None else rank * count)
            parameter.copy_(draw(*parameter.shape, seed=100 + expert if kind == "weight" else 200 + expert) * 0.2)
    return made


def mixture(
    experts: Any, x: torch.Tensor, mask: torch.Tensor, probs: torch.Tensor, exchange: Exchange | None = None
) -> torch.Tensor:
    rows, row_id_map = mz.moe_permute(x, mask, x.shape[0] * TOPK)
    if exchange is None:
        exchange = plan_exchange(mask.sum(0), rows.shape[0])
    y = experts(dispatch(rows, exchange), exchange.m_splits)
    return mz.moe_unpermute(combine(y, exchange), row_id_map, probs)


def run_step(
    experts: mz.GroupedLinear, given: dict[str, torch.Tensor], recipe: Any, call: Any = mixture, *more: Any
) -> Result:
    x, probs = given["x"].clone().requires_grad_(), given["probs"].clone().requires_grad_()
    torch.manual_seed(1)
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(experts, x, given["mask"], probs, *more)
    y.backward(given["dy"])
    found: Result = {"output": y.detach(), "x": x.grad, "probs": probs.grad}
    for name, parameter in experts.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found


def run_steps(size: int, rank: int | None, recipe: str) -> Result:
    """Two, so that delayed scaling has a scale of its own in the second."""
    experts = experts_of(size, rank)
    return {str(step): run_step(experts, tokens_of(size, rank, step), CHOSEN[recipe]) for step in range(STEPS)}


def recipes(rank: int) -> Result:
    return {recipe: run_steps(dist.get_world_size(), rank, recipe) for recipe in CHOSEN}


def more_dimensions(rank: int) -> Result:
    """Rows are anything along the first dimension, as probabilities; gradients of any stride; some data come back."""
    counts = torch.full((EXPERTS,), rank + 1)
    rows = EXPERTS * (rank + 1)
    exchange = plan_exchange(counts, rows)
    flat = torch.arange(rows, dtype=torch.float32).requires_grad_()
    cube = draw(rows, 2, 3, seed=rank, dtype=torch.float32)
    back = combine(dispatch(flat, exchange), exchange)
    (gradient,) = torch.autograd.grad(back.sum(), flat)  # expanded, of stride 0
    return {
        "flat": torch.equal(back, flat),
        "cube": torch.equal(combine(dispatch(cube, exchange), exchange), cube),
        "gradient": torch.equal(gradient, torch.ones_like(flat)),
        "got": dispatch(flat.detach(), exchange),
        "m_splits": exchange.m_splits,
    }


def a_part_of_the_world(rank: int) -> Result:
    """A group of neighbours; and one of one process, which exchanges nothing."""
    size = dist.get_world_size()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    alone = [dist.new_group([i]) for i in range(size)]
    found: Result = {}
    for name, group, members in (("pair", pairs[rank // 2], 2), ("alone", alone[rank], 1)):
        x = torch.full((EXPERTS, 1), float(rank))
        exchange = plan_exchange(torch.ones(EXPERTS, dtype=torch.int32), EXPERTS, group)
        found[name] = dispatch(x, exchange, group)[:, 0].tolist()
        assert exchange.m_splits == (members,) * (EXPERTS // members)
        assert torch.equal(combine(dispatch(x, exchange, group), exchange, group), x)
    return found


def wrong_use(rank: int) -> Result:
    """On every process, and the exchange after it works."""
    cases: dict[str, Callable[[], Any]] = {
        "does not divide": lambda: plan_exchange(torch.ones(EXPERTS + 1, dtype=torch.int64), EXPERTS + 1),
        "does not add up": lambda: plan_exchange(torch.ones(EXPERTS, dtype=torch.int64), EXPERTS + (rank == 1)),
        "negative": lambda: plan_exchange(torch.tensor([-1, 1, 0, 0] if rank == 0 else [0] * EXPERTS), 0),
        "floats": lambda: plan_exchange(torch.ones(EXPERTS), EXPERTS),
        "other rows": lambda: dispatch(
            torch.ones(3, 1), plan_exchange(torch.ones(EXPERTS, dtype=torch.int64), EXPERTS)
        ),
    }
    found: Result = {}
    for name, case in cases.items():
        try:
            case()
        except ValueError as error:
            found[name] = str(error)
    return found


def compiled(rank: int) -> Result:
    """Counts that the graph reads itself, and counts that are known."""
    found: Result = {}
    size = dist.get_world_size()
    for recipe in ("delayed", "mxfp8"):
        eager, experts = experts_of(size, rank), experts_of(size, rank)
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(mixture, fullgraph=True, backend=counter)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            for step in range(STEPS):
                given = tokens_of(size, rank, step)
                found[f"{recipe} {step} compiled"] = run_step(experts, given, CHOSEN[recipe], call)
                found[f"{recipe} {step} eager"] = run_step(eager, given, CHOSEN[recipe])
        found[f"{recipe} graphs"] = counter.frame_count
        torch._dynamo.reset()
    experts, given = experts_of(size, rank), tokens_of(size, rank, 0)
    exchange = plan_exchange(given["mask"].sum(0), given["x"].shape[0] * TOPK)
    call = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    found["known 0 compiled"] = run_step(experts, given, CHOSEN["current"], call, exchange)
    found["known 0 eager"] = run_step(experts, given, CHOSEN["current"])
    return found


CHECKS: tuple[Callable[[int], Result], ...] = (recipes, more_dimensions, a_part_of_the_world, wrong_use, compiled)
