"""What each of two processes computes with FSDP2 and DDP. The batch is the same on both, so that means are exact."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mezzotint as mz
from mezzotint.distributed.checkpoint import full_state, load_full_state
from mezzotint.distributed.fsdp import ShardedWeight, low_precision_gather
from tests.distributed.sharded import Again, Steps, batch, loss_of, model, optimizer, sent, sharded, train, width_of
from tests.recipes import RECIPES, VARIANTS
from tests.worlds import Result, attempt

ALL = {**RECIPES, "mxfp8 2d": mz.recipe.MXFP8BlockScaling(enable_2d_quantization=True), **VARIANTS}
LONG = 50


def full(made: nn.Module) -> Result:
    """Whole parameters by name."""
    return {name: p.full_tensor().detach().clone() for name, p in made.named_parameters()}


def long_run(rank: int) -> Result:
    """The weights gathered in low precision, in every recipe; what one process computes is for rank 0 alone."""
    found: Result = {}
    for name, recipe in RECIPES.items():
        width = width_of(name)
        made = model(width)
        if recipe is not None:
            low_precision_gather(made, recipe)
        made = sharded(made)
        losses = train(made, recipe, LONG, width=width)
        found[name] = {"losses": losses, **full(made)}
        if rank == 0:
            alone = model(width)
            losses = train(alone, recipe, LONG, width=width)
            found[f"{name} alone"] = {"losses": losses, **dict(alone.named_parameters())}
    return found


def ways(name: str, one: bool | None = None) -> dict[str, Callable[..., Any]]:
    """How a model comes to be sharded."""
    recipe, width = ALL[name], width_of(name)
    made: dict[str, Callable[..., Any]] = {"high precision": lambda **o: sharded(model(width, **o))}
    if recipe is not None:
        gathered = low_precision_gather
        made["gathered"] = lambda **o: sharded(gathered(model(width, **o), recipe, one_direction=one))
        made["quantized"] = lambda **o: sharded(gathered(model(width, recipe, **o), one_direction=one))
    return made


def alone(name: str, way: str, **options: Any) -> nn.Sequential:
    return model(width_of(name), ALL[name] if way == "quantized" else None, **options)


def short_runs(rank: int) -> Result:
    """Losses of two steps, sharded and alone, each way."""
    found: Result = {}
    for name in (*RECIPES, "mxfp8 2d", "nvfp4-plain"):
        for one in (None, False) if name in ("rowwise", "mxfp8", "custom", "nvfp4-plain") else (None,):
            for way, make in ways(name, one).items():
                if one is False and way == "high precision":
                    continue
                made, width = make(), width_of(name)
                kind = type(made[1].fc1_weight._local_tensor).__name__
                losses = train(made, ALL[name], 2, width=width)
                expected = train(alone(name, way), ALL[name], 2, width=width) if rank == 0 else None
                found[f"{name} {way} {one}"] = losses, expected, kind
    return found


def compositions(rank: int) -> Result:
    """Micro-batches, recomputation, a rank without a shard."""
    found: Result = {}
    for name, way in (
        ("delayed", "high precision"),
        ("delayed", "gathered"),
        ("current", "gathered"),
        ("mxfp8", "gathered"),
        ("nvfp4", "quantized"),
        ("delayed", "quantized"),
    ):
        recipe, make = ALL[name], ways(name)[way]
        cases: dict[str, tuple[Callable[[nn.Sequential], nn.Module], dict[str, Any], dict[str, Any]]] = {
            "micro-batches": (Steps, {"microbatches": 2}, {}),
            "reentrant": (lambda made: Steps(made, True), {}, {}),
            "recomputed": (lambda made: Steps(made, False), {}, {}),
            "no shard": (lambda made: made, {}, {"head": 1} if way != "quantized" else {}),
        }
        for case, (wrap, how, options) in cases.items():
            made = make(**options)
            losses = train(wrap(made), recipe, 2, **how)
            expected = train(wrap(alone(name, way, **options)), recipe, 2, **how)
            found[f"{name} {way} {case}"] = losses, expected
            if case == "micro-batches":
                assert all(block._workspaces is None or block._workspaces[0] is None for block in made)
    return found


def one_unit(rank: int) -> Result:
    """All weights gathered at once, and kept for backward; the optimizer takes all parameters in one call."""
    found: Result = {}
    for name, quantized in (("delayed", False), ("mxfp8", False), ("current", True), ("nvfp4", True)):
        recipe = ALL[name]
        init = recipe if quantized else None
        made, reference = low_precision_gather(model(init=init), recipe), model(init=init)
        fully_shard(made, reshard_after_forward=False)
        losses = []
        for which in (made, reference):
            optim = torch.optim.AdamW(which.parameters(), lr=5e-3, foreach=True)
            losses.append(train(which, recipe, 3, optim=optim))
        found[name] = losses
    return found


def one_direction(rank: int) -> Result:
    """A format that has to send both copies: the bytes of each gather of two steps, their losses, and those alone."""
    recipe, other = ALL["mxfp8"], VARIANTS["mxfp8-dequantized"]
    found: Result = {}

    def small(init: Any = None, **options: Any) -> nn.Sequential:
        return model(init=init, bias=False, normalization="RMSNorm", **options)

    def gather(made: nn.Sequential, trained: Any = recipe, **options: Any) -> nn.Sequential:
        return sharded(low_precision_gather(made, trained), **options)

    def in_part(made: nn.Sequential) -> nn.Sequential:
        made[1].checkpoint = True
        return made

    def run(case: str, made: nn.Module, reference: nn.Module, trained: Any = recipe, **how: Any) -> None:
        with sent() as gathers:
            losses = train(made, trained, 2, **how)
        how.pop("call", None)
        found[case] = gathers, losses, train(reference, trained, 2, **how)

    run("again for backward", gather(small()), small())
    run("quantized", sharded(small(recipe)), small(recipe))
    run("kept for backward", gather(small(), reshard_after_forward=False), small())
    run("recomputed", Steps(gather(small()), False), Steps(small(), False))
    run("reentrant", Steps(gather(small()), True), Steps(small(), True))
    run("recomputed inside", gather(recomputed(small())), recomputed(small()))
    run("recomputed in part", gather(in_part(small())), in_part(small()))
    run("overridden", gather(small(), other), small(), other)
    kept = gather(small())

    def keep(x: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:
        kept.set_reshard_after_backward(not is_first_microbatch)
        return kept(x)

    run("kept after backward", kept, Steps(small()), call=keep, microbatches=2)
    held = gather(small())

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        for block in held:
            block.unshard()
        return held(x)

    run("by hand", held, small(), call=by_hand)
    run("saved elsewhere", Copied(gather(small())), small())
    return found


class Copied(nn.Module):
    """A block of which copies are saved for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied):
            return self.block(x)


