"""What each process computes with its part of norms with linears, attention, a transformer layer, a loss."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import ops
from mezzotint.distributed import reduce_gradients
from mezzotint.optimizers import FusedAdam
from tests.distributed.delayed_world import different_modules, endings, graphs, reductions
from tests.distributed.parallel import BITWISE, differing, draw, error, make, part, part_like, step, unit, world
from tests.recipes import RECIPES
from tests.worlds import Result


def compare(whole: Any, split: Any, x: torch.Tensor, dy: torch.Tensor, name: str, columns: bool = False) -> Result:
    """A step of a module with split tokens against the whole one: `wrong`, what of this process's parts differs,
    `parts` by how much, and `sums`, how far off what is summed over processes is.

    `columns`: the output is split by columns.
    """
    want = step(whole, x, dy, BITWISE[name])
    got = step(split, part(x, 0), part(dy, -1 if columns else 0), BITWISE[name])
    expected, sums = {}, [error(got["dx"], part(want["dx"], 0))]
    if columns:
        expected["y"] = part(want["y"], -1)
    else:
        sums.append(error(got["y"], part(want["y"], 0)))
    for key, parameter in split.named_parameters():
        parameter.grad = got[key]
    reduce_gradients(split, world()[0])
    for key, parameter in split.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            expected[key] = part_like(parameter, want[key])
        else:
            sums.append(error(parameter.grad, want[key]))
        parameter.grad = None
    parts = max(error(got[key], value) for key, value in expected.items())
    return {"wrong": differing(got, expected), "parts": parts, "sums": max(sums)}


def norms(rank: int) -> Result:
    """LayerNormLinear and LayerNormMLP: weight gradients and a column-parallel output are bit for bit those of one."""
    group, size, _ = world()
    found: Result = {}
    shared: dict[str, Any] = {"tp_group": group, "sequence_parallel": True}
    for name in RECIPES:
        width = unit(name) * size
        x, dy = draw(width, 1, width, seed=1), draw(width, 1, width, seed=2)
        whole = make(mz.LayerNormLinear, width, width)
        split = make(mz.LayerNormLinear, width, width, parallel_mode="column", **shared)
        found[f"{name} linear"] = compare(whole, split, x, dy, name, columns=True)
        for activation in ("gelu", "swiglu") if name in ("none", "mxfp8") else ("swiglu",):
            made: dict[str, Any] = {"activation": activation, "normalization": "RMSNorm"}
            for recomputes in (False, True):
                whole = make(mz.LayerNormMLP, width, width, **made)
                options = {"set_parallel_mode": True, "checkpoint": recomputes, **shared}
                split = make(mz.LayerNormMLP, width, width, **made, **options)
                found[f"{name} {activation} {recomputes}"] = compare(whole, split, x, dy, name)
    return found


def norm_outputs(rank: int) -> Result:
    """The norm's output of this process's tokens, or of all, and what its gradient adds."""
    group, size, _ = world()
    width = 32 * size
    x, dy, dn = (draw(width, 1, width, seed=seed) for seed in (1, 2, 3))
    wrong = []

    def run(module: Any, x: torch.Tensor, dy: torch.Tensor, dn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with mz.autocast(recipe=BITWISE["mxfp8"]):
            y, norm_out = module(leaf)
        torch.autograd.backward((y, norm_out), (dy, dn))
        return norm_out.detach(), leaf.grad

    for kind in ("linear", "mlp"):
        cls = mz.LayerNormLinear if kind == "linear" else mz.LayerNormMLP
        mode: dict[str, Any] = {"parallel_mode": "column"} if kind == "linear" else {"set_parallel_mode": True}
        whole = make(cls, width, width, return_layernorm_output=True)
        norm_out, dx = run(whole, x, dy, dn)
        for gathered in (False, True):
            split = make(
                cls,
                width,
                width,
                return_layernorm_output=True,
                return_layernorm_output_gathered=gathered,
                tp_group=group,
                sequence_parallel=True,
                **mode,
            )
            # Every process has the gradient of the gathered output: their sum is what reaches the norm.
            own = dn / size if gathered else part(dn, 0)
            got, got_dx = run(split, part(x, 0), part(dy, -1 if kind == "linear" else 0), own)
            if not torch.equal(got, norm_out if gathered else part(norm_out, 0)):
                wrong.append(f"{kind} {gathered}")
            if error(got_dx, part(dx, 0)) > 0.02:
                wrong.append(f"{kind} {gathered} gradient")
    return {"wrong": wrong}


LAYER: dict[str, Any] = {
    "num_gqa_groups": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation": "swiglu",
    "normalization": "RMSNorm",
}


def layer_of(**options: Any) -> Any:
    return make(mz.TransformerLayer, 128, 128, 8, **{**LAYER, **options}, dtype=torch.float32)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "bias": False},
    "decoder": {"layer_type": "decoder", "output_layernorm": True},
    "parallel": {"parallel_attention_mlp": True, "softmax_type": "off-by-one"},
}


class Decoder(torch.nn.Module):
    """A layer with its encoder's output."""

    def __init__(self, layer: Any, encoder_output: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.encoder_output = layer, encoder_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, encoder_output=self.encoder_output)


