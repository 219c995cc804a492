"""How wrong use over processes is refused, in eager and compiled code, and that right use asks no more than it must."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mezzotint as mz
from mezzotint import meeting, ops, recipe
from mezzotint.region import current_state
from mezzotint.tensor.partition import Split, quantize_shard
from tests.distributed.parallel import differing, draw, make, step, world
from tests.quantizer_formats import FORMATS
from tests.worlds import Result

COLUMN: dict[str, Any] = {"parallel_mode": "column", "sequence_parallel": True}


def linear(**options: Any) -> Any:
    return mz.Linear(32, 32, device="cpu", **{"tp_group": world()[0], **COLUMN, **options})


def strangers() -> Any:
    """A group of all processes, which have agreed on nothing yet."""
    return dist.new_group(list(range(world()[1])))


def operations() -> Any:
    parallel = {"tensor_parallel_mode": "column", "tensor_parallel_group": strangers()}
    return ops.Sequential(ops.Linear(32, 32, device="cpu", **parallel), ops.GELU())


def mixed() -> recipe.Recipe:
    """Another one on each process."""
    return recipe.MXFP8BlockScaling() if world()[2] else recipe.Float8CurrentScaling()


def scaled() -> recipe.Recipe:
    """Delayed scaling on the first process, which takes maxima over all of them."""
    return recipe.Float8CurrentScaling() if world()[2] else recipe.DelayedScaling()


def under(module: Any, **region: Any) -> None:
    with mz.autocast(**region):
        module(torch.ones(32, 32))


def refusals(cases: dict[str, Callable[[], Any]], *kinds: type[Exception]) -> Result:
    """What each case is refused with."""
    found: Result = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = "accepted"
        except kinds as refused:
            found[name] = str(refused)
    return found


def wrong_use(rank: int) -> Result:
    """What is refused, on every process; none waits for another."""
    group, size, _ = world()
    made: dict[str, Any] = {"tp_group": group, "sequence_parallel": True, "device": "cpu"}
    alone = [dist.new_group([i]) for i in range(size)][rank]
    row = linear(parallel_mode="row")
    chained = FORMATS["hybrid_chained"].quantizer()

    def changes_recipe() -> None:
        module = linear()
        under(module, recipe=recipe.Float8BlockScaling())
        under(module, recipe=mixed())

    def kept_in(recipe: Any) -> Any:
        with mz.quantized_model_init(recipe=recipe):
            return linear()

    def layer() -> Any:
        return mz.TransformerLayer(128, 128, 8, tp_size=size, set_parallel_mode=True)

    cases: dict[str, Callable[[], Any]] = {
        "size": lambda: linear(tp_size=size + 1),
        "no group": lambda: mz.Linear(32, 32, parallel_mode="column", tp_size=size, device="cpu")(torch.ones(4, 32)),
        "group set": lambda: mz.Linear(32, 32, parallel_mode="row", tp_size=size).set_tensor_parallel_group(alone),
        "layer group": lambda: layer().set_tensor_parallel_group(alone),
        "features": lambda: mz.Linear(32, 32 * size + 1, parallel_mode="column", **made),
        "heads": lambda: mz.MultiheadAttention(32, 1, set_parallel_mode=True, **made),
        "tokens": lambda: row(torch.ones(size + 1, 32 // size)),
        "no tokens": lambda: row(torch.ones(32 // size)),
        "uneven": lambda: linear()(torch.ones(4 + rank, 32)),
        "dtypes": lambda: mz.LayerNormLinear(32, 32, parallel_mode="column", **made)(
            torch.ones(4, 32, dtype=torch.bfloat16 if rank else torch.float32)
        ),
        "recipes": lambda: under(linear(), recipe=mixed()),
        "recipe changes": changes_recipe,
        "one without": lambda: under(mz.LayerNormMLP(32, 32, set_parallel_mode=True, **made), enabled=rank == 0),
        "maxima": lambda: under(mz.Linear(32, 32, device="cpu"), recipe=scaled(), amax_reduction_group=strangers()),
        "maxima, one without": lambda: under(
            mz.Linear(32, 32, device="cpu"), enabled=rank == 0, amax_reduction_group=strangers()
        ),
        "operations": lambda: under(operations(), recipe=mixed()),
        "ops": lambda: ops.Linear(31, 32, tensor_parallel_mode="row", tensor_parallel_group=group),
        "chained": lambda: quantize_shard(torch.ones(32, 32), chained, [Split(0, group)]),
        "kept otherwise": lambda: kept_in(mixed()),
        "kept by one": lambda: (kept_in(mixed()) if rank else linear())(torch.ones(32, 32)),
    }
    return refusals(cases, ValueError)


class Region(torch.nn.Module):
    """A region, and its recipe, that are made in the graph. `option` of the recipe; with `first` behind another one."""

    def __init__(self, module: Any, option: bool, group: Any = None, first: Any = None) -> None:
        super().__init__()
        self.module, self.option, self.group, self.first = module, option, group, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            with mz.autocast(recipe=recipe.Float8CurrentScaling()):
                x = self.first(x)
        chosen = recipe.MXFP8BlockScaling(enable_2d_quantization=self.option)
        with mz.autocast(recipe=chosen, amax_reduction_group=self.group):
            return self.module(x)


def compiled_wrong_use(rank: int) -> Result:
    """The same of graphs."""
    _, size, _ = world()
    x = torch.ones(32, 32)

    def graph(module: Any, backend: Any = "aot_eager", **options: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(module, **{"fullgraph": True, **options}, backend=backend)

    def traced(**options: Any) -> Any:
        return graph(linear(tp_group=strangers()), **options)

    def one_eager() -> None:
        module = linear(tp_group=strangers())
        under(graph(module) if rank else module, recipe=mixed())

    def changes_recipe() -> None:
        module = linear(tp_group=strangers())
        under(module, recipe=recipe.Float8BlockScaling())
        under(graph(module), recipe=mixed())

    def mlp() -> Any:
        made: dict[str, Any] = {"tp_group": strangers(), "set_parallel_mode": True, "sequence_parallel": True}
        return mz.LayerNormMLP(32, 32, device="cpu", checkpoint=True, **made)

    cases: dict[str, Callable[[], Any]] = {
        "no group": lambda: graph(mz.Linear(32, 32, parallel_mode="column", tp_size=size, device="cpu"))(x),
        "tokens": lambda: graph(linear(parallel_mode="row"))(torch.ones(size + 1, 32 // size)),
        "uneven": lambda: traced()(torch.ones(4 + rank, 32)),
        "uneven, dynamic": lambda: traced(dynamic=True)(torch.ones(4 + rank, 32)),
        "recipes": lambda: under(traced(), recipe=mixed()),
        "recipes, inductor": lambda: under(traced(backend="inductor"), recipe=mixed()),
        "recipes, graphs may break": lambda: under(traced(fullgraph=False), recipe=mixed()),
        "recipe changes": changes_recipe,
        "recipe in the graph": lambda: graph(Region(linear(tp_group=strangers()), rank == 0))(x),
        "maxima": lambda: graph(Region(mz.Linear(32, 32, device="cpu"), rank == 0, strangers()))(x),
        "one without": lambda: under(graph(mlp()), enabled=rank == 0),
        "no region": lambda: under(graph(mlp()), recipe=mixed()) if rank else graph(mlp())(x),
        "one eager": one_eager,
        "operations": lambda: under(graph(operations()), recipe=mixed()),
    }
    return refusals(cases, ValueError, torch._dynamo.exc.TorchDynamoException)


def stack(group: Any) -> Any:
    made: dict[str, Any] = {**COLUMN, "tp_group": group}
    return torch.nn.Sequential(make(mz.Linear, 64, 64, **made), make(mz.Linear, 32, 64, **made))


CHOSEN = (recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling(), None, recipe.Float8BlockScaling())


def changes(rank: int) -> Result:
    """Recipes that change, on all processes; and on the second alone, which both find out, and go on from there."""
    group = world()[0]
    model, whole, maxima = stack(group), mz.Linear(64, 64, device="cpu"), strangers()
    x, dy = draw(32, 64, seed=1), draw(128, 32, seed=2)
    first = [step(model, x, dy, each) for each in CHOSEN]
    again = [step(model, x, dy, each) for each in CHOSEN]
    delayed = recipe.DelayedScaling()
    under(mz.Linear(32, 32, device="cpu"), recipe=CHOSEN[0], amax_reduction_group=maxima)
    asked = questions(group), questions(maxima)

    def bare() -> None:
        for other in (stack(group), stack(group), model):  # what led is gone
            other(x)
            other(x)
        step(model, x, dy, CHOSEN[0] if rank else None)

    def in_part() -> None:
        with mz.autocast(recipe=CHOSEN[0]):
            model(x)
            with mz.autocast(enabled=False):
                model[0](x)
            model(x[: 16 + 16 * rank])

    def inside() -> None:
        with mz.autocast(recipe=CHOSEN[0]):
            model(x)
            with mz.autocast(recipe=CHOSEN[rank]):
                model[0](x)

    def takes_maxima() -> None:
        for each in (delayed, delayed, CHOSEN[0], CHOSEN[0] if rank else delayed):
            with mz.autocast(recipe=each, amax_reduction_group=maxima):
                whole(x).sum().backward()

    cases: dict[str, Callable[[], Any]] = {
        "to a new one": lambda: step(model, x, dy, recipe.NVFP4BlockScaling() if rank else CHOSEN[3]),
        "to one of before": lambda: step(model, x, dy, CHOSEN[1 - rank]),
        "to none": lambda: step(model, x, dy, None if rank else CHOSEN[3]),
        "from none": bare,
        "other tokens": in_part,
        "in a region inside": inside,
        "maxima": takes_maxima,
    }
    found = refusals(cases, ValueError)
    last = step(model, x, dy, CHOSEN[1])
    wrong = [key for a, b in zip(first, again, strict=True) for key in differing(a, b)]
    more = questions(group) - asked[0], questions(maxima) - asked[1]
    return {"errors": found, "wrong": wrong + differing(last, first[1]), "asked": more}


def questions(group: Any) -> int:
    """How often this process has asked the others."""
    shared = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group)
    return dist.PrefixStore(f"mezzotint/{group.group_name}/{members}", shared).add(f"{dist.get_rank(group)}", 0)


def compiled_changes(rank: int) -> Result:
    """The same of graphs, by step: what differs from eager code, and how many questions and graphs there were."""
    torch._dynamo.reset()
    group, maxima = strangers(), strangers()
    eager, traced = stack(world()[0]), stack(group)
    counter = CompileCounterWithBackend("aot_eager")
    call = graph(traced, counter)
    x, dy = draw(32, 64, seed=1), draw(128, 32, seed=2)
    want = {each: step(eager, x, dy, each) for each in CHOSEN}
    found: Result = {}

    def run(name: str, each: Any, call: Any = call) -> None:
        asked, made = questions(group), counter.frame_count
        wrong = differing(step(traced, x, dy, each, call), want[each])
        found[name] = {"wrong": wrong, "asked": questions(group) - asked, "graphs": counter.frame_count - made}

    for i, each in enumerate(CHOSEN[:3]):
        run(f"traced {i}", each)
    for i, each in enumerate(CHOSEN[:3]):
        run(f"again {i}", each)
    made = {  # with regions inside
        "in the graph": Region(traced, False),
        "in the second region": Region(traced[1], False, first=traced[0]),
        "maxima": Region(mz.Linear(64, 64, device="cpu", params_dtype=torch.bfloat16), False, maxima),
    }
    graphs = {name: graph(module) for name, module in made.items()}
    for each in graphs.values():
        for _ in range(2):
            each(x)
    call(x)
    current_state().agreed = (*current_state().agreed, (maxima.group_name, "delayed scaling, say", True))

    def changed(name: str) -> None:
        made[name].option = rank == 1
        try:
            graphs[name](x)
        finally:
            made[name].option = False

    def inside() -> None:
        with mz.autocast(recipe=CHOSEN[0]):
            call(x)
            with mz.autocast(recipe=CHOSEN[rank]):
                call(x)

    @torch.no_grad()
    def without_gradients() -> None:
        under(lambda _: call(x), recipe=CHOSEN[rank])

    cases: dict[str, Callable[[], Any]] = {
        "to a new one": lambda: step(traced, x, dy, CHOSEN[3] if rank else CHOSEN[1], call),
        "to one of before": lambda: step(traced, x, dy, CHOSEN[1 - rank], call),
        "to none": lambda: step(traced, x, dy, None if rank else CHOSEN[0], call),
        "from none": lambda: step(traced, x, dy, CHOSEN[0] if rank else None, call),
        "to no region": lambda: call(x) if rank else step(traced, x, dy, CHOSEN[0], call),
        "from no region": lambda: step(traced, x, dy, CHOSEN[0], call) if rank else call(x),
        "in a region inside": inside,
        "without gradients": without_gradients,
        "other tokens": lambda: call(x[: 16 + 16 * rank]),
        **{name: partial(changed, name) for name in graphs},
    }
    found["errors"] = refusals(cases, ValueError)
    run("goes on", CHOSEN[1])
    if rank == 1:
        torch._dynamo.reset()
    run("the second compiles again", CHOSEN[1])
    call(x)
    if rank == 1:
        traced._apply(torch.clone)  # as if moved
    call(x)
    run("moved", CHOSEN[1])
    run("eager", CHOSEN[3], None)
    with torch.no_grad(), mz.autocast(recipe=CHOSEN[1]):
        y = (traced if rank else call)(x)
    found["the second is eager"] = differing({"y": y}, {"y": want[CHOSEN[1]]["y"]})
    module = linear(tp_group=strangers())
    if rank == 1:
        torch.export.export(module, (torch.ones(32, 32),), strict=True)
        with impatient():
            found["alone"] = refusals({"": lambda: under(module, recipe=CHOSEN[3])}, ValueError)[""]
    dist.barrier()
    found["not alone"] = refusals({"": lambda: under(module, recipe=CHOSEN[3])}, ValueError)[""]
    found["apart"] = differing({"y": apart(x)}, {"y": want[CHOSEN[0]]["y"]})
    return found


@contextmanager
def impatient() -> Iterator[None]:
    """Waits for others one second."""
    store = dist.distributed_c10d._get_default_store()
    patience = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        yield
    finally:
        store.set_timeout(patience)


def graph(module: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(module, fullgraph=True, backend=backend)


@torch.no_grad()
def apart(x: torch.Tensor) -> torch.Tensor:
    """A model in one graph on the first process, in one for each module on the second."""
    torch._dynamo.reset()
    model = stack(strangers())
    first, second = (graph(module) for module in model)
    whole = graph(model)
    with mz.autocast(recipe=CHOSEN[0]):
        return second(first(x)) if world()[2] else whole(x)


def comparisons(rank: int) -> Result:
    """How often processes compare in a step, in eager code and in graphs."""
    x, compared, found = draw(32, 64, seed=1), [0], {}
    check_equal = meeting.check_equal

    def counted(*args: Any, **values: str) -> None:
        compared[0] += 1
        check_equal(*args, **values)

    def count(call: Any, **region: Any) -> list[int]:
        counts = []
        for _ in range(3):
            before = compared[0]
            with mz.autocast(**region) if region else nullcontext():
                call(x)
            counts.append(compared[0] - before)
        return counts

    meeting.check_equal = counted
    try:
        for backend in (None, "inductor"):
            torch._dynamo.reset()
            model, mlp = stack(strangers()), make(mz.LayerNormMLP, 64, 64, tp_group=world()[0], set_parallel_mode=True)
            functions: dict[str, Any] = {
                "model": model,
                "twice": lambda x, model=model: model(x) + model(x),
                "checkpoint": lambda x, mlp=mlp: checkpoint(mlp, x, use_reentrant=False),
                "regions": Region(model[1], False, first=model[0]),
            }
            calls = {name: call if backend is None else graph(call, backend) for name, call in functions.items()}
            counts: dict[str, Any] = {name: count(call, recipe=CHOSEN[0]) for name, call in calls.items()}
            counts.update({f"bare {name}": count(call) for name, call in calls.items()})
            recompute = partial(lambda call, x: call(x).float().sum().backward(), calls["checkpoint"])
            counts["recomputed"] = count(recompute, recipe=CHOSEN[0])
            with torch.no_grad():
                counts["without gradients"] = count(calls["model"])
            found[str(backend)] = counts
    finally:
        meeting.check_equal = check_equal
    return found