def agreed(rank: int) -> Result:
    """One of two modules does not run on the second process, which uses its weight all the same."""
    recipe, kind = ALL["mxfp8"], {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"}

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mz.Linear(64, 64, **kind), mz.Linear(64, 64, **kind)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if rank == 0 else nn.functional.linear(x, self.second.weight.dequantize())

    torch.manual_seed(0)
    made = fully_shard(low_precision_gather(Some(), recipe), reshard_after_forward=True)
    with sent() as gathers:
        train(made, recipe, 2)
    units = [linear.weight._local_tensor._unit for linear in (made.first, made.second)]
    return {"gathers": gathers, "read again": [unit.reads_rows_again for unit in units]}


def compiled(rank: int) -> Result:
    """Blocks compiled whole: losses, graphs, and whether backward is sent both copies of a weight."""
    warnings.filterwarnings("ignore", ".*attribute of a Tensor that is not a leaf", UserWarning)  # Dynamo looks at grad
    found: Result = {}
    for name, way, one in (
        ("delayed", "high precision", None),
        ("current", "gathered", None),
        ("rowwise", "gathered", True),
        ("mxfp8", "quantized", None),
        ("custom", "gathered", None),
    ):
        torch._dynamo.reset()
        made, counter = ways(name, one)[way](), CompileCounterWithBackend("aot_eager")
        for block in made:
            block.compile(backend=counter, fullgraph=True)
        losses = train(made, ALL[name], 3)
        reads = getattr(getattr(made[0].weight._local_tensor, "_unit", None), "reads_rows_again", None)
        found[f"{name} {way}"] = losses, train(alone(name, way), ALL[name], 3), counter.frame_count, reads
    torch._dynamo.reset()
    recipe, counter = ALL["mxfp8"], CompileCounterWithBackend("aot_eager")
    made = sharded(low_precision_gather(recomputed(model()), recipe))  # by the compiler, in the graph of backward
    for block in made:
        block.compile(backend=counter, fullgraph=True)
    losses, expected = train(made, recipe, 3), train(model(), recipe, 3)
    found["recomputed"] = (
        losses,
        expected,
        counter.frame_count,
        made[0].block.weight._local_tensor._unit.reads_rows_again,
    )
    return found


def recomputed(made: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*map(Again, made))


def bytes_sent(rank: int) -> Result:
    """Of one step: each gather of a block, forward and then backward, and what its weights and the rest are."""
    found: Result = {}
    for name in (*RECIPES, "mxfp8 2d", "nvfp4-plain"):
        recipe, width = ALL[name], width_of(name)
        made = model(width, bias=False, normalization="RMSNorm")
        if recipe is not None:
            low_precision_gather(made, recipe)
        made = sharded(made)
        with sent() as gathers:
            train(made, recipe, 1, width=width)
        found[name] = gathers
    return found


def policy(rank: int) -> Result:
    """FP32 parameters, BF16 products, gradients summed in FP32."""
    found: Result = {}
    for name in ("none", "current", "nvfp4"):
        losses = []
        for gathered in (False, True):
            made = model(params_dtype=torch.float32)
            if gathered and name != "none":
                low_precision_gather(made, ALL[name])
            made = sharded(made, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
            losses.append(train(made, ALL[name], 3))
            assert all(p.dtype == torch.float32 for p in made.parameters())
        found[name] = losses
    return found


def between_steps(rank: int) -> Result:
    """What is done to parameters outside of forward and backward: they are DTensors then."""
    found: Result = {}
    for name in ("delayed", "mxfp8"):
        for way, make in ways(name).items():
            made, reference = make(), alone(name, way)
            for which in (made, reference):
                optim = optimizer(which)
                train(which, ALL[name], 2, optim=optim)
                with mz.autocast(recipe=ALL[name]):
                    loss = loss_of(which(batch(9, 64)))
                loss.backward()
                norm = nn.utils.clip_grad_norm_(which.parameters(), 0.1)
                found[f"{name} {way} norm {which is made}"] = getattr(norm, "full_tensor", lambda n=norm: n)()
                optim.step()
                optim.zero_grad()
            state = made.state_dict()
            other = make()
            other.load_state_dict(state)
            weight = made[1].fc1_weight
            twin = copy.deepcopy(weight)
            found[f"{name} {way}"] = {
                "keys": sorted(state) == sorted(reference.state_dict()),
                "kinds": {type(value._local_tensor).__name__ for k, value in state.items() if "extra" not in k},
                "copied": type(twin._local_tensor) is type(weight._local_tensor)
                and torch.equal(twin.full_tensor(), weight.full_tensor()),
                "losses": [train(which, ALL[name], 1, first=20) for which in (made, other, reference)],
            }
    return found


def other_modules(rank: int) -> Result:
    """Experts, and operations: losses, sharded and alone."""
    found: Result = {}
    options: dict[str, Any] = {"device": "cpu"}

    def experts() -> nn.Module:
        return mz.GroupedLinear(3, 64, 64, params_dtype=torch.bfloat16, **options)

    def operations() -> nn.Module:
        kind = {"dtype": torch.bfloat16, **options}
        return mz.ops.Sequential(mz.ops.LayerNorm(64, **kind), mz.ops.Linear(64, 64, **kind), mz.ops.GELU())

    for name in ("delayed", "mxfp8"):
        for make in (experts, operations):
            losses = []
            for gathered in (None, False, True):
                torch.manual_seed(0)
                made = make()
                if gathered:
                    low_precision_gather(made, ALL[name])
                if gathered is not None:
                    made = fully_shard(made, reshard_after_forward=True)
                call = (lambda x, made=made: made(x, [4, 0, 12])) if make is experts else made
                losses.append(train(made, ALL[name], 3, call=call))
            found[f"{name} {make.__name__}"] = losses
    return found


def halves(rank: int) -> Result:
    """Each process has half of the rows: parameters after some steps, and those of one process with all rows."""
    found: Result = {}
    half = slice(rank * 8, rank * 8 + 8)
    for name in ("none", "current", "mxfp8"):
        recipe, options = ALL[name], {"params_dtype": torch.float32}
        made, copied, whole = model(**options), model(**options), model(**options)
        if recipe is not None:
            low_precision_gather(made, recipe)
        sharded(made)
        replicated = DistributedDataParallel(copied)
        for which in (made, replicated, whole):
            optim = torch.optim.SGD(which.parameters(), 0.1)
            for step in range(5):
                x = batch(step, 64).float()
                with mz.autocast(enabled=recipe is not None, recipe=recipe):
                    loss_of(which(x if which is whole else x[half])).backward()
                optim.step()
                optim.zero_grad()
        kept = [{name: p.detach() for name, p in which.named_parameters()} for which in (copied, whole)]
        found[name] = full(made), *kept
    return found


def odds(rank: int) -> Result:
    """Losses as they should be, and as they are: not sharded, copied, frozen, converted, from the meta device."""
    recipe = RECIPES["current"]
    expected = train(model(), recipe, 2)
    found: Result = {
        "not sharded": (expected, train(low_precision_gather(model(), recipe), recipe, 2)),
        "copied": (expected, train(copy.deepcopy(low_precision_gather(model(), recipe)), recipe, 2)),
    }
    whole, made = model(), sharded(low_precision_gather(model(device="meta"), recipe))
    made.to_empty(device="cpu")
    load_full_state(made, full_state(whole))
    found["meta"] = expected, train(made, recipe, 2)
    whole, made = model(), model()
    for which in (whole, made):
        which[0].weight.requires_grad_(False)
    sharded(low_precision_gather(made, recipe))
    found["frozen"] = train(whole, recipe, 2), train(made, recipe, 2)
    losses = []
    for gathered in (False, True):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
        mz.convert(made, recipe)
        if gathered:
            fully_shard(low_precision_gather(made, recipe), reshard_after_forward=True)
        losses.append(train(made, None, 2))
    found["converted"] = losses[0], losses[1]
    return found


def data_parallel(rank: int) -> Result:
    """DDP; with delayed scaling, whose buffers it sends from rank 0."""
    found: Result = {}
    for name in ("delayed", "mxfp8", "nvfp4"):
        made = DistributedDataParallel(model())
        found[name] = train(made, ALL[name], 3), train(model(), ALL[name], 3)
    made = DistributedDataParallel(model())
    with mz.autocast(recipe=ALL["delayed"]):  # another batch on each rank: scales stay equal all the same
        loss_of(made(batch(rank, 64) * (1 + 3 * rank))).backward()
    with mz.autocast(recipe=ALL["delayed"]):
        made(batch(5, 64))
    found["scales"] = torch.stack([block.scale_fwd[:2].clone() for block in made.module])
    return found


def wrong_use(rank: int) -> Result:
    """Errors, on every rank."""
    recipe = RECIPES["current"]
    found: Result = {}
    attempt(found, "no model", lambda: low_precision_gather("model", recipe))  # type: ignore[arg-type]
    attempt(found, "no recipe", lambda: low_precision_gather(model()))
    attempt(found, "override", lambda: low_precision_gather(model(), VARIANTS["current-high_precision"]))
    attempt(found, "twice", lambda: low_precision_gather(low_precision_gather(model(), recipe), recipe))
    attempt(found, "sharded", lambda: low_precision_gather(sharded(model()), recipe))
    uneven = fully_shard(ways_of_uneven(recipe))
    attempt(found, "uneven", lambda: uneven(batch(0, 64)))
    fused = fully_shard(mz.Linear(64, 64, fuse_wgrad_accumulation=True, device="cpu", params_dtype=torch.bfloat16))
    attempt(found, "main_grad", lambda: fused(batch(0, 64)))
    attempt(found, "directions", lambda: low_precision_gather(model(), recipe, one_direction=1))  # type: ignore[arg-type]
    one = partial(low_precision_gather, recipe=ALL["mxfp8"], one_direction=True)
    kept = sharded(one(model()), reshard_after_forward=False)
    attempt(found, "kept for backward", lambda: train(kept, ALL["mxfp8"], 1))
    again = Steps(sharded(one(model())), False)
    attempt(found, "recomputed", lambda: train(again, ALL["mxfp8"], 1))
    later = sharded(one(model()))
    later.set_reshard_after_backward(False)
    attempt(found, "kept after backward", lambda: train(later, ALL["mxfp8"], 2))
    late = sharded(low_precision_gather(model(), ALL["mxfp8"]))
    train(late, ALL["mxfp8"], 1)
    attempt(found, "recomputed later", lambda: train(Steps(late, False), ALL["mxfp8"], 1))
    copied = sharded(low_precision_gather(nn.Sequential(*map(Copied, model())), ALL["mxfp8"]))
    attempt(found, "saved elsewhere", lambda: train(copied, ALL["mxfp8"], 1))
    mixed = RECIPES["mxfp8"] if rank else recipe
    for compiles in (False, True):
        gathered = sharded(low_precision_gather(model(), mixed))
        with mz.quantized_model_init(recipe=mixed):
            quantized = sharded(model())
        for name, made in (("gathered", gathered), ("quantized", quantized)):
            call = torch.compile(made, backend="aot_eager") if compiles else made
            attempt(found, f"mixed, {name}, {compiles}", partial(call, batch(0, 64)))
    found["kept"] = type(ShardedWeight(torch.ones(2, 2), recipe, 0) * 2).__name__
    dist.barrier()
    return found


def ways_of_uneven(recipe: Any) -> nn.Module:
    with mz.quantized_model_init(recipe=recipe):
        return mz.Linear(64, 5, device="cpu", params_dtype=torch.bfloat16)


CHECKS = (
    short_runs,
    compositions,
    one_unit,
    one_direction,
    agreed,
    bytes_sent,
    policy,
    between_steps,
    other_modules,
    halves,
    odds,
    data_parallel,
    wrong_use,
)