def layers(rank: int) -> Result:
    """A transformer layer against the whole one, in FP32, so that sums in another order hardly show."""
    group, size, _ = world()
    shared: dict[str, Any] = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True}
    found: Result = {}
    x, dy = (draw(16 * size, 2, 128, seed=seed, dtype=torch.float32) for seed in (1, 2))
    for kind, options in LAYERS.items():
        whole, split = layer_of(**options), layer_of(**options, **shared)
        if kind == "decoder":
            whole, split = Decoder(whole, x * 0.5), Decoder(split, part(x, 0) * 0.5)
        for name in ("none", "mxfp8") if kind == "plain" else ("none",):
            found[f"{kind} {name}"] = compare(whole, split, x, dy, name)
    return found


def set_later(rank: int) -> Result:
    """A layer whose group is set after it was made; without split tokens."""
    group, size, _ = world()
    whole = layer_of()
    split = layer_of(tp_size=size, set_parallel_mode=True)
    split.set_tensor_parallel_group(group)
    with torch.no_grad():
        for key, parameter in split.named_parameters():
            parameter.copy_(part_like(parameter, dict(whole.named_parameters())[key]))
    x, dy = (draw(8, 2, 128, seed=seed, dtype=torch.float32) for seed in (1, 2))
    want, got = step(whole, x, dy, None), step(split, x, dy, None)
    parts = {key: part_like(parameter, want[key]) for key, parameter in split.named_parameters()}
    errors = [error(got[key], value) for key, value in {**parts, "y": want["y"], "dx": want["dx"]}.items()]
    return {"error": max(errors)}


def compiled_layer(rank: int) -> Result:
    """Eager and compiled code side by side over two steps."""
    group, _, _ = world()
    shared: dict[str, Any] = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True}
    eager, twin = layer_of(**shared), layer_of(**shared)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(twin, fullgraph=True, backend=counter)
    wrong = []
    for i in range(2):
        x, dy = (draw(16, 2, 128, seed=seed + i, dtype=torch.float32) for seed in (1, 2))
        want, got = step(eager, x, dy, RECIPES["delayed"]), step(twin, x, dy, RECIPES["delayed"], call)
        wrong += [f"{key} of step {i}" for key in differing(got, want)]
    return {"wrong": wrong, "graphs": counter.frame_count}


def losses(rank: int) -> Result:
    """Cross entropy of logits whose vocabulary is split, against the whole one."""
    group, size, _ = world()
    found: Result = {}
    for smoothing in (0.0, 0.1):
        for compiles in (False, True):
            logits = draw(3, 5, 8 * size, seed=1, dtype=torch.float32).requires_grad_()
            local = part(logits.detach(), -1).requires_grad_()
            target = torch.randint(0, 8 * size, (3, 5), generator=torch.Generator().manual_seed(2))
            target[0, 0] = -100
            call = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager") if compiles else cross_entropy
            want, got = cross_entropy(logits, target, smoothing, None), call(local, target, smoothing, group)
            gradient = draw(3, 5, seed=3, dtype=torch.float32)
            want.backward(gradient)
            got.backward(gradient)
            errors = error(got.detach(), want.detach()), error(local.grad, part(logits.grad, -1))
            found[f"{smoothing} {compiles}"] = {"error": max(errors), "ignored": float(got.detach()[0, 0])}
    return found


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, smoothing: float, group: Any) -> torch.Tensor:
    return mz.parallel_cross_entropy(logits, target, smoothing, dist_process_group=group)


