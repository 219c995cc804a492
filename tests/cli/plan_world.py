"""What a step of a small model sends and holds, counted on each process of a world."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import mezzotint.attention.attend as attend
import mezzotint.trainer.model as model_code
from mezzotint.quantization import autocast
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.memory import LiveBytes, SavedBytes, storage_of
from mezzotint.trainer.mesh import make_meshes, make_model, make_optimizer, reduce_over_meshes
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.sizes import ModelConfig
from mezzotint.trainer.traffic import SentBytes
from tests.worlds import Result

SIZE = 4
DENSE = ModelConfig(hidden=128, ffn=256, layers=5, heads=4, kv_heads=4, vocab=256, sequence=64, batch=2)
SPARSE = replace(DENSE, experts=8, sequence=256, hidden=64, ffn=128)
CASES: dict[str, tuple[ModelConfig, Layout, str]] = {
    "copies": (DENSE, Layout(world=SIZE), "bf16"),
    "shards bf16": (DENSE, Layout(world=SIZE, fsdp=True), "bf16"),
    "shards nvfp4": (DENSE, Layout(world=SIZE, fsdp=True), "nvfp4"),
    "tensors": (DENSE, Layout(world=SIZE, tp=SIZE), "mxfp8"),
    "tensors and shards": (DENSE, Layout(world=SIZE, tp=2, fsdp=True), "current"),
    "experts": (SPARSE, Layout(world=SIZE, ep=2), "mxfp8"),
    "experts and shards": (SPARSE, Layout(world=SIZE, ep=SIZE, fsdp=True), "mxfp8"),
    "everything": (SPARSE, Layout(world=SIZE, tp=2, ep=2, fsdp=True), "mxfp8"),
}
QUICK = ("everything",)  # every kind of collective, and weights in parts and in shards


def measure(config: ModelConfig, layout: Layout, recipe: Any) -> Result:
    """Of the second step: the optimizer's state is there from the beginning."""
    attend.hw = model_code.hw = SimpleNamespace(multiplies_slowly=lambda x: False)  # a GPU holds no FP32 copies
    torch.manual_seed(dist.get_rank())
    meshes = make_meshes(layout)
    model = make_model(config, layout, meshes, recipe)
    optimizer = make_optimizer(model)
    fixed = [*model.parameters(), *model.buffers()]
    sent = SentBytes()
    live = LiveBytes(sent)
    live.ignore(fixed)
    with live, sent:
        for _ in range(2):
            live.end_part("step")
            saved = SavedBytes(fixed)
            tokens = torch.randint(config.vocab, (config.batch, config.sequence))
            with autocast(enabled=recipe is not None, recipe=recipe), saved.hooks():
                loss = model(tokens, tokens)
            kept = saved.total
            loss.backward()
            del loss, tokens
            reduce_over_meshes(model, layout, meshes)
            optimizer.step()
            optimizer.zero_grad()
        live.end_part("step")
    part = live.parts[-1]
    held = {storage_of(tensor)._cdata: storage_of(tensor).nbytes() for tensor in fixed}
    state = [value for values in optimizer.state.values() for value in values.values()]
    return {
        "sent": part.sent,
        "saved": kept,
        "weights": sum(held.values()),
        "optimizer": sum(storage_of(value).nbytes() for value in state),
        "peak": live.parts[-2].end + part.peak + sum(held.values()),
    }


def measure_cases(names: Iterable[str]) -> Result:
    chosen = {name: CASES[name] for name in names}
    return {name: measure(config, layout, COMMAND_RECIPES[recipe]) for name, (config, layout, recipe) in chosen.items()}


def quick_cases(rank: int) -> Result:
    return measure_cases(QUICK)


def slow_cases(rank: int) -> Result:
    return measure_cases(name for name in CASES if name not in QUICK)


def one_process(rank: int) -> Result:
    """The loss and gradients of a model that is split, and of the same in one process."""
    return {
        name: compare(config, Layout(world=SIZE, tp=SIZE, ep=SIZE if config.experts else 1))
        for name, config in (("dense", replace(DENSE, layers=2)), ("sparse", replace(SPARSE, layers=2)))
    }


def compare(config: ModelConfig, layout: Layout) -> Result:
    torch.manual_seed(0)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    whole, meshes = LanguageModel(config, expert_group=alone), make_meshes(layout)
    part = make_model(config, layout, meshes, None)
    tokens = torch.randint(config.vocab, (config.batch, config.sequence))
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(own_part(whole, name, parameter, "data"))
    losses = [model(tokens, tokens) for model in (whole, part)]
    for loss in losses:
        loss.backward()
    reduce_over_meshes(part, layout, meshes)
    errors = {}
    for name, parameter in part.named_parameters():
        wanted = own_part(whole, name, parameter, "grad")
        errors[name] = float((parameter.grad - wanted).norm() / wanted.norm())
    return {"losses": [loss.item() for loss in losses], "errors": errors}


def own_part(whole: LanguageModel, name: str, parameter: Any, what: str) -> torch.Tensor:
    """Of a parameter of the whole, or of its gradient, what belongs to this process."""
    if ".experts." in name:
        stem, number = name.rsplit("weight", 1)
        local = len([other for other in whole.state_dict() if other.startswith(f"{stem}weight")]) // SIZE
        name = f"{stem}weight{int(number) + dist.get_rank() * local}"
    found = getattr(whole.get_parameter(name), what)
    if not getattr(parameter, "tensor_model_parallel", False):
        return found
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat([piece.chunk(SIZE, dim)[dist.get_rank()] for piece in found.chunk(stride, dim)], dim)


CHECKS: tuple[Callable[[int], Result], ...] = (quick_cases, one_process)
SLOW_CHECKS: tuple[Callable[[int], Result], ...] = (slow_cases,)
