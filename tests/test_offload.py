"""Saved tensors in the host's memory: the same gradients to the bit, and the device's copies gone in between.

Without a GPU the device is the CPU too: a copy there is a copy, at once. What is marked, small or a parameter stays.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint import offload
from mezzotint.offload import get_cpu_offload_context, mark_not_offload
from tests.recipes import RECIPES, assert_equal

WIDTH, LAYERS = 64, 4


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "may_leave", lambda tensor: tensor.numel() > 1 and offload._is_free(tensor))


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    return [mz.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", **options) for _ in range(LAYERS)]


def run(
    model: list[Any],
    context: Any,
    sync: Callable[[Any], Any],
    recipe: Any = None,
    between: Callable[[], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of one step."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    torch.manual_seed(2)
    y = x
    with mz.autocast(enabled=recipe is not None, recipe=recipe):
        for layer in model:
            with context:
                y = layer(y)
            y = sync(y)
    if between is not None:
        between()
    parameters = [p for layer in model for p in layer.parameters()]
    grads = torch.autograd.grad(y.float().square().sum(), [x, *parameters])
    return {"output": y.detach(), **{str(i): grad for i, grad in enumerate(grads)}}


def plain(model: list[Any], recipe: Any = None) -> dict[str, torch.Tensor]:
    return run(model, *get_cpu_offload_context(enabled=False), recipe=recipe)


@pytest.mark.parametrize(("recipe", "count"), [*((recipe, 3) for recipe in RECIPES), ("current", 1), ("delayed", 4)])
def test_same_bits(recipe: str, count: int) -> None:
    context, sync = get_cpu_offload_context(True, count, LAYERS)
    for _ in range(2):
        assert_equal(run(layers(), context, sync, RECIPES[recipe]), plain(layers(), RECIPES[recipe]))


def test_the_devices_copies_are_gone() -> None:
    """Of the first layers, when the forward has ended; and back again for backward."""
    context, sync = get_cpu_offload_context(True, 2, LAYERS)
    seen: list[Any] = []
    keep = offload._Layer.keep

    def spy(self: Any, tensor: torch.Tensor, free: Any) -> Any:
        seen.append(keep(self, tensor, free))
        return seen[-1]

    def look() -> None:
        assert seen
        for kept in seen:
            assert kept.device_copy is None
            assert kept.host_copy is not None

    offload._Layer.keep = spy  # type: ignore[method-assign]
    try:
        run(layers(), context, sync, between=look)
    finally:
        offload._Layer.keep = keep  # type: ignore[method-assign]
    assert all(kept.device_copy is not None for kept in seen)


def test_the_last_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward begins with it: its tensors are not copied, however many layers are asked for."""
    held: list[Any] = []
    keep = offload._Layer.keep

    def spy(self: Any, tensor: torch.Tensor, free: Any) -> Any:
        held.append(self)
        return keep(self, tensor, free)

    monkeypatch.setattr(offload._Layer, "keep", spy)
    run(layers(), *get_cpu_offload_context(True, LAYERS, LAYERS))
    assert len({id(layer) for layer in held}) == LAYERS - 1


