"""What a graph for a GPU launches and holds, seen without one: the graph is traced on CPU tensors, and is not run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.decomposition import select_decomp_table
from triton.backends.compiler import GPUTarget

import mezzotint as mz
from mezzotint.constants import FP8_TORCH
from mezzotint.kernels import _lib
from tests.recipes import RECIPES

TOKENS, WIDTH, FFN = (2, 64), 128, 256


class Mlp(nn.Module):
    """Two linears read one tensor, and what the third reads is computed by the compiler."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"bias": False, "dtype": torch.bfloat16}
        self.gate, self.up = (nn.Linear(WIDTH, FFN, **options) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(x)
        y: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Gpu:
    """As much of a GPU as Triton asks for to find out what a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Traced(Exception):
    """The graphs are known."""


Graphs = tuple[torch.fx.Graph, torch.fx.Graph]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Graphs]]:
    """A function that returns the graphs of forward and backward, by recipe and memory mode."""
    monkeypatch.setattr(_lib, "_runs_launches", lambda x: True)
    monkeypatch.setattr(_lib.Late, "on", lambda self, x: _lib.load_triton(self.target))
    monkeypatch.setattr(triton.runtime.driver, "_active", Gpu())

    def traced(recipe: str, memory: str = "default") -> Graphs:
        found: list[torch.fx.Graph] = []

        def partition(*args: Any, **kwargs: Any) -> Any:
            found.extend(module.graph for module in min_cut_rematerialization_partition(*args, **kwargs))
            raise Traced

        backend = aot_autograd(
            fw_compiler=lambda module, _: module, partition_fn=partition, decompositions=select_decomp_table()
        )
        model = torch.compile(mz.convert(Mlp()), backend=backend, fullgraph=True)
        x = torch.randn(*TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(Exception, match="Traced"), mz.autocast(recipe=RECIPES[recipe], memory=memory):
            model(x)
        forward, backward = found
        return forward, backward

    yield traced
    torch._dynamo.reset()


def calls_of(graph: torch.fx.Graph) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of the kernel and the arguments of each launch."""
    for node in graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            yield kernel.fn.__name__, node.kwargs["kwargs"]


def launches(graph: torch.fx.Graph, *names: str) -> list[torch.fx.Node]:
    """The tensors that launches of these kernels read."""
    return [given["x"] for name, given in calls_of(graph) if name in names]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("current", ("cast_kernel", "cast_tile_kernel")),
        ("block", ("_block_kernel", "_square_kernel")),
        ("mxfp8", ("_rows_kernel", "_groups_kernel")),
    ],
)
def test_linears_that_read_one_tensor_quantize_it_once(
    trace: Callable[[str], Graphs], recipe: str, names: tuple[str, ...]
) -> None:
    forward, backward = (launches(graph, *names) for graph in trace(recipe))
    assert len(forward) == 3 + 2  # weights; what gate and up read, and what down reads
    assert len(backward) == 3 + 3  # weights in their other direction, gradients of outputs


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_launches_read_what_the_compiler_writes_once(trace: Callable[[str], Graphs], recipe: str) -> None:
    """Inductor writes a view for each launch that reads it, but not the input of `as_strided`."""
    for graph in trace(recipe):
        read = launches(graph, "_amax_kernel", "cast_kernel", "cast_tile_kernel")
        made = [node for node in read if node.op == "call_function"]
        assert len(read) - len(made) in (0, 3)  # backward reads weights, which it is given
        assert all(node.target is torch.ops.aten.as_strided.default for node in made)
        sources = {node: node.args[0] for node in made}
        assert len(set(sources.values())) == len(sources)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "mxfp8"])
def test_graphs_have_launches_in_place_of_operators(trace: Callable[[str], Graphs], recipe: str) -> None:
    """Products are left: on a GPU they are PyTorch's."""
    for graph in trace(recipe):
        ops = {str(node.target) for node in graph.nodes if "mezzotint" in str(node.target)}
        assert ops == {"mezzotint.gemm.default"}


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_launches_write_what_products_read(trace: Callable[[str], Graphs], recipe: str) -> None:
    """A launch writes FP8, so that no run has to view bytes as FP8. What these bytes are for others is a view of it."""
    for graph in trace(recipe):
        buffers = [given.get(key) for _, given in calls_of(graph) for key in ("data", "transpose")]
        written = [buffer.meta["val"].dtype for buffer in buffers if buffer is not None]
        assert len(written) >= 6
        assert set(written) <= set(FP8_TORCH.values())


def test_delayed_scaling_clears_no_amax(trace: Callable[..., Graphs]) -> None:
    """The casts enter amaxes into the history, and what is quantized again has none."""
    for graph, entered in zip(trace("delayed"), (6, 3), strict=True):
        assert not [name for name, _ in calls_of(graph) if name == "_saw_kernel"]
        casts = [given for name, given in calls_of(graph) if name in ("cast_kernel", "cast_tile_kernel")]
        assert len(casts) == 6
        assert len([given for given in casts if given.get("amax") is not None]) == entered
        filled = [node.meta["val"] for node in graph.nodes if node.target is torch.ops.aten.full.default]
        assert all(value.numel() > 1 for value in filled)


def test_what_backward_quantizes_again_has_the_amax_of_forward(trace: Callable[..., Graphs]) -> None:
    for memory in ("default", "lean"):
        forward, backward = (launches(graph, "_amax_kernel") for graph in trace("current", memory))
        assert len(forward) == 3 + 2
        assert len(backward) == 3  # gradients of outputs; not the weights, and not inputs in the lean mode


def test_lean_graphs_hold_no_quantized_input(trace: Callable[..., Graphs]) -> None:
    """The tokens of both linears' inputs in bytes of FP8, less what the amaxes take."""

    def held(memory: str) -> int:
        forward, _ = trace("current", memory)
        values = [node.meta["val"] for node in list(forward.nodes)[-1].all_input_nodes]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    assert held("default") - held("lean") == pytest.approx(128 * (WIDTH + FFN), rel=0.01)
