"""How wrong use over processes is refused, in eager and compiled code, and that right use asks no more than it must."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import mezzotint as mz
from mezzotint import ops, recipe
from mezzotint.comm import collectives as comm
from mezzotint.distributed import check_same
from mezzotint.tensor.partition import Split, quantize_shard
from tests.distributed.parallel import differing, draw, make, step, world
from tests.quantizer_formats import FORMATS
from tests.worlds import Result

ERRORS = (ValueError, torch._dynamo.exc.TorchDynamoException)
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
    """Delayed scaling on the first rank, which reduces amaxes over all of them."""
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
        "one without": lambda: under(mz.LayerNormMLP(32, 32, set_parallel_mode=True, **made), enabled=rank == 0),
        "amaxes": lambda: under(mz.Linear(32, 32, device="cpu"), recipe=scaled(), amax_reduction_group=strangers()),
        "amaxes, one without": lambda: under(
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
    """A region, and its recipe, that are made in the graph. `option` of the recipe."""

    def __init__(self, module: Any, option: bool, group: Any = None) -> None:
        super().__init__()
        self.module, self.option, self.group = module, option, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def new_graph() -> None:
        module = linear(tp_group=strangers())
        under(module, recipe=recipe.Float8BlockScaling())
        under(graph(module), recipe=mixed())

    def new_group() -> None:
        module = linear(tp_group=strangers())
        under(module, recipe=recipe.Float8BlockScaling())
        module.set_tensor_parallel_group(strangers())
        under(module, recipe=mixed())

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
        "a new graph": new_graph,
        "a new group": new_group,
        "recipe in the graph": lambda: graph(Region(linear(tp_group=strangers()), rank == 0))(x),
        "amaxes": lambda: graph(Region(mz.Linear(32, 32, device="cpu"), rank == 0, strangers()))(x),
        "one without": lambda: under(graph(mlp()), enabled=rank == 0),
        "no region": lambda: under(graph(mlp()), recipe=mixed()) if rank else graph(mlp())(x),
        "one eager": one_eager,
        "operations": lambda: under(graph(operations()), recipe=mixed()),
    }
    return refusals(cases, *ERRORS)


def stack(group: Any) -> Any:
    made: dict[str, Any] = {**COLUMN, "tp_group": group}
    return torch.nn.Sequential(make(mz.Linear, 64, 64, **made), make(mz.Linear, 32, 64, **made))


CHOSEN = (recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling(), None)


def questions(group: Any) -> int:
    """How often this rank has asked the others."""
    shared = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group)
    return dist.PrefixStore(f"mezzotint/{group.group_name}/{members}", shared).add(f"{dist.get_rank(group)}", 0)


def rounds(rank: int) -> Result:
    """How often ranks ask, by step: in eager code, then in graphs of the same modules, over what is new and what is
    known. And what differs from eager code, how many graphs there were, and which operators of ours they have."""
    torch._dynamo.reset()
    group = strangers()
    eager, compiled = stack(world()[0]), stack(group)
    made_graphs, seen = [], []

    def record(module: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if "mezzotint" in str(node.target))
        return make_boxed_func(module.forward)

    def backend(module: Any, inputs: Any) -> Any:
        made_graphs.append(module)
        return aot_autograd(fw_compiler=record, bw_compiler=record)(module, inputs)

    call = torch.compile(compiled, fullgraph=True, backend=backend)
    x, dy = draw(32, 64, seed=1), draw(128, 32, seed=2)
    want = {each: step(eager, x, dy, each) for each in CHOSEN}
    found: Result = {}

    def run(name: str, each: Any, call: Any = call) -> None:
        asked, made = questions(group), len(made_graphs)
        with collectives() as calls:
            wrong = differing(step(compiled, x, dy, each, call), want[each])
        asked, made = questions(group) - asked, len(made_graphs) - made
        found[name] = {"wrong": wrong, "asked": asked, "graphs": made, "calls": calls}

    for i, each in enumerate(CHOSEN):
        run(f"eager {i}", each, None)  # the first run of each module asks
    for i, each in enumerate(CHOSEN):
        run(f"graph {i}", each)  # a new graph asks for what is new
    for i, each in enumerate(CHOSEN):
        run(f"again {i}", each)
    if rank == 1:
        torch._dynamo.reset()
    run("the second traces again", CHOSEN[1])
    if rank == 1:
        compiled._apply(torch.clone)  # as if moved
    run("the second has moved", CHOSEN[1])
    found["operators"] = sorted({name.split(".")[-1] if "." in name else name for name in seen})
    return found


@contextmanager
def collectives() -> Iterator[list[str]]:
    """What runs inside, in eager code and in graphs: kinds, and dtypes."""
    run, calls = comm._run, []

    def counted(kind: str, x: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append(f"{kind} {x.dtype}")
        return run(kind, x, group)

    comm._run = counted
    try:
        yield calls
    finally:
        comm._run = run


def regions(rank: int) -> Result:
    """How often ranks ask when regions with an `amax_reduction_group` are entered, in eager code and in graphs."""
    torch._dynamo.reset()
    group, module = strangers(), mz.Linear(64, 64, device="cpu", params_dtype=torch.bfloat16)
    x, asked = draw(32, 64, seed=1), []
    call = torch.compile(Region(module, False, group), fullgraph=True, backend="aot_eager")

    def run(call: Any) -> None:
        before = questions(group)
        call(x)
        asked.append(questions(group) - before)

    def eager(x: torch.Tensor) -> None:
        with mz.autocast(recipe=CHOSEN[0], amax_reduction_group=group):
            module(x)

    for each in (eager, eager, call, call, Region(module, False, group), Region(module, True, group)):
        run(each)
    with torch.no_grad():  # without gradients no amaxes are taken
        run(Region(module, True, strangers()))
    return {"asked": asked}


def alone(rank: int) -> Result:
    """A rank that traces, or exports, alone."""
    torch._dynamo.reset()
    module, found = linear(tp_group=strangers()), {}
    x = torch.ones(32, 32)
    if rank == 1:
        torch.export.export(module, (x,), strict=True)
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
        with impatient():
            found["alone"] = refusals({"": lambda: under(call, recipe=CHOSEN[1])}, *ERRORS)[""]
    dist.barrier()
    found["not alone"] = refusals({"": lambda: under(module, recipe=CHOSEN[1])}, ValueError)[""]
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


def on_request(rank: int) -> Result:
    """`check_same`: what each rank has, of recipes that have changed on one of them, and of models that differ."""
    group = strangers()

    def model(size: int = 32, *, last: bool = True, **options: Any) -> Any:
        layers = [linear(tp_group=group, **options), mz.Linear(size, 32, device="cpu", tp_group=group, **COLUMN)]
        return torch.nn.Sequential(*layers[: 2 if last else 1], torch.nn.ReLU())

    def inside() -> None:
        with mz.autocast(recipe=mixed()):
            check_same(model())

    def changed() -> None:
        made = model()
        for each in (CHOSEN[0], CHOSEN[1], CHOSEN[rank]):
            check_same(made, each)

    cases: dict[str, Callable[[], Any]] = {
        "the same": lambda: check_same(model(), "mxfp8"),
        "none": lambda: check_same(model()),
        "whole": lambda: check_same(mz.Linear(32, 32 + 32 * rank, device="cpu"), mixed()),  # no rank shares it
        "recipes": lambda: check_same(model(), mixed()),
        "in a region": inside,
        "changed": changed,
        "sizes": lambda: check_same(model(32 + 32 * rank)),
        "splits": lambda: check_same(model(parallel_mode="row" if rank else "column")),
        "tokens": lambda: check_same(model(sequence_parallel=rank == 0)),
        "dtypes": lambda: check_same(model(params_dtype=torch.bfloat16 if rank else torch.float32)),
        "one has more": lambda: check_same(model(last=rank == 0)),
        "no model": lambda: check_same("a model"),  # type: ignore[arg-type]
        "no recipe": lambda: check_same(model(), "mxfp9"),
    }
    return refusals(cases, ValueError, TypeError)


CHECKS = (wrong_use, rounds, regions, alone, on_request, compiled_wrong_use)
