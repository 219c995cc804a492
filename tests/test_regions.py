"""Regions belong to threads, may be left in any order, decorate functions, and take a recipe first."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mezzotint as mz
from mezzotint.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from mezzotint.region import State, current_state, recipe_in_force
from tests.recipes import sample

CURRENT, MX, NV = Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert State() == current_state()


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# Threads


def test_a_region_is_its_threads_own() -> None:
    with mz.autocast(recipe=MX), mz.quantized_model_init(recipe=MX):
        seen = in_thread(current_state)
        assert seen == State()
        assert recipe_in_force() == MX


def test_threads_do_not_disturb_each_other() -> None:
    """Each under a recipe of its own, one under none, in step with each other: each result is that of its recipe."""
    linear, x = mz.Linear(64, 64), sample(32, width=64)
    regions: list[dict[str, Any]] = [{"recipe": CURRENT}, {"recipe": MX}, {"recipe": NV}, {"enabled": False}]
    expected = []
    for region in regions:
        with mz.autocast(**region):
            expected.append(linear(x).detach())
    assert len({tuple(each.flatten().tolist()) for each in expected}) == len(regions)
    barrier = threading.Barrier(len(regions))

    def run(place: int) -> list[bool]:
        same = []
        for _ in range(20):
            barrier.wait()
            with mz.autocast(**regions[place]):
                barrier.wait()  # all are inside
                y = linear(x)
                same.append(torch.equal(y, expected[place]))
            y.sum().backward()
        return same

    with ThreadPoolExecutor(len(regions)) as pool:
        for same in pool.map(run, range(len(regions))):
            assert all(same)


def test_delayed_scaling_in_threads_loses_no_module() -> None:
    """Modules of several threads, each in a region of its thread's: every one has new scales after each step."""
    modules = [mz.Linear(32, 32) for _ in range(8)]
    barrier = threading.Barrier(len(modules))

    def train(module: mz.Linear) -> list[tuple[bool, bool]]:
        moved, x = [], sample(16, width=32)
        for step in range(1, 6):
            barrier.wait()
            with mz.autocast(recipe=DelayedScaling(amax_history_len=1)):
                barrier.wait()
                y = module(x * step)
            y.sum().backward()
            moved.append((bool((module.scale_fwd[:2] != 1).all()), bool(module.scale_bwd[0] != 1)))
        return moved

    with ThreadPoolExecutor(len(modules)) as pool:
        assert all(each == (True, True) for moved in pool.map(train, modules) for each in moved)


def test_a_state_outlives_its_thread() -> None:
    """PyTorch holds the state of a thread until the thread is gone, after `join`: it drops one reference, its own."""
    seen: list[State] = []
    thread = threading.Thread(target=lambda: seen.extend([current_state()] * 5))
    thread.start()
    thread.join()
    end = time.monotonic() + 10
    while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    expected = [object()] * 5
    assert sys.getrefcount(seen[0]) == sys.getrefcount(expected[0])


def test_a_region_is_left_in_its_own_thread() -> None:
    region = mz.autocast(recipe=MX)
    with region:
        with pytest.raises(RuntimeError, match="left in a thread that has not entered it"):
            in_thread(lambda: region.__exit__(None, None, None))
        assert recipe_in_force() == MX


def test_one_object_in_two_threads() -> None:
    region = mz.autocast(recipe=MX)

    def enter() -> Any:
        with region:
            return recipe_in_force()

    with region:
        assert in_thread(enter) == MX
        assert recipe_in_force() == MX


@pytest.mark.compile
def test_a_graph_reads_the_state_of_the_thread_that_calls_it() -> None:
    linear, x, graphs = mz.Linear(32, 32), sample(16, width=32), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    with torch.no_grad():
        plain, in_region = linear(x), mz.autocast(recipe=MX)(linear)(x)
        with mz.autocast(recipe=MX):
            assert torch.equal(compiled(x), in_region)

            def outside() -> torch.Tensor:
                with torch.no_grad():
                    return compiled(x)

            def inside() -> torch.Tensor:
                with torch.no_grad(), mz.autocast(recipe=MX):
                    return compiled(x)

            assert torch.equal(in_thread(outside), plain)
            assert torch.equal(in_thread(inside), in_region)
        assert torch.equal(compiled(x), plain)
    assert len(graphs) == 2  # one for each region, whatever the thread