def test_a_part_of_a_tensor_has_a_copy_of_its_own() -> None:
    """A tensor and its first rows begin at one address, with the same strides; what two ops save alike is one copy."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        return h.square() + h.exp2() * h + torch.cat([h[:8].sin(), h[8:].cos()])

    found = []
    for enabled in (False, True):
        context, sync = get_cpu_offload_context(enabled, 1, 2)
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with context:
            y = layer(x)
        made = context.layers[0].kept.values() if enabled else ()
        found.append(torch.autograd.grad(sync(y).sum(), x)[0])
    assert torch.equal(*found)
    assert len(made) == 4  # h, what exp2 gives, and both parts of h


def test_a_tensor_that_is_written_after_it_was_saved() -> None:
    """Autograd refuses such a tensor; a copy to the host must not take what was written for what was saved."""
    context, sync = get_cpu_offload_context(True, 1, 2)
    x = torch.full((4,), 2.0, requires_grad=True)
    with context:
        h = x * 1.0
        y = h * h
        with torch.no_grad():
            h.add_(1.0)
    with pytest.raises(RuntimeError, match="was written in place before it was copied to the host"):
        sync(y)


def test_parameters_marks_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    weight = torch.nn.Parameter(torch.ones(1024, 1024))
    large, marked = torch.ones(1024, 1024), torch.ones(1024, 1024)
    mark_not_offload(marked, None)
    assert [offload._is_free(t) for t in (large, marked, weight, weight.t())] == [True, False, False, False]
    assert not offload.may_leave(large)  # it is on the CPU
    quantized = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3, device="cpu")(large)
    mark_not_offload(quantized)
    assert not any(offload._is_free(buffer) for _, buffer in quantized._buffers())


def test_micro_batches_one_after_the_other_and_a_graph_that_is_retained() -> None:
    model = layers()
    context, sync = get_cpu_offload_context(True, 3, LAYERS)
    x = torch.randn(16, WIDTH).bfloat16().requires_grad_()
    found = []
    for enabled in (True, False):
        outputs = []
        for scale in (1.0, 2.0):
            y = x * scale
            for layer in model:
                if enabled:
                    with context:
                        y = layer(y)
                    y = sync(y)
                else:
                    y = layer(y)
            outputs.append(y.float().sum())
        grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in outputs]
        grads += [torch.autograd.grad(y, x)[0] for y in reversed(outputs)]
        found.append({str(i): grad for i, grad in enumerate(grads)})
    assert_equal(*found)


def test_manual() -> None:
    model = layers()
    context, sync, manual = get_cpu_offload_context(True, 1, LAYERS, manual_synchronization=True)

    def between() -> None:
        for layer in range(LAYERS):
            manual.start_offload_layer(layer)
            manual.release_activation_forward_gpu_memory(layer)
        for layer in (3, 1):
            manual.start_reload_layer(layer)

    assert_equal(run(model, context, sync, between=between), plain(model))
    with pytest.raises(ValueError, match="layer_id is 7: 4 layers have ended"):
        manual.start_offload_layer(7)


def test_manual_and_switched_off() -> None:
    """The same calls do nothing."""
    model = layers()
    context, sync, manual = get_cpu_offload_context(False, 1, LAYERS, manual_synchronization=True)
    calls = (manual.start_offload_layer, manual.release_activation_forward_gpu_memory, manual.start_reload_layer)
    assert_equal(run(model, context, sync, between=lambda: [call(0) for call in calls] and None), plain(model))


def test_retained_host_buffers_are_used_again() -> None:
    model = layers()
    context, sync = get_cpu_offload_context(True, 3, LAYERS, retain_pinned_cpu_buffers=True)
    assert not context.inside_context
    with context:
        assert context.inside_context
    want = plain(model)
    pointers = []
    for _ in range(3):
        assert_equal(run(model, context, sync), want)
        gc.collect()
        pointers.append({b.data_ptr() for found in context.transfers.free.values() for b in found})
    assert pointers[0]
    assert pointers[0] == pointers[1] == pointers[2]


def test_compiled() -> None:
    """Layers that are compiled one by one; what a graph saves goes the same way."""
    model, counter = layers(), CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(layer, fullgraph=True, backend=counter) for layer in model]
    context, sync = get_cpu_offload_context(True, 3, LAYERS)
    want = plain(model, RECIPES["current"])
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y = x
    with mz.autocast(recipe=RECIPES["current"]):
        for layer in compiled:
            with context:
                y = layer(y)
            y = sync(y)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    assert_equal({"output": y.detach(), "0": dx}, {name: want[name] for name in ("output", "0")})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0: give a positive int"),
        ({"num_layers": 3, "model_layers": 2}, "num_layers is 3, model_layers 2: give at most as many"),
        ({"offload_weights": True}, "offload_weights=True: weights stay on the GPU"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        get_cpu_offload_context(enabled=True, **given)


@pytest.mark.parametrize("given", [{"num_layers": 0}, {"num_layers": 3, "model_layers": 2}, {"offload_weights": True}])
def test_switched_off_asks_nothing_of_the_other_arguments(given: dict[str, Any]) -> None:
    """A configuration with offloading off has what it has: no layers, as a rule."""
    for manual in (False, True):
        context, sync, *_ = get_cpu_offload_context(enabled=False, manual_synchronization=manual, **given)
        x = torch.ones(2)
        with context:
            assert sync(x) is x


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_memory_of_a_gpu(recipe: str) -> None:
    """Less is held when the forward has ended, and the gradients are the same."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
    model = [mz.LayerNormMLP(512, 2048, **options) for _ in range(LAYERS)]
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held, grads = [], []
    for enabled in (False, True):
        context, sync = get_cpu_offload_context(enabled, 3, LAYERS)
        before, y = torch.cuda.memory_allocated(), x
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            for layer in model:
                with context:
                    y = layer(y)
                y = sync(y)
        held.append(torch.cuda.memory_allocated() - before)
        grads.append(torch.autograd.grad(y.float().sum(), [x, *(p for m in model for p in m.parameters())]))
        del y
    assert held[1] < held[0] / 2
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
