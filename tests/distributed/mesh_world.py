"""What each of four processes computes on a mesh of two dimensions: modules that styles split over one of them, whose
parts FSDP2 shards over the other. The batch is the same on all."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import mezzotint as mz
from mezzotint.distributed.checkpoint import full_state, load, load_full_state, save
from mezzotint.distributed.fsdp import ShardedWeight, low_precision_gather
from mezzotint.distributed.parts import find_placements
from mezzotint.distributed.styles import ColwiseParallel, RowwiseParallel, TensorParallel
from tests.distributed.dcp_world import folder, learnt
from tests.distributed.sharded import batch, loss_of, sent, sharded, spread_out
from tests.recipes import RECIPES
from tests.worlds import Result, attempt

# Recipes, and how a model comes onto the mesh: made in parts or split by styles, gathered in low precision or not,
# which may be asked for before the split, too.
WAYS = {
    "delayed": ("tp_group", "styles", "gathered"),
    "current": ("tp_group", "styles", "gathered", "gathered first"),
    "rowwise": ("tp_group", "gathered"),
    "block": ("tp_group", "gathered"),
    "mxfp8": ("tp_group", "gathered"),
    "nvfp4": ("tp_group", "styles", "gathered"),
}


def width_of(recipe: str) -> int:
    """Half of it is a part's rows, or columns, and half of those a shard's rows: whole blocks of the MLP."""
    return 256 if recipe == "block" else 64


def make(width: int = 64, activation: str = "gelu", tp_group: Any = None, **options: Any) -> nn.Sequential:
    """Split by column, by row, and an MLP; with `tp_group` this process's parts."""
    torch.manual_seed(0)
    kind = {"device": "cpu", "params_dtype": torch.float32, "init_method": spread_out, "tp_group": tp_group, **options}
    modes: list[dict[str, Any]] = [{}, {}, {}]
    if tp_group is not None:
        modes = [{"parallel_mode": "column"}, {"parallel_mode": "row"}, {"set_parallel_mode": True}]
    return nn.Sequential(
        mz.LayerNormLinear(width, width, **kind, **modes[0]),
        mz.Linear(width, width, **kind, **modes[1]),
        mz.LayerNormMLP(width, 2 * width, activation=activation, **kind, **modes[2]),
    )


def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def styled(made: Any, over: Any, sequence: bool = False) -> Any:
    kinds = {"0": ColwiseParallel, "1": RowwiseParallel, "2": TensorParallel}
    plan = {name: kind(sequence_parallel=sequence) for name, kind in kinds.items()}
    return parallelize_module(made, over["tp"], plan)


def ways(over: Any, recipe: Any, width: int, **options: Any) -> dict[str, Callable[[], Any]]:
    """By name, as above."""
    group = over["tp"].get_group()
    found: dict[str, Callable[[], Any]] = {
        "styles": lambda: styled(make(width, **options), over),
        "tp_group": lambda: make(width, tp_group=group, **options),
        "gathered": lambda: low_precision_gather(styled(make(width, **options), over), recipe),
        "gathered first": lambda: styled(low_precision_gather(make(width, **options), recipe), over),
    }
    return {name: partial(_sharded, made, over["dp"]) for name, made in found.items()}


def _sharded(made: Callable[[], Any], over: Any) -> nn.Sequential:
    return sharded(made(), mesh=over)


def train(made: Any, recipe: Any, count: int = 2, *, optim: Any = None, clip: float = 0.0, call: Any = None) -> Result:
    """Losses, and norms of gradients where they are clipped."""
    optim = torch.optim.SGD(made.parameters(), 0.1) if optim is None else optim
    losses, norms = [], []
    for number in range(count):
        torch.manual_seed(number)  # stochastic rounding
        with mz.autocast(enabled=recipe is not None, recipe=recipe):
            y = (made if call is None else call)(batch(number, made[0].weight.shape[1]).float())
        loss = loss_of(y)
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(made.parameters(), clip)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms}