@pytest.mark.parametrize("recipe", [CURRENT, DelayedScaling()], ids=["current", "delayed"])
def test_backward_in_another_thread(recipe: Recipe) -> None:
    """Backward follows the recipe of forward in a thread that has a region of its own, or none."""
    x, found = sample(16, width=32), []
    for call in (lambda f: f(), in_thread, lambda f: in_thread(mz.autocast(recipe=NV)(f))):
        torch.manual_seed(0)
        linear = mz.Linear(32, 32)
        for _ in range(2):
            linear.weight.grad = None
            with mz.autocast(recipe=recipe):
                y = linear(x)
            call(y.square().sum().backward)
        found.append((linear.weight.grad, linear.scale_bwd))
    for gradient, scale in found[1:]:
        assert torch.equal(gradient, found[0][0])
        assert torch.equal(scale, found[0][1])


def test_checkpoint_in_another_thread() -> None:
    """`torch.utils.checkpoint` computes again in the thread of backward: in its region, not in that of another."""
    linear, x = mz.Linear(32, 32), sample(16, width=32).requires_grad_()

    def backward(y: torch.Tensor) -> None:
        with mz.autocast(recipe=MX):
            y.sum().backward()

    gradients = []
    for call in (lambda f: f(), in_thread):
        linear.weight.grad = None
        with mz.autocast(recipe=MX):
            y = torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)
        call(lambda y=y: backward(y))
        gradients.append(linear.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_keeps_the_recipe_outside_of_its_region(use_reentrant: bool) -> None:
    """Backward after the region, in this thread or another: what is computed again has the recipe of the first run."""
    linear, x = mz.LayerNormMLP(32, 64), sample(16, width=32).requires_grad_()
    names = [name for name, _ in linear.named_parameters()]

    def gradients(recipe: mz.recipe.Recipe | None, is_checkpointed: bool, call: Any = lambda f: f()) -> list[Any]:
        x.grad = None
        linear.zero_grad()
        with mz.autocast(enabled=recipe is not None, recipe=recipe):
            inputs = (x,)
            checkpoint = torch.utils.checkpoint.checkpoint
            y = checkpoint(linear, *inputs, use_reentrant=use_reentrant) if is_checkpointed else linear(*inputs)
        call(lambda: y.square().sum().backward())
        return [x.grad, *(linear.get_parameter(name).grad for name in names)]

    for recipe in (MX, None, CURRENT):  # each after another: it is the last run that counts
        expected = gradients(recipe, False)
        for call in (lambda f: f(), in_thread):
            for found, wanted in zip(gradients(recipe, True, call), expected, strict=True):
                assert torch.equal(found, wanted)


def test_checkpoint_outside_of_its_region_has_no_scales_to_keep() -> None:
    """Delayed scaling has new scales by then: what would be computed again is not what was computed."""
    linear, x = mz.Linear(32, 32), sample(16, width=32).requires_grad_()
    with mz.autocast(recipe=DelayedScaling(amax_history_len=1)):
        y = torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"computes again outside of autocast.*Use mezzotint\.checkpoint"):
        y.sum().backward()


@pytest.mark.gpu
def test_checkpoint_in_autograds_thread() -> None:
    """On a GPU backward runs in a thread of autograd's, which has the region of the thread that called it."""
    linear = mz.Linear(32, 32, device="cuda")
    x = sample(16, width=32).cuda().requires_grad_()
    gradients = []
    for function in (lambda x: linear(x), lambda x: torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)):
        linear.weight.grad = None
        with mz.autocast(recipe=CURRENT):
            function(x).square().sum().backward()
        gradients.append(linear.weight.grad)
    assert torch.equal(*gradients)
    y = torch.utils.checkpoint.checkpoint(mz.autocast(recipe=CURRENT)(linear), x, use_reentrant=False)
    y.square().sum().backward()


def test_data_parallel() -> None:
    """A replica of `nn.DataParallel`, which runs in a thread, has the region of the thread that made it, and waits for
    its scales by itself. (Without two GPUs `nn.DataParallel` makes none: here they are made as it makes them.)"""
    linear, x = mz.Linear(32, 32), sample(16, width=32)
    recipe = DelayedScaling(amax_history_len=1)

    def replicate() -> mz.Linear:
        replica = linear._replicate_for_data_parallel()
        replica._parameters, replica._buffers = {}, dict(linear._buffers)
        replica.weight, replica.bias = linear.weight, linear.bias
        return replica

    with mz.autocast(recipe=MX):
        assert torch.equal(in_thread(partial(replicate(), x)), linear(x))
    with mz.autocast(recipe=recipe):
        linear(x)
        y = in_thread(partial(replicate(), x))  # while the module itself waits for the end of the region
        assert (linear.scale_fwd[:2] != 1).all()
    y.sum().backward()
    assert linear.scale_bwd[0] != 1
    assert "forward" not in vars(linear)


