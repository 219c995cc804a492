"""Delayed scaling over processes: how often they ask each other, and that it is what one process computes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import mezzotint as mz
from mezzotint import ops, recipe
from mezzotint.functional.delayed import SCALE_UPDATES
from tests.distributed.parallel import Sent, differing, draw, make, world
from tests.recipes import STATE
from tests.worlds import Result, attempt


def reductions(rank: int) -> Result:
    """Delayed scaling over `amax_reduction_group`: each process has tokens of its own, all get the scales of all."""
    group, size, _ = world()
    delayed = recipe.DelayedScaling(amax_history_len=3)

    def run(reduces: bool = True, tokens: int = 16) -> tuple[Any, dict[str, int], torch.Tensor]:
        model = torch.nn.Sequential(*[make(mz.Linear, 32, 32) for _ in range(3)])
        chosen = delayed if reduces else recipe.DelayedScaling(amax_history_len=3, reduce_amax=False)
        calls: dict[str, int] = {}
        for i in range(3):
            x = draw(tokens, 32, seed=10 * i + rank) * (1 + rank)
            with Sent() as counted, mz.autocast(recipe=chosen, amax_reduction_group=group):
                y = model(x)
            calls = counted.calls
            y.backward(draw(tokens, 32, seed=40 + 10 * i + rank) * (1 + rank))
        state = [getattr(layer, name) for layer in model for name in STATE]
        # Of what no scale has touched before: the first input and the last gradient.
        seen = torch.stack((model[0].amax_history_fwd[:3, 0], model[2].amax_history_bwd[:3, 0]))
        return torch.cat([tensor.reshape(-1) for tensor in state]), calls, seen

    eager, calls, reduced = run()
    _, none, own = run(reduces=False)
    some, _, _ = run(tokens=16 if rank == 0 else 0)

    def is_same(state: torch.Tensor) -> bool:
        everywhere = [torch.empty_like(state) for _ in range(size)]
        dist.all_gather(everywhere, state)
        return all(torch.equal(everywhere[0], other) for other in everywhere)

    return {
        "calls": calls,
        "calls without": none,
        "same everywhere": is_same(eager),
        "same with some": is_same(some) and bool((some[0] != 1).all()),
        "own": own,
        "reduced": reduced,
    }


def endings(rank: int) -> Result:
    """Backward with delayed scaling over a group: one collective for all modules at its end. Both processes have the
    same tokens, so that the state is that of one process: what differs from it, and how many collectives there were."""
    group, _, _ = world()
    found: Result = {}

    def model() -> Any:
        return torch.nn.Sequential(*[make(mz.Linear, 32, 32) for _ in range(3)])

    def operations() -> Any:
        made = [ops.Linear(32, 32, device="cpu", dtype=torch.bfloat16) for _ in range(2)]
        return ops.Sequential(*made, ops.GELU(), ops.Linear(32, 32, device="cpu", dtype=torch.bfloat16))

    def quantized_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model[2](model[1](model[0](x, fp8_grad=True), fp8_grad=True), fp8_grad=True)

    def recomputed(reentrant: bool) -> Any:
        return lambda model, x: mz.checkpoint(model[1:], model[0](x), use_reentrant=reentrant)

    ways: dict[str, tuple[Any, Any, int]] = {  # what is made, how it is called, regions in one backward
        "modules": (model, None, 1),
        "operations": (operations, None, 1),
        "regions": (model, None, 2),
        "regions of operations": (operations, None, 2),
        "quantized gradients": (model, quantized_gradients, 1),
        "recomputed": (model, recomputed(False), 1),
        "reentrant": (model, recomputed(True), 1),
        "twice": (model, lambda model, x: model(model(x)), 1),
        "own rule": (model, None, 1),
    }
    for way, (make_model, call, regions) in ways.items():
        states, calls = [], []
        for reduces in (True, False):
            torch.manual_seed(0)
            made = make_model()
            rule = (lambda history: history.amax(0)) if way == "own rule" else "max"
            chosen = recipe.DelayedScaling(amax_history_len=3, reduce_amax=reduces, amax_compute_algo=rule)
            for i in range(3):
                outputs = []
                for region in range(regions):
                    x = (draw(16, 32, seed=10 * i + region) * (1 + i)).requires_grad_()
                    with mz.autocast(recipe=chosen, amax_reduction_group=group):
                        outputs.append(made(x) if call is None else call(made, x))
                with Sent() as counted:
                    sum(outputs).backward(draw(16, 32, seed=40 + i))
                # Right after backward: nothing waits, as for a checkpoint.
                states.append({k: v.clone() for k, v in made.named_buffers() if k.split(".")[-1] in STATE})
            calls.append(counted.calls.get("all_reduce float32", 0))
        differ = [f"{name} of step {i}" for i in range(3) for name in differing(states[i], states[3 + i])]
        found[way] = {"wrong": differ, "buffers": len(states[0]), "calls": calls}
    found["waiting"] = len(SCALE_UPDATES.waiting)
    return found


class Parts(torch.nn.Module):
    """One whose bias alone is trained, one that runs twice, one that gives its gradient on quantized, an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.twice, self.quantized = [make(mz.Linear, 32, 32) for _ in range(3)]
        self.bias.weight.requires_grad_(False)
        self.operation = ops.Linear(32, 32, device="cpu", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self.twice(self.quantized(self.twice(self.bias(x)), fp8_grad=True)))


