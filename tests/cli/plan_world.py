"""What a step of a small model sends and holds, counted on each process of a world."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mezzotint.cli.memory import LiveBytes, SavedBytes, storage_of
from mezzotint.cli.model import ModelConfig
from mezzotint.cli.parallel import Layout, make_meshes, make_model, reduce_gradients
from mezzotint.cli.recipes import RECIPES
from mezzotint.cli.traffic import SentBytes
from mezzotint.quantization import autocast
from tests.worlds import Result

SIZE = 4
DENSE = ModelConfig(hidden=128, ffn=256, layers=6, heads=4, kv_heads=4, vocab=256, sequence=64, batch=2)
SPARSE = replace(DENSE, experts=8, sequence=256, layers=5, hidden=64, ffn=128)
CASES: dict[str, tuple[ModelConfig, Layout, str]] = {
    "copies": (DENSE, Layout(world=SIZE), "bf16"),
    **{f"shards {name}": (DENSE, Layout(world=SIZE, fsdp=True), name) for name in RECIPES},
    "experts on two": (SPARSE, Layout(world=SIZE, ep=2), "mxfp8"),
    "experts on four": (SPARSE, Layout(world=SIZE, ep=4), "current"),
    "experts on two, shards": (SPARSE, Layout(world=SIZE, ep=2, fsdp=True), "mxfp8"),
}


def measure(config: ModelConfig, layout: Layout, recipe: Any) -> Result:
    """Of the second step: the optimizer's state is there from the beginning."""
    torch.manual_seed(torch.distributed.get_rank())
    meshes = make_meshes(layout)
    model = make_model(config, layout, meshes, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
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
            if not layout.fsdp:
                reduce_gradients(model, meshes)
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


def cases(rank: int) -> Result:
    return {name: measure(config, layout, RECIPES[recipe]) for name, (config, layout, recipe) in CASES.items()}


CHECKS: tuple[Callable[[int], Result], ...] = (cases,)
