"""What each of four processes does with checkpoints: written by two of them, read by four, written by four."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mezzotint as mz
from mezzotint.distributed.checkpoint import full_state, is_complete, load, load_full_state, plain_state, save
from mezzotint.distributed.fsdp import low_precision_gather
from mezzotint.distributed.parts import find_placements
from tests.distributed.parallel import BITWISE
from tests.distributed.sharded import model, optimizer, sharded, spread_out, train
from tests.recipes import RECIPES
from tests.worlds import Result, attempt

WIDTH = 128  # a quarter of it is one block of MXFP8
SIZE = 4
CASES = {
    "delayed high precision": ("delayed", False),
    "current quantized": ("current", True),
    "delayed quantized": ("delayed", True),
    "mxfp8 quantized": ("mxfp8", True),
    "nvfp4 quantized": ("nvfp4", True),
}


def folder() -> Path:
    """Of checkpoints, known to the test and to all processes."""
    return Path(os.environ["MEZZOTINT_TEST_FOLDER"])


def build(case: str, **options: Any) -> nn.Sequential:
    recipe, quantized = CASES[case]
    return model(WIDTH, RECIPES[recipe] if quantized else None, **options)


def steps(made: nn.Module, case: str, optim: Any, first: int, count: int) -> list[float]:
    return train(made, RECIPES[CASES[case][0]], count, width=WIDTH, first=first, optim=optim)


def written_by_two(rank: int) -> Result:
    """Two of the four train, and save in between; one checkpoint is written while they train on."""
    mesh = DeviceMesh("cpu", [0, 1])
    writers = dist.new_group([0, 1])
    found: Result = {}
    for case in CASES if rank < 2 else ():
        made = sharded(build(case), mesh=mesh)
        optim = optimizer(made)
        steps(made, case, optim, 0, 2)
        path = folder() / f"{case} 2"
        is_async = case == "delayed high precision"
        writing = save(path, made, optim, {"step": torch.tensor(2)}, process_group=writers, is_async=is_async)
        state = full_state(made)
        losses = steps(made, case, optim, 2, 2)
        if writing is not None:
            writing.result()
        found[case] = {"state": state, "losses": losses, "complete": is_complete(path)}
        try:
            save(path, made, process_group=writers)
        except ValueError as error:
            found[case]["again"] = str(error)
    dist.barrier()
    return found


def read_by_four(rank: int) -> Result:
    """Into models that have learnt something else; saved again, by four."""
    found: Result = {}
    for case in CASES:
        made = build(case)
        if not CASES[case][1]:
            low_precision_gather(made, RECIPES[CASES[case][0]])
        made = sharded(made)
        optim = optimizer(made)
        steps(made, case, optim, 50, 1)
        extra = load(folder() / f"{case} 2", made, optim)
        found[case] = {"state": full_state(made), "step": extra["step"]}
        save(folder() / f"{case} 4", made, optim, extra)
        found[case]["losses"] = steps(made, case, optim, 2, 2)
    return found


def plain(rank: int) -> Result:
    """A plain state dict into shards, and back."""
    found: Result = {}
    for case in CASES:
        whole = build(case)
        steps(whole, case, None, 0, 1)
        state = full_state(whole)
        made = sharded(build(case))
        load_full_state(made, state)
        local = {type(v._local_tensor) for v in plain_state(made).values() if isinstance(v, DTensor)}
        found[case] = {"expected": state, "state": full_state(made), "kinds": sorted(kind.__name__ for kind in local)}
    try:
        load_full_state(made, {})
    except ValueError as error:
        found["error"] = str(error)
    try:
        load(folder() / "nothing", made)
    except ValueError as error:
        found["nothing"] = str(error)
    return found


class Experts(nn.Module):
    """x and what two experts make of half of its rows each; a weight for each, and one for both. GroupedLinear leaves
    sums over processes to others, and amaxes of delayed scaling to `amax_reduction_group`: there is none here."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.fc1 = mz.GroupedLinear(2, 64, 128, bias=False, parallel_mode="column", **options)
        self.fc2 = mz.GroupedLinear(2, 128, 64, bias=False, parallel_mode="row", **options)
        one = options | {"single_grouped_weight": True}
        self.fc3 = mz.GroupedLinear(2, 64, 128, bias=False, parallel_mode="column", **one)
        self.fc4 = mz.GroupedLinear(2, 128, 64, bias=False, parallel_mode="row", **one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        for first, second in ((self.fc1, self.fc2), (self.fc3, self.fc4)):
            y = x.detach()
            with mz.autocast(recipe=RECIPES["current"]):
                for layer in (first, second):
                    y = layer(y, [half, x.shape[0] - half])
            total = y.detach().clone()
            if first.tp_group is not None:
                dist.all_reduce(total, group=first.tp_group)
            x = x + y + (total - y).detach()
        return x


def split_model(tp_group: Any = None, **options: Any) -> nn.Sequential:
    """Split by column, by row, halves of a gated activation, operations, experts; with `tp_group` this process's
    parts."""
    torch.manual_seed(0)
    options = {"device": "cpu", "params_dtype": torch.float32, "tp_group": tp_group, **options}
    made = {"device": "cpu", "dtype": torch.float32, "tensor_parallel_group": tp_group}
    return nn.Sequential(
        mz.LayerNormLinear(64, 128, parallel_mode="column", **options),
        mz.Linear(128, 64, parallel_mode="row", **options),
        mz.LayerNormMLP(64, 64, activation="swiglu", set_parallel_mode=True, **options),
        mz.ops.Sequential(
            mz.ops.Linear(64, 64, tensor_parallel_mode="column", **made),
            mz.ops.Linear(64, 64, tensor_parallel_mode="row", **made),
        ),
        Experts(**options),
    )


def split_steps(made: nn.Module, optim: Any, first: int, count: int) -> list[float]:
    return train(made, RECIPES["delayed"], count, width=64, first=first, optim=optim, call=lambda x: made(x.float()))


def learnt(made: nn.Module, optim: Any) -> Result:
    """Of each parameter: itself and AdamW's state, what this process has of them, and where that lies in the whole."""
    found: Result = {}
    places = find_placements(made)
    for name, parameter in made.named_parameters():
        for key, value in (("", parameter), *optim.state[parameter].items()):
            if value.dim():
                found[f"{name} {key}"] = [(at, part.clone()) for at, part in places[name].parts(value).pieces]
    return found


def parts_of_two(rank: int) -> Result:
    """Two of the four train, write in a thread, change everything meanwhile, and go on from what was written."""
    group, writers = dist.new_group([0, 1]), dist.new_group([0, 1])
    found: Result = {}
    if rank < 2:
        made = split_model(group)
        optim = optimizer(made)
        split_steps(made, optim, 0, 2)
        found["learnt"] = learnt(made, optim)
        kept = copy.deepcopy((made.state_dict(), optim.state_dict()))
        if rank == 1:
            dist.barrier(group)  # until it comes nothing is written: rank 0 has changed its weights by then
        writing = save(folder() / "parts 2", made, optim, process_group=writers, is_async=True)
        with torch.no_grad():
            for value in (*made.parameters(), *(v for state in optim.state.values() for v in state.values())):
                value.fill_(7.0)
        if rank == 0:
            dist.barrier(group)
        assert writing is not None
        writing.result()
        made.load_state_dict(kept[0])
        optim.load_state_dict(kept[1])
        again = split_model(group)
        second = optimizer(again)
        load(folder() / "parts 2", again, second, process_group=group)
        found["losses"] = [split_steps(which, how, 2, 2) for which, how in ((made, optim), (again, second))]
        found["extra"] = [full_state(which)["0._extra_state"] for which in (made, again)]
    dist.barrier()
    return found


def parts_of_four(rank: int) -> Result:
    """Read by a group of four, by two in shards, each written again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    found: Result = {}
    for name, group in (("parts 4", dist.group.WORLD), ("parts in shards", mesh["parts"].get_group())):
        made = split_model(group)
        if name == "parts in shards":
            low_precision_gather(made, RECIPES["delayed"])
            for block in made:
                fully_shard(block, mesh=mesh["shards"])
        optim = optimizer(made)
        load(folder() / "parts 2", made, optim)
        save(folder() / name, made, optim)
        found[name] = learnt(made, optim)
    return found


# Recipes of weights that are kept quantized in parts, and whether four processes read them, too, and two in shards.
QUANTIZED = {
    "block": False,
    "delayed": False,
    "custom": False,
    "current": True,
    "rowwise": True,
    "mxfp8": True,
    "nvfp4": True,
}
TRAINED = ("current", "rowwise", "nvfp4")  # whose scales are of the whole


def quantized_model(recipe: str, tp_group: Any = None, seed: int = 0) -> nn.Sequential:
    """The same, of weights that are kept quantized, parts of two processes being whole blocks."""
    torch.manual_seed(seed)
    width = 256 if recipe == "block" else 128
    options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.bfloat16, "init_method": spread_out}
    with mz.quantized_model_init(recipe=BITWISE[recipe]):
        return nn.Sequential(
            mz.LayerNormLinear(width, width, parallel_mode="column", tp_group=tp_group, **options),
            mz.Linear(width, width, parallel_mode="row", tp_group=tp_group, **options),
            mz.LayerNormMLP(width, width, activation="swiglu", set_parallel_mode=True, tp_group=tp_group, **options),
        )


def quantized_parts(rank: int) -> Result:
    """Written by two, and from that by two in shards and by four; what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    two, found = mesh["parts"].get_group(), {}
    for recipe, is_read in QUANTIZED.items():
        save(folder() / f"{recipe} parts", quantized_model(recipe, two))
        others = {
            "in shards": lambda recipe=recipe: sharded(quantized_model(recipe, two, 1), mesh=mesh["shards"]),
            "of four": lambda recipe=recipe: quantized_model(recipe, dist.group.WORLD, 2),
        }
        for name, other in others.items() if is_read else ():
            made = other()
            load(folder() / f"{recipe} parts", made)
            save(folder() / f"{recipe} parts {name}", made)
    for recipe in TRAINED:  # parts, and shards of parts
        for name, made in (
            ("parts", quantized_model(recipe, two)),
            ("shards", sharded(quantized_model(recipe, two), mesh=mesh["shards"])),
        ):
            train(made, BITWISE[recipe], 1, width=128, optim=torch.optim.SGD(made.parameters(), 0.1, weight_decay=1.0))
            save(folder() / f"{recipe} trained in {name}", made)
    options: dict[str, Any] = {"device": "cpu", "bias": False, "tp_group": dist.group.WORLD}
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        cut = mz.Linear(128, 64, parallel_mode="column", **options)
    with mz.quantized_model_init(recipe=RECIPES["current"]):
        own = mz.Linear(128, 64, parallel_mode="column", **options)
        one = mz.GroupedLinear(2, 128, 64, parallel_mode="column", single_grouped_weight=True, **options)
    own.weight.copy_from_storage(own.weight._quantizer.quantize(torch.full((16, 128), float(rank + 1))))
    for case, module in (("cut", cut), ("own", own), ("one", one)):
        attempt(found, case, lambda module=module: save(folder() / "refused", module))
    return found


CHECKS = (written_by_two, read_by_four, plain, parts_of_two, parts_of_four, quantized_parts)
