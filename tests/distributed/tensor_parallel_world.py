"""What each process computes with its part of a linear, beside the whole one."""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from mezzotint.distributed import reduce_gradients
from mezzotint.tensor.partition import Split, can_gather, gather_rows, quantize_shard
from tests.distributed.parallel import (
    BITWISE,
    Sent,
    differing,
    draw,
    error,
    make,
    part,
    part_like,
    split_of,
    step,
    unit,
    world,
)
from tests.quantizer_formats import FORMATS, same_bytes
from tests.recipes import RECIPES, VARIANTS
from tests.worlds import Result

MODES = ("column", "row")


def linear_case(name: str, mode: str, sp: bool, tokens: int, steps: int = 1) -> Result:
    """A linear of this mode against the whole one: what differs, and how far off the sums over processes are."""
    group, size, _ = world()
    width = unit(name) * size
    whole = make(mz.Linear, width, width)
    split = make(mz.Linear, width, width, parallel_mode=mode, tp_group=group, sequence_parallel=sp)
    wrong = [key for key, p in split.named_parameters() if not torch.equal(p, part_like(p, getattr(whole, key)))]
    sums = []
    for i in range(steps):
        x, dy = draw(tokens * size, 1, width, seed=1 + i) * (1 + i), draw(tokens * size, 1, width, seed=50 + i)
        want = step(whole, x, dy, BITWISE[name])
        got = step(split, *split_of(mode, sp, x, dy), BITWISE[name])
        expected = {"weight": part_like(split.weight, want["weight"])}
        summed = "dx" if mode == "column" else "y"
        if mode == "column":
            expected |= {"y": part(want["y"], -1), "bias": part(want["bias"], 0)}
        else:
            expected |= {"dx": part(want["dx"], -1)}
            split.bias.grad = got["bias"]
            reduce_gradients(split, group)
            sums.append(error(split.bias.grad, want["bias"]))
            split.bias.grad = None
        wrong += [f"{key} of step {i}" for key in differing(got, expected)]
        sums.append(error(got[summed], part(want[summed], 0) if sp else want[summed]))
    return {"wrong": wrong, "sums": max(sums)}


def linears(rank: int) -> Result:
    """Every recipe with whole and with split tokens; in a world of two every variant with split ones."""
    cases = [(name, mode, sp) for name in RECIPES for mode in MODES for sp in (False, True)]
    cases += [(name, mode, True) for name in VARIANTS for mode in MODES if world()[1] == 2]
    return {
        f"{name} {mode} {'tokens' if sp else 'whole'}": linear_case(
            name, mode, sp, unit(name), 3 if "delayed" in name else 1
        )
        for name, mode, sp in cases
    }


RAGGED = {"mxfp8": 24, "nvfp4": 24, "block": 40, "custom": 8, "rowwise": 5, "current": 5, "nvfp4-row-scaled": 8}


def ragged(rank: int) -> Result:
    """Numbers of tokens that blocks along them do not divide: gathered before they are quantized, to the same bits."""
    cases = [(name, mode) for name in RAGGED for mode in MODES]
    return {f"{name} {mode}": linear_case(name, mode, True, RAGGED[name]) for name, mode in cases}


def no_tokens(rank: int) -> Result:
    """Of no process."""
    return {
        f"{name} {mode} {sp}": linear_case(name, mode, sp, 0)
        for name in ("none", "current", "mxfp8", "nvfp4")
        for mode in MODES
        for sp in (False, True)
    }


def shards(rank: int) -> Result:
    """Buffers of every format: those of the whole, of each direction, put together from parts of 128 tokens."""
    group, size, _ = world()
    wrong, gathered = [], []
    x = draw(64 * size, 2, 192, seed=3) * torch.linspace(0.1, 4, 64 * size)[:, None, None].bfloat16()
    for fmt in FORMATS.values():
        for columnwise in (False, True):
            quantizer = fmt.quantizer(rowwise=not columnwise, columnwise=columnwise)
            if fmt.is_random or not can_gather(quantizer, 128, columnwise=columnwise):
                continue
            if fmt.name == "hybrid_chained" and columnwise:
                continue  # refused: see `wrong_use`
            made, _ = quantize_shard(part(x, 0), quantizer, [Split(0, group)])
            want, _ = quantize_shard(x, quantizer, ())
            gathered.append(f"{fmt.name} {'column' if columnwise else 'row'}")
            got = gather_rows(made, group)
            if got.shape != want.shape or not same_bytes(got, want):
                wrong.append(gathered[-1])
    return {"wrong": wrong, "gathered": gathered}