def grouped(rank: int) -> Result:
    """GroupedLinear holds its part; what is summed is summed outside."""
    group, size, _ = world()
    splits = [24, 0, 40]
    x, dy = draw(64, 64, seed=1), draw(64, 32 * size, seed=2)
    whole = make(mz.GroupedLinear, 3, 64, 32 * size, bias=False)
    split = make(mz.GroupedLinear, 3, 64, 32 * size, bias=False, parallel_mode="column", tp_group=group)
    want, got = step(whole, x, dy, None, m_splits=splits), step(split, x, part(dy, -1), None, m_splits=splits)
    expected = {key: part_like(p, want[key]) for key, p in split.named_parameters()} | {"y": part(want["y"], -1)}
    total = got["dx"].clone()
    dist.all_reduce(total)
    return {"wrong": differing(got, expected), "sums": error(total, want["dx"])}


def copies(rank: int) -> Result:
    """A copy is in the group of its original; a checkpoint recomputes with the same collectives; weights that are kept
    quantized, and parameters that leave the meta device, are parts like others."""
    group, size, _ = world()
    shared: dict[str, Any] = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True}
    wrong = []
    layer = layer_of(**shared)
    x, dy = (draw(16, 2, 128, seed=seed, dtype=torch.float32) for seed in (1, 2))
    want = step(layer, x, dy, RECIPES["mxfp8"])
    wrong += [f"copy: {key}" for key in differing(step(copy.deepcopy(layer), x, dy, RECIPES["mxfp8"]), want)]
    for recomputes in (False, True):

        def again(x: torch.Tensor, recomputes: bool = recomputes) -> torch.Tensor:
            return mz.checkpoint(layer, x, use_reentrant=recomputes)

        wrong += [f"checkpoint: {key}" for key in differing(step(layer, x, dy, RECIPES["mxfp8"], again), want)]
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        whole, kept = (make(mz.LayerNormMLP, 64 * size, 64 * size, **options) for options in ({}, shared))
    x, dy = draw(64 * size, 64 * size, seed=1), draw(64 * size, 64 * size, seed=2)
    made = compare(whole, kept, x, dy, "mxfp8")
    wrong += [f"quantized: {key}" for key in made["wrong"]]
    torch.manual_seed(0)
    drawn = mz.Linear(8, 8 * size, parallel_mode="column", tp_group=group, device="cpu")
    with torch.device("meta"):
        late = mz.Linear(8, 8 * size, parallel_mode="column", tp_group=group)
    torch.manual_seed(0)
    with torch.device("cpu"):
        late.reset_parameters()
    if not torch.equal(late.weight, drawn.weight) or vars(late.weight) != vars(drawn.weight):
        wrong.append("meta")
    return {"wrong": wrong, "sums": made["sums"]}


def kept(mode: str = "column", **options: Any) -> Any:
    """A linear whose weight is kept quantized, with one scale."""
    with mz.quantized_model_init(recipe=RECIPES["current"]):
        return make(mz.Linear, 64, 64, parallel_mode=mode, **{"tp_group": world()[0], **options})


def kept_weights(rank: int) -> Result:
    """What knows that it is a part, and goes on to be: copies, what is moved or loaded, a group that is set later. And
    what does not: files, graphs."""
    group, size, _ = world()
    first = kept()
    splits, value = first.weight._splits, part(draw(64, 64, seed=8), 0)
    late = kept(tp_group=None, tp_size=size)
    own = late.weight.detach().clone()
    late.set_tensor_parallel_group(group)
    assigned = kept()
    state = pickle.loads(pickle.dumps(first.state_dict()))
    assigned.load_state_dict(state, assign=True)
    parts = {
        "copy": copy.deepcopy(first).weight,
        "moved": first.weight.to("cpu", copy=True),
        "late": late.weight,
        "assigned": assigned.weight,
        "applied": copy.deepcopy(first)._apply(lambda t: t.to("cpu", copy=True)).weight,
        "operation": kept_operation(group),
    }
    for weight in parts.values():
        with torch.no_grad():
            weight.copy_(value)
    codes = {name: (weight._data.clone(), weight._scale_inv.clone()) for name, weight in parts.items()}
    # The scale of a group that is set later is that of the process with the larger numbers.
    shared = kept(tp_group=None, tp_size=size)
    with torch.no_grad():
        shared.weight.copy_(value * (1 + rank))
    before = shared.weight._scale_inv.clone()
    shared.set_tensor_parallel_group(group)
    scales = [before, shared.weight._scale_inv]
    _, context = first.weight.__tensor_flatten__()
    return {
        "splits": {name: weight._splits == splits for name, weight in parts.items()},
        "codes": codes,
        "scales": scales,
        "alone": [state["weight"]._splits, own._splits, first.weight.clone()._splits],
        "context": sorted(context["nontensor_kwargs"]),
        "compiled": compiled_kept(),
    }