def count_reductions(function: Callable[[], Any]) -> int:
    """Collectives of a call, in a graph or not."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        function()
    return sum(event.name == "gloo:all_reduce" for event in profiled.events())


def graphs(rank: int) -> Result:
    """The same in graphs: what differs from eager code right after each backward; collectives of eager code and of the
    graph, those of forward with them."""
    group, _, _ = world()
    chosen = recipe.DelayedScaling(amax_history_len=3)

    def forward(call: Any, seed: int) -> torch.Tensor:
        with mz.autocast(recipe=chosen, amax_reduction_group=group):
            return call(draw(16, 32, seed=seed + rank) * (1 + rank + seed % 3))

    def retained(call: Any, model: Any, dy: torch.Tensor) -> None:
        y = forward(call, 0)
        y.backward(dy, retain_graph=True)
        y.backward(dy * 3)

    def regions(call: Any, model: Any, dy: torch.Tensor) -> None:
        (forward(call, 10) + forward(call, 20)).backward(dy)

    def micro_batches(call: Any, model: Any, dy: torch.Tensor) -> None:
        for y in [forward(call, 30), forward(call, 40)]:
            y.backward(dy)

    def gradients(call: Any, model: Any, dy: torch.Tensor) -> None:
        torch.autograd.grad(forward(call, 50), [p for p in model.parameters() if p.requires_grad], dy)

    # The first one first: torch does not retain a graph whose first backward was not asked to.
    schedules = (retained, regions, micro_batches, gradients)
    found: Result = {}
    for way, make_model in (
        ("modules", lambda: torch.nn.Sequential(*[make(mz.Linear, 32, 32) for _ in range(2)])),
        ("parts", Parts),
    ):
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        eager = make_model()
        traced = copy.deepcopy(eager)
        call = torch.compile(traced, fullgraph=True, backend=counter)
        wrong, calls = [], {}
        for place, schedule in enumerate(schedules):
            dy = draw(16, 32, seed=70 + place) * (1 + rank)
            runs = [partial(schedule, *run, dy) for run in ((eager, eager), (call, traced))]
            calls[schedule.__name__] = [count_reductions(run) for run in runs]
            state, want = (
                {key: value for key, value in made.named_buffers() if key.split(".")[-1] in STATE}
                for made in (traced, eager)
            )
            wrong += [f"{key} after {schedule.__name__}" for key in differing(state, want)]
        found[way] = {
            "wrong": wrong,
            "calls": calls,
            "buffers": len(want),
            "graphs": counter.frame_count,
            "breaks": len(counters["graph_break"]),
        }
    found["waiting"] = len(SCALE_UPDATES.waiting)
    return found


def different_modules(rank: int) -> Result:
    """Modules of which each process runs another one, or the same in another order: what they are refused with, and
    whether their scales are those of all processes."""
    group, chosen = dist.new_group(list(range(dist.get_world_size()))), recipe.DelayedScaling(amax_history_len=3)
    found: Result = {}

    x = draw(16, 32, seed=rank) * (1 + rank)

    def forward(*modules: Any) -> list[torch.Tensor]:
        with mz.autocast(recipe=chosen, amax_reduction_group=group):
            return [module(x) for module in modules]

    def backward() -> None:
        made = [make(mz.Linear, 32, 32) for _ in range(2)]
        with mz.autocast(recipe=chosen, amax_reduction_group=group):
            outputs = [module(x) for module in made]
        outputs[rank].sum().backward()

    def compiled(module: Any) -> None:
        torch._dynamo.reset()
        torch.compile(forward, fullgraph=True, backend="aot_eager")(module)

    planned = [mz.Linear(32, 32, device="meta") for _ in range(rank)]  # which have no numbers
    first, second = (make(mz.Linear, 32, 32) for _ in range(2))
    mine = second if rank else first
    attempt(found, "forward", lambda: forward(mine))
    attempt(found, "backward", backward)
    attempt(found, "a graph", lambda: compiled(mine))
    attempt(found, "more of them", lambda: forward(*(first, second)[: 1 + rank]))
    attempt(found, "the same", lambda: forward(first, second))
    fresh = [make(mz.Linear, 32, 32), make(mz.LayerNormMLP, 32, 64)]  # of another number of amaxes each
    ordered = fresh[::-1] if rank else fresh
    for _ in range(2):
        torch.stack(forward(*ordered)).sum().backward()
    found["scales"] = [torch.cat((module.scale_fwd, module.scale_bwd)) for module in fresh]
    found["planned"] = len(planned)

    def dropped() -> torch.Tensor:
        module = make(mz.Linear, 32, 32)
        for _ in range(3):
            with mz.autocast(recipe=chosen, amax_reduction_group=group):
                module(x)
                y = module(x)
            (y.sum() * 1e-6 * (1 + rank)).backward()
        return module.scale_bwd

    found["dropped"] = dropped()
    return found