def sent(rank: int) -> Result:
    """Bytes that a forward and a backward of each mode give to collectives."""
    group, size, _ = world()
    found: Result = {}
    for name in RECIPES:
        width, tokens = unit(name) * size, unit(name)
        for mode in MODES:
            module = make(
                mz.Linear, width, width, bias=False, parallel_mode=mode, tp_group=group, sequence_parallel=True
            )
            x, dy = split_of(mode, True, draw(tokens * size, width, seed=1), draw(tokens * size, width, seed=2))
            step(module, x, dy, RECIPES[name])
            with Sent() as counted:
                step(module, x, dy, RECIPES[name])
            found[f"{name} {mode}"] = counted.bytes
    return found


def options(rank: int) -> Result:
    """Kept weights, a saved original input, delayed gradients, main_grad, ops.Linear: nothing but the way differs."""
    group, size, _ = world()
    width = 32 * size
    found: Result = {}
    for name in ("current", "nvfp4", "mxfp8"):
        for mode in MODES:
            shared: dict[str, Any] = {"parallel_mode": mode, "tp_group": group, "sequence_parallel": True}
            inputs = split_of(mode, True, draw(width, width, seed=1), draw(width, width, seed=2))
            plain = make(mz.Linear, width, width, **shared)
            want = step(plain, *inputs, BITWISE[name])
            kinds: dict[str, tuple[Any, dict[str, Any]]] = {
                "first": (plain, {"is_first_microbatch": True}),
                "second": (plain, {"is_first_microbatch": False}),
                "original": (make(mz.Linear, width, width, save_original_input=True, **shared), {}),
                "late": (make(mz.Linear, width, width, delay_wgrad_compute=True, **shared), {}),
                "lean": (make(mz.Linear, width, width, memory="lean", **shared), {}),
            }
            for kind, (module, kwargs) in kinds.items():
                got = step(module, *inputs, BITWISE[name], **kwargs)
                if kind == "late":
                    module.backward_dw()
                    got["weight"] = module.weight.grad
                found[f"{name} {mode} {kind}"] = differing(got, want)
            op = ops.Linear(
                width,
                width,
                device="cpu",
                dtype=torch.bfloat16,
                tensor_parallel_mode=mode,
                tensor_parallel_group=group,
                sequence_parallel=True,
            )
            op.load_state_dict(plain.state_dict())
            got = step(op, *inputs, BITWISE[name])
            names = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}
            found[f"{name} {mode} op"] = differing({names.get(key, key): value for key, value in got.items()}, want)
        inputs = part(draw(width, width, seed=1), 0), part(draw(width, width, seed=2), 0)
        together: dict[str, Any] = {"set_parallel_mode": True, "tp_group": group, "sequence_parallel": True}
        default, lean = (
            make(mz.LayerNormMLP, width, 2 * width, memory=memory, **together) for memory in ("default", "lean")
        )
        found[f"{name} mlp"] = differing(step(lean, *inputs, BITWISE[name]), step(default, *inputs, BITWISE[name]))
    return found


# The first in a world of four, too.
KEPT = ["current", "rowwise", "nvfp4", "custom"]
KEPT += [name for name, recipe in BITWISE.items() if recipe is not None and name not in KEPT]