class _Quantized(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return mz.MXFP8Quantizer(mz.DType.kFloat8E4M3)(torch.full((32, 32), float(index))).dequantize()


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers: int) -> None:
    """Workers quantize on their own, while the loop that reads them is inside of a region."""
    linear = mz.Linear(32, 32)
    with mz.autocast(recipe=MX):
        for index, batch in enumerate(DataLoader(_Quantized(), num_workers=workers)):
            assert torch.equal(batch[0], torch.full((32, 32), float(index)))
            assert torch.isfinite(linear(batch)).all()
            assert recipe_in_force() == MX


# Any order


def _generator(recipe: Recipe) -> Iterator[Any]:
    with mz.autocast(recipe=recipe), mz.quantized_model_init(recipe=recipe):
        while True:
            yield recipe_in_force()


def test_generators_leave_in_the_order_they_entered() -> None:
    first, second, third = (_generator(recipe) for recipe in (CURRENT, MX, NV))
    assert [next(each) for each in (first, second, third)] == [CURRENT, MX, NV]
    first.close()
    assert recipe_in_force() == NV
    second.close()
    assert (recipe_in_force(), current_state().depth) == (NV, 1)
    third.close()
    assert State() == current_state()


def test_generators_leave_inside_a_region() -> None:
    with mz.autocast(recipe=NV):
        first, second = _generator(CURRENT), _generator(MX)
        assert [next(first), next(second)] == [CURRENT, MX]
        first.close()
        assert recipe_in_force() == MX
        second.close()
        assert recipe_in_force() == NV


def test_coroutines_leave_in_the_order_they_entered() -> None:
    async def run(recipe: Recipe, turns: int) -> None:
        with mz.autocast(recipe=recipe):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(run(CURRENT, 1), run(MX, 3))

    asyncio.run(both())
    assert State() == current_state()


# What comes first


@pytest.mark.parametrize("first", ["mxfp8", "MXFP8", MX], ids=str)
@pytest.mark.parametrize("region", [mz.autocast, mz.fp8_autocast])
def test_a_recipe_may_come_first(region: Any, first: Any) -> None:
    with region(first):
        assert recipe_in_force() == MX


@pytest.mark.parametrize("name", ["nvfp4", NV], ids=str)
def test_a_recipe_of_initial_weights_may_come_first(name: Any) -> None:
    with mz.quantized_model_init(name):
        assert isinstance(mz.Linear(32, 32).weight, mz.NVFP4Tensor)


def test_a_recipe_by_its_name() -> None:
    with mz.autocast(recipe="rowwise"):
        assert recipe_in_force() == mz.recipe.Float8RowwiseScaling()
    with pytest.raises(ValueError, match=r"there is no recipe 'fp9': give one of delayed, current"):
        mz.autocast("fp9")


@pytest.mark.parametrize(
    "value", [1, 0, None, 2.0, "", [], torch.nn], ids=["one", "zero", "None", "float", "empty", "list", "module"]
)
@pytest.mark.parametrize("region", [mz.autocast, mz.fp8_autocast, mz.quantized_model_init])
def test_anything_else_than_a_switch_is_an_error(region: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"give True or False|there is no recipe ''"):
        region(value)
    with pytest.raises(TypeError, match=r"calibrating=.*give True or False"):
        mz.autocast(calibrating=value)


def test_numpys_bool_is_a_switch() -> None:
    with mz.autocast(np.False_, recipe=MX):
        assert recipe_in_force() is None


def test_two_recipes_are_an_error() -> None:
    with pytest.raises(TypeError, match="autocast got two recipes"):
        mz.autocast("mxfp8", recipe=MX)


# Decorators


def test_autocast_decorates() -> None:
    @mz.autocast(recipe=MX)
    def asks(depth: int) -> list[Any]:
        """Doc."""
        return [recipe_in_force(), *(asks(depth - 1) if depth else [])]

    assert (asks.__name__, asks.__doc__) == ("asks", "Doc.")
    assert asks(2) == [MX, MX, MX]
    assert recipe_in_force() is None


@pytest.mark.compile
def test_a_decorated_function_compiles() -> None:
    linear, x = mz.Linear(32, 32), sample(16, width=32)
    decorated = mz.autocast(recipe=MX)(lambda x: linear(x))
    compiled = torch.compile(decorated, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), decorated(x))


def test_what_runs_after_its_call_is_not_decorated() -> None:
    async def later() -> None: ...

    async def items() -> Any:
        yield 1

    for function in (later, items, _generator):
        with pytest.raises(TypeError, match="runs after its call has returned"):
            mz.autocast(recipe=MX)(function)
