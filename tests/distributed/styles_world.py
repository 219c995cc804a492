"""What each of two processes computes with modules that were split from outside, and with those made in parts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import mezzotint as mz
from mezzotint.distributed.parts import whole_of
from mezzotint.distributed.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, TensorParallel
from tests.recipes import RECIPES
from tests.worlds import Result

SIZE, TOKENS, WIDTH = 2, 64, 64
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
CHOSEN = ("none", "delayed", "current", "rowwise", "block", "mxfp8")


def mesh() -> Any:
    return init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))


# Name → (the module, given its parallel arguments), its style, whether it reads some of the tokens in sequence
# parallelism.
MODULES: dict[str, tuple[Callable[..., Any], Any, bool]] = {
    "column": (lambda **p: mz.Linear(WIDTH, 128, **OPTIONS, **mode(p, "column")), ColwiseParallel, True),
    "row": (lambda **p: mz.Linear(128, WIDTH, **OPTIONS, **mode(p, "row")), RowwiseParallel, False),
    "norm column": (lambda **p: mz.LayerNormLinear(WIDTH, 128, **OPTIONS, **mode(p, "column")), ColwiseParallel, True),
    "mlp": (
        lambda **p: mz.LayerNormMLP(WIDTH, 128, activation="swiglu", **OPTIONS, **whole(p)),
        TensorParallel,
        True,
    ),
    "layer": (
        lambda **p: mz.TransformerLayer(
            WIDTH,
            128,
            4,
            num_gqa_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            qk_norm_type="RMSNorm",
            activation="swiglu",
            **OPTIONS,
            **whole(p),
        ),
        TensorParallel,
        True,
    ),
}


def mode(given: dict[str, Any], kind: str) -> dict[str, Any]:
    return {**given, "parallel_mode": kind} if given else {}


def whole(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "set_parallel_mode": True} if given else {}


def input_of(name: str, rank: int, sequence: bool) -> torch.Tensor:
    """Whole, or some tokens, or some features of all."""
    width = 128 if name == "row" else WIDTH
    x = torch.randn(TOKENS, 2, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    if name == "row":
        x = x.chunk(SIZE, -1)[rank]
    elif sequence:
        x = x.chunk(SIZE)[rank]
    return x.contiguous().requires_grad_()


def step(module: Any, name: str, rank: int, recipe: str, sequence: bool, call: Any = None) -> Result:
    x, chosen = input_of(name, rank, sequence), RECIPES[recipe]
    torch.manual_seed(3)
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        y = (module if call is None else call)(x)
    module.zero_grad(set_to_none=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4 + rank * (y.shape[0] < TOKENS))).to(y.dtype)
    y.backward(dy)
    grads = {key: p.grad for key, p in module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"output": y.detach(), "input": x.grad, **grads}


def local(result: Result) -> Result:
    return {key: value._local_tensor if isinstance(value, DTensor) else value for key, value in result.items()}


def styles(rank: int) -> Result:
    """Split from outside = made in parts, outputs and gradients; and the weights are those of the whole again."""
    found: Result = {}
    group, over = dist.group.WORLD, mesh()
    for name, (make, style, _) in MODULES.items():
        for sequence in (False, True):
            for recipe in CHOSEN if name in ("norm column", "row") else ("current", "delayed"):
                torch.manual_seed(0)
                made = make(tp_group=group, tp_size=SIZE, sequence_parallel=sequence)
                torch.manual_seed(0)
                split = make()
                before = {key: p.detach().clone() for key, p in split.named_parameters()}
                assert parallelize_module(split, over, style(sequence_parallel=sequence)) is split
                assert all(isinstance(p, DTensor) for p in split.parameters())
                for key, p in split.named_parameters():
                    assert torch.equal(whole_of(p), before[key]), (name, key)
                with torch.no_grad():
                    for p, q in zip(split.parameters(), made.parameters(), strict=True):
                        q.copy_(p.to_local())
                want = step(made, name, rank, recipe, sequence)
                mz.distributed.reduce_gradients(made, group)
                want = {**want, **{key: p.grad for key, p in made.named_parameters()}}
                key = f"{name} {recipe} {'sequence' if sequence else 'whole'}"
                found[key] = (local(step(split, name, rank, recipe, sequence)), local(want))
    return found


def compiled(rank: int) -> Result:
    found: Result = {}
    for name in ("norm column", "mlp"):
        torch.manual_seed(0)
        module = parallelize_module(MODULES[name][0](), mesh(), MODULES[name][1](sequence_parallel=True))
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(module, fullgraph=True, backend=counter)
        for number in range(2):
            got = step(module, name, rank, "current", True, call)
            found[f"{name} {number}"] = (local(got), local(step(module, name, rank, "current", True)))
        found[f"{name} graphs"] = counter.frame_count
    return found


def training(rank: int) -> Result:
    """Clipping, an optimizer, a state dict: they see DTensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(mz.RMSNorm(WIDTH, **OPTIONS), mz.LayerNormMLP(WIDTH, 128, **OPTIONS))
    parallelize_module(model, mesh(), {"0": SequenceParallel(), "1": TensorParallel(sequence_parallel=True)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with mz.autocast(recipe=RECIPES["current"]):
            y = model(input_of("mlp", rank, True))
        loss = y.float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    names = sorted(name for name, value in model.state_dict().items() if isinstance(value, DTensor))
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), "names": names, "whole": whole}


def wrong(rank: int) -> Result:
    found: Result = {}
    linear = parallelize_module(mz.Linear(WIDTH, WIDTH, device="cpu"), mesh(), ColwiseParallel())
    fused = mz.MultiheadAttention(WIDTH, 4, fuse_qkv_params=True, qkv_weight_interleaved=False, device="cpu")
    with mz.quantized_model_init(recipe=RECIPES["current"]):
        quantized = mz.Linear(WIDTH, WIDTH, device="cpu")
    for name, module, style in (
        ("plain", torch.nn.Linear(4, 4), ColwiseParallel()),
        ("twice", linear, ColwiseParallel()),
        ("one weight", mz.LayerNormMLP(WIDTH, 64, device="cpu"), RowwiseParallel()),
        ("two weights", mz.Linear(WIDTH, WIDTH, device="cpu"), TensorParallel()),
        ("odd", mz.Linear(WIDTH, 63, device="cpu"), ColwiseParallel()),
        ("fused", fused, TensorParallel()),
        ("quantized", quantized, RowwiseParallel()),
    ):
        try:
            parallelize_module(module, mesh(), style)
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            is_whole = not any(isinstance(p, DTensor) for p in module.parameters())
            assert name == "twice" or (is_whole and getattr(module, "tp_size", 1) == 1), name
    return found


CHECKS = (styles, compiled, training, wrong)