def kept(rank: int) -> Result:
    """Weights that are kept quantized: those of one process, bit for bit, as drawn, after steps of an optimizer, and
    written in high precision."""
    group, size, _ = world()
    found: Result = {}
    for name, mode in [(name, mode) for name in KEPT[: None if size == 2 else 4] for mode in MODES]:
        width = unit(name) * size
        with mz.quantized_model_init(recipe=BITWISE[name]):
            whole = make(mz.Linear, width, width, init_method=uneven)
            split = make(mz.Linear, width, width, init_method=uneven, parallel_mode=mode, tp_group=group)
        wrong = [f"{key} drawn" for key in differing_buffers(split.weight, whole.weight)]
        optims = [torch.optim.SGD(module.parameters(), 0.1, weight_decay=0.1) for module in (whole, split)]
        for i in range(3 if "delayed" in name else 1):
            x, dy = draw(unit(name), 1, width, seed=1 + i), draw(unit(name), 1, width, seed=50 + i) * (1 + i)
            for module, optim, inputs in zip(
                (whole, split), optims, ((x, dy), split_of(mode, False, x, dy)), strict=True
            ):
                leaf = inputs[0].clone().requires_grad_()
                with mz.autocast(recipe=BITWISE[name]):
                    y = module(leaf)
                y.backward(inputs[1])
                optim.step()
                optim.zero_grad()
            wrong += [f"{key} of step {i}" for key in differing_buffers(split.weight, whole.weight)]
        value = uneven(draw(width, width, seed=7))
        whole.load_state_dict({**whole.state_dict(), "weight": value})
        split.load_state_dict({**split.state_dict(), "weight": part_like(split.weight, value)})
        wrong += [f"{key} loaded" for key in differing_buffers(split.weight, whole.weight)]
        found[f"{name} {mode}"] = wrong
    return found


def uneven(weight: torch.Tensor) -> torch.Tensor:
    """Every row and every column of another size, the largest numbers in the last."""
    rows, columns = weight.shape
    grown = torch.linspace(-6, 0, rows).exp2()[:, None] * torch.linspace(-6, 0, columns).exp2()
    return weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(grown)


def differing_buffers(split: Any, whole: Any) -> list[str]:
    """Of a part and the whole: codes, scales of all, of a row or a column, and the values of each direction."""
    wrong = []
    for name, buffer in whole._buffers():
        if (buffer.dtype == torch.float32 and buffer.dim() == 1) or "data" in name or "transpose" in name:
            held = getattr(split, name)
            cut = [dim for dim in range(buffer.dim()) if held.shape[dim] != buffer.shape[dim]]
            if not torch.equal(held, part(buffer, *cut) if cut else buffer):
                wrong.append(name)
    usages = whole.get_usages()
    assert split.get_usages() == usages
    for columnwise in [usage == "columnwise" for usage, is_held in usages.items() if is_held]:
        got, want = (
            w.detach().keep(rowwise=not columnwise, columnwise=columnwise).dequantize() for w in (split, whole)
        )
        if not torch.equal(got, part_like(split, want)):
            wrong.append(f"values {columnwise}")
    return wrong


class Stack(torch.nn.Module):
    """A norm, a column-parallel and a row-parallel linear, as they come in pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shared: dict[str, Any] = {"tp_group": world()[0], "sequence_parallel": True}
        self.up = make(mz.LayerNormLinear, width, width, parallel_mode="column", **shared)
        self.down = make(mz.Linear, width, width, parallel_mode="row", **shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def compiled_case(name: str, backend: str) -> Result:
    """Eager and compiled code side by side over three steps: what differs, graphs, breaks."""
    _, size, _ = world()
    width = unit(name) * size
    eager, twin = Stack(width), Stack(width)
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(twin, fullgraph=True, backend=counter)
    wrong = []
    for i in range(3):
        x, dy = draw(unit(name), 2, width, seed=i) * (1 + i), draw(unit(name), 2, width, seed=9 + i)
        want, got = step(eager, x, dy, RECIPES[name]), step(twin, x, dy, RECIPES[name], call)
        wrong += [f"{key} of step {i}" for key in differing(got, want)]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {"wrong": wrong, "graphs": counter.frame_count, "breaks": breaks}


def compiled(rank: int) -> Result:
    return {name: compiled_case(name, "inductor" if name == "mxfp8" else "aot_eager") for name in RECIPES}


CHECKS: tuple[Callable[[int], Result], ...] = (linears, ragged, no_tokens, shards, sent, options, kept)
CHECKS_OF_FOUR: tuple[Callable[[int], Result], ...] = (linears, ragged, shards, kept)