def kept_operation(group: Any) -> Any:
    with mz.quantized_model_init(recipe=RECIPES["current"]):
        made = ops.Linear(
            64, 64, device="cpu", dtype=torch.bfloat16, tensor_parallel_mode="column", tensor_parallel_group=group
        )
    return next(p for p in made.parameters() if p.dim() == 2)


def compiled_kept() -> Result:
    """Eager and compiled code side by side; an optimizer writes the weights in between."""
    eager, twin = kept("row"), kept("row")
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(twin, fullgraph=True, backend=counter)
    wrong = []
    optims = [FusedAdam(module.parameters(), lr=0.01) for module in (eager, twin)]
    for i in range(3):
        x, dy = part(draw(32, 64, seed=i), 1), draw(32, 64, seed=9 + i)
        for module, how, optim in ((eager, None, optims[0]), (twin, call, optims[1])):
            with mz.autocast(recipe=RECIPES["current"]):
                (module if how is None else how)(x).backward(dy)
            optim.step()
            optim.zero_grad()
        wrong += [i for a, b in zip(eager.weight._buffers(), twin.weight._buffers(), strict=True) if not equal(a, b)]
    return {"wrong": wrong, "graphs": counter.frame_count}


def equal(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor]) -> bool:
    return a[0] == b[0] and torch.equal(a[1], b[1])


def stochastic(rank: int) -> Result:
    """Parts of a gradient draw on their own: as far from one process as that is from itself with other numbers."""
    group, size, _ = world()
    width = 64 * size
    x, dy = draw(width, width, seed=1), draw(width, width, seed=2)
    whole = make(mz.Linear, width, width)
    split = make(mz.Linear, width, width, parallel_mode="column", tp_group=group, sequence_parallel=True)
    want = step(whole, x, dy, RECIPES["nvfp4"])
    leaf = x.clone().requires_grad_()
    torch.manual_seed(6)
    with mz.autocast(recipe=RECIPES["nvfp4"]):
        whole(leaf).backward(dy)
    got = step(split, part(x, 0), part(dy, -1), RECIPES["nvfp4"])

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.float() - b.float()).norm() / b.float().norm())

    return {
        "y": torch.equal(got["y"], part(want["y"], -1)),
        "dx": distance(got["dx"], part(want["dx"], 0)) / distance(leaf.grad, want["dx"]),
        "dw": distance(got["weight"], part(want["weight"], 0)) / distance(whole.weight.grad, want["weight"]),
    }


def dynamic(rank: int) -> Result:
    """No other graph for other numbers of tokens."""
    group, _, _ = world()
    shared: dict[str, Any] = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": True}
    eager, twin = (make(mz.LayerNormMLP, 64, 64, **shared) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(twin, fullgraph=True, backend=counter, dynamic=True)
    wrong, graphs = [], []
    for rows in (32, 64, 96):
        x, dy = draw(rows, 2, 64, seed=rows), draw(rows, 2, 64, seed=rows + 1)
        want, got = step(eager, x, dy, RECIPES["mxfp8"]), step(twin, x, dy, RECIPES["mxfp8"], call)
        wrong += [f"{key} of {rows}" for key in differing(got, want)]
        graphs.append(counter.frame_count)
    return {"wrong": wrong, "later graphs": graphs[-1] - graphs[0]}


CHECKS: tuple[Callable[[int], Result], ...] = (
    norms,
    norm_outputs,
    layers,
    set_later,
    reductions,
    endings,
    compiled_layer,
    different_modules,
    losses,
    grouped,
    copies,
    kept_weights,
    stochastic,
)
SLOW_CHECKS: tuple[Callable[[int], Result], ...] = (graphs, dynamic)