def distance(made: nn.Module, whole: nn.Module, start: nn.Module) -> float:
    """Between what a model and one process have learnt, of what that has learnt: the largest over parameters."""
    places, found = find_placements(made), []
    known, first = dict(whole.named_parameters()), dict(start.named_parameters())
    for name, parameter in made.named_parameters():
        change = (known[name] - first[name]).detach().norm()
        for offsets, piece in places[name].parts(parameter).pieces:
            at = tuple(slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
            found.append(float((piece - known[name].detach()[at]).norm() / change))
    return max(found)


def local(made: nn.Module) -> dict[str, torch.Tensor]:
    """What this process has."""
    found = {}
    for name, value in made.state_dict().items():
        held = value.to_local() if isinstance(value, DTensor) else value
        assert type(held) is torch.Tensor, name
        found[name] = held.clone()
    return found


def mesh_training(rank: int) -> Result:
    """Two steps in every recipe; what one process computes is for rank 0 alone."""
    over, found = mesh(), {}
    for name, chosen in WAYS.items():
        recipe, width = RECIPES[name], width_of(name)
        result: Result = {}
        first: Any = None
        for way in chosen:
            made = ways(over, recipe, width)[way]()
            losses, state = train(made, recipe)["losses"], local(made)
            first = (losses, state) if first is None else first
            same = losses == first[0] and state.keys() == first[1].keys()
            result[way] = same and all(torch.equal(value, first[1][key]) for key, value in state.items())
        if rank == 0:
            alone = make(width)
            result["losses"] = losses, train(alone, recipe)["losses"]
            result["distance"] = distance(made, alone, make(width))
        found[name] = result
    return found


def mesh_sequence(rank: int) -> Result:
    """Tokens split over the processes that share a weight."""
    over, recipe = mesh(), RECIPES["current"]
    number = over["tp"].get_local_rank()
    alone, made = make(), sharded(low_precision_gather(styled(make(), over, True), recipe), mesh=over["dp"])
    train(alone, recipe)
    # Each has the mean over half of the tokens, and gradients are of the sum of the two: half of it is the mean of all.
    train(made, recipe, optim=torch.optim.SGD(made.parameters(), 0.05), call=lambda x: made(x.chunk(2)[number]))
    return {"distance": distance(made, alone, make())}


def mesh_clipping(rank: int) -> Result:
    """Norms of gradients, each of which is counted once."""
    over, recipe = mesh(), RECIPES["current"]
    made, alone = ways(over, recipe, 64)["gathered"](), make()
    return {"made": train(made, recipe, 1, clip=0.01), "alone": train(alone, recipe, 1, clip=0.01)}


def mesh_compiled(rank: int) -> Result:
    """A block that is compiled whole: its weight is a DTensor of what FSDP2 has gathered in low precision."""
    warnings.filterwarnings("ignore", ".*attribute of a Tensor that is not a leaf", UserWarning)  # Dynamo looks at grad
    over, recipe, counter = mesh(), RECIPES["current"], CompileCounterWithBackend("aot_eager")
    made, eager = (ways(over, recipe, 64)["gathered"]() for _ in range(2))
    losses = []
    for which in (made, eager):
        train(which, recipe, 1)  # in eager code the first call asks the others what they run
        if which is made:
            made[0].compile(backend=counter, fullgraph=True)
        losses.append(train(which, recipe)["losses"])
    return {"losses": losses, "graphs": counter.frame_count}


def mesh_bytes(rank: int) -> Result:
    """Of each all-gather of a step."""
    over, found = mesh(), {}
    for name in ("none", "current", "mxfp8", "nvfp4"):
        recipe = RECIPES[name]
        made = styled(make(128, bias=False), over)
        if recipe is not None:
            low_precision_gather(made, recipe)
        made = sharded(made, mesh=over["dp"])
        kinds = {type(p._local_tensor) for p in made.parameters() if p.dim() == 2}  # type: ignore[attr-defined]
        assert kinds == {torch.Tensor if recipe is None else ShardedWeight}
        with sent() as gathers:
            train(made, recipe, 1)
        found[name] = gathers
    return found


def mesh_checkpoint(rank: int) -> Result:
    """Written in a thread, while they train on."""
    made, optim = trained(mesh(), "gelu")
    writing = save(folder() / "mesh", made, optim, process_group=dist.new_group(), is_async=True)
    found = {"learnt": learnt(made, optim), "full": full_state(made)}
    train(made, RECIPES["delayed"], 1, optim=optim)
    load_full_state(made, found["full"])
    assert writing is not None
    writing.result()
    return {**found, "full again": full_state(made)}


def trained(over: Any, activation: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    made = ways(over, RECIPES["delayed"], 64, activation=activation)["gathered"]()
    optim = adam(made)
    train(made, RECIPES["delayed"], optim=optim)
    return made, optim


def adam(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=5e-3)


def mesh_wrong(rank: int) -> Result:
    over, recipe = mesh(), RECIPES["current"]
    found: Result = {}
    columns = sharded(
        low_precision_gather(styled(make(), over), recipe),
        mesh=over["dp"],
        shard_placement_fn=lambda p: Shard(p.dim() - 1),
    )
    attempt(found, "columns", lambda: columns(batch(0, 64).float()))
    attempt(found, "sharded", lambda: low_precision_gather(ways(over, recipe, 64)["styles"](), recipe))
    attempt(found, "twice", lambda: low_precision_gather(low_precision_gather(styled(make(), over), recipe), recipe))
    attempt(
        found, "twice before", lambda: low_precision_gather(styled(low_precision_gather(make(), recipe), over), recipe)
    )
    return found


def mesh_gated(rank: int) -> Result:
    """The weight of a gated activation, of each half of which a process has some."""
    over, recipe = mesh(), RECIPES["delayed"]
    kinds = ways(over, recipe, 64, activation="swiglu")
    made, optim = trained(over, "swiglu")
    save(folder() / "gated", made, optim)
    found: Result = {"learnt": learnt(made, optim), "full": full_state(made)}
    again, parts = kinds["styles"](), make(activation="swiglu", tp_group=dist.group.WORLD)
    optims = [adam(which) for which in (again, parts)]
    for which, how in zip((again, parts), optims, strict=True):
        load(folder() / "gated", which, how)
    found["in four parts"] = learnt(parts, optims[1])
    found["losses"] = [train(which, recipe, 1, optim=how) for which, how in ((made, optim), (again, optims[0]))]
    load_full_state(again, found["full"])  # which has taken a step
    found["full again"] = full_state(again)
    split = styled(make(activation="swiglu"), over)
    save(folder() / "gated in parts", split)
    found["distance"] = _gated_distance(kinds["gathered"](), recipe)
    return found


def _gated_distance(made: nn.Sequential, recipe: Any) -> float:
    alone = make(activation="swiglu")
    for which in (made, alone):
        train(which, recipe)
    return distance(made, alone, make(activation="swiglu"))


CHECKS = (
    mesh_training,
    mesh_sequence,
    mesh_clipping,
    mesh_compiled,
    mesh_bytes,
    mesh_checkpoint,
    mesh_wrong,
    mesh_gated,
)
