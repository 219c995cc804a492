"""What one compiled layer launches: every operator of its forward and backward graph is counted.

The graphs are those that a backend of `torch.compile` gets, after AOTAutograd has split them. An operator of ours is
one call of kernels; so a fusion that is lost, a tensor that is quantized twice, a new cast or copy shows as another
number here, on any machine. Operators that only look at memory in another way (views) are not counted. PyTorch's own
operators stand in the table as `other`, by name, although a compiler may make one kernel of several.

What an operator of ours launches on a Hopper GPU is counted as well (`KERNELS`): its CUDA code runs on tensors without
data, and Triton's kernels and PyTorch's operators are noted instead of launched.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import mezzotint as mz
from mezzotint import hw, recipe
from mezzotint.constants import E4M3
from mezzotint.kernels import _lib, gemm, quantize_ops
from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from mezzotint.kernels.triton._launch import Fast
from mezzotint.recipe import Recipe
from tests.recipes import RECIPES as SHORT_HISTORY


@pytest.fixture(autouse=True)
def products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere but on ARM CPUs without BF16 instructions, where attention makes copies."""
    monkeypatch.setattr(hw, "SLOW_BF16", False)


pytestmark = pytest.mark.compile

RECIPES = SHORT_HISTORY | {"delayed": recipe.DelayedScaling()}  # as users have it
HIDDEN, FFN, HEADS, KV_HEADS = 64, 128, 4, 2
OPTIONS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "bias": False,
    "params_dtype": torch.bfloat16,
    "device": "cpu",
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LayerNormLinear": lambda: mz.LayerNormLinear(HIDDEN, HIDDEN, **OPTIONS),
    "LayerNormMLP": lambda: mz.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **OPTIONS),
    "TransformerLayer": lambda: mz.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        KV_HEADS,
        activation="swiglu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        **OPTIONS,
    ),
}

# quantize      a tensor in high precision, read and quantized
# of_norm       the output of a norm, quantized where it is computed; norm_stats is the pass over x before it
# of_act        the output of an activation, or in backward its gradient, quantized where it is computed
# apply         a norm that writes in high precision; act: an activation, or its gradient, that does
# norm_bwd      the gradients of a norm
#
# Forward quantizes each input once, for both directions, and each weight for its own product. Backward quantizes each
# incoming gradient once, and each weight again, so that no copy of it is held; but not the weight of queries, keys and
# values, which is put together for each run. In high precision nothing is quantized, and norm and activation write what
# they make. Attention is one operator of PyTorch each way.
QUANTIZED = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         1        1       0           1         0      0    0  -
LayerNormLinear  backward     2         2        0       0           0         1      0    0  -
LayerNormMLP     forward      2         2        1       1           1         0      0    0  -
LayerNormMLP     backward     4         3        0       1           0         1      0    0  -
TransformerLayer forward      4         5        2       1           1         0      0    0  attention,cat,summed,add
TransformerLayer backward     8         6        0       1           0         0      0    0  attention,cat,bwd_sum:2
"""
# Of the two `cat` the first puts the weights of queries, keys and values together, the second their gradients. Of the
# two residual connections the first is in the statistics of the MLP's norm (`summed`), `add` is the second. The
# gradient that comes past a norm is added in its backward (`bwd_sum`).

HIGH_PRECISION = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         0        0       0           1         0      1    0  -
LayerNormLinear  backward     2         0        0       0           0         1      0    0  -
LayerNormMLP     forward      2         0        0       0           1         0      1    1  -
LayerNormMLP     backward     4         0        0       0           0         1      0    1  -
TransformerLayer forward      4         0        0       0           1         0      2    1  attention,cat,summed,add
TransformerLayer backward     8         0        0       0           0         0      0    1  attention,cat,bwd_sum:2
"""

# NVFP4 forward and MXFP8 backward: what is kept for backward is quantized in a format of its own. Two quantizations
# read one tensor, so norm and activation write it.
CUSTOM = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         3        0       0           1         0      1    0  -
LayerNormLinear  backward     2         2        0       0           0         1      0    0  -
LayerNormMLP     forward      2         6        0       0           1         0      1    1  -
LayerNormMLP     backward     4         3        0       1           0         1      0    0  -
"""

NOT_COUNTED = ("TransformerLayer", "custom")  # its parts are, and it takes long

# The second micro-batch: weights are not touched again, which is one quantization less for each, and no `cat` of them.
KEPT_WEIGHTS = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormMLP     forward      2         0        1       1           1         0      0    0  -
LayerNormMLP     backward     4         1        0       1           0         1      0    0  -
TransformerLayer forward      4         1        2       1           1         0      0    0  attention,summed,add
TransformerLayer backward     8         3        0       1           0         0      0    0  attention,cat,bwd_sum:2
"""

# Beside these: for each module with parameters, delayed scaling notes the amaxes that were seen (`saw`), copies the
# scales that backward reads, and, in backward, updates scales and histories (`step`); NVFP4 draws
# random numbers for each gradient that it rounds.
MODULES = {"LayerNormLinear": 1, "LayerNormMLP": 1, "TransformerLayer": 3}
STATE: dict[tuple[str, str], Callable[[int, int], Counter[str]]] = {
    ("delayed", "forward"): lambda modules, gradients: Counter(saw=modules, copy_=modules, snapshot=modules),
    ("delayed", "backward"): lambda modules, gradients: Counter(step=modules, copy_=2 * modules),
    ("nvfp4", "backward"): lambda modules, gradients: Counter(draw_rng=gradients),
}

VIEWS: tuple[str, ...] = ("view", "_unsafe_view", "t", "transpose", "slice", "split_with_sizes", "detach", "alias")
VIEWS += ("getitem", "unsqueeze")
KINDS = {  # how an operator's name ends → its column
    "_quantize": "quantize",
    "_quantize_scaled": "quantize",
    "_of_norm": "of_norm",
    "_of_activation": "of_act",
    "_of_activation_backward": "of_act",
    "norm_stats": "norm_stats",
    "norm_backward": "norm_bwd",
    "norm_add_stats": "summed",
    "norm_backward_add": "bwd_sum",
    "norm_apply": "apply",
    "activation_forward": "act",
    "activation_backward": "act",
    "delayed_saw_": "saw",
    "delayed_step_": "step",
    "delayed_snapshot_": "snapshot",
}
ATTENTION = "_scaled_dot_product_"  # how PyTorch's operators for it begin, on every device


def expected(table: str, layer: str, way: str) -> Counter[str]:
    """A row of the table, without zeros."""
    head, *rows = [line.split() for line in table.strip().splitlines()]
    (row,) = [row for row in rows if row[:2] == [layer, way]]
    counts = Counter({name: int(number) for name, number in zip(head[2:-1], row[2:-1], strict=True)})
    for part in row[-1].split(","):
        name, _, number = part.partition(":")
        counts[name] += int(number or 1) if name != "-" else 0
    return +counts


def kind(node: Any) -> str:
    """The column that a node of the graph counts in; "" for a view."""
    target = node.args[0] if "auto_functionalized" in str(node.target) else node.target  # an operator that writes
    name = getattr(target, "_schema", target)
    name = getattr(name, "name", getattr(name, "__name__", str(name))).split("::")[-1]
    if name in VIEWS:
        return ""
    if name.startswith(ATTENTION):
        return "attention"
    endings = [ending for ending in KINDS if name.endswith(ending)]
    return KINDS[max(endings, key=len)] if endings else name


def graphs_of(layer: nn.Module, x: torch.Tensor, chosen: Recipe | None, **kwargs: Any) -> list[torch.fx.Graph]:
    """Of a forward and of its backward, compiled whole."""
    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=record,
        bw_compiler=record,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    call = torch.compile(layer, fullgraph=True, backend=backend)
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        y = call(x.requires_grad_(), **kwargs)
    y.backward(torch.ones_like(y))
    return graphs


def launches(layer: nn.Module, chosen: Recipe | None, **kwargs: Any) -> list[Counter[str]]:
    """Columns of the tables, forward and backward."""
    graphs = graphs_of(layer, torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16), chosen, **kwargs)
    found = [Counter(kind(node) for node in graph.nodes if node.op == "call_function") for graph in graphs]
    for counts in found:
        del counts[""]
    return found


@pytest.mark.parametrize(
    ("layer", "name"), [(layer, name) for layer in LAYERS for name in RECIPES if (layer, name) != NOT_COUNTED]
)
def test_a_step(layer: str, name: str) -> None:
    table = {"none": HIGH_PRECISION, "custom": CUSTOM}.get(name, QUANTIZED)
    for way, counts in zip(("forward", "backward"), launches(LAYERS[layer](), RECIPES[name]), strict=True):
        wanted = expected(table, layer, way)
        if (name, way) in STATE:
            wanted += STATE[name, way](MODULES[layer], wanted["gemm"] // 2)
        assert counts == wanted, way


@pytest.mark.cover(0)
@pytest.mark.parametrize("layer", ["LayerNormMLP", "TransformerLayer"])
def test_kept_weights(layer: str) -> None:
    module, chosen = LAYERS[layer](), recipe.Float8CurrentScaling()
    with mz.autocast(recipe=chosen):
        module(torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16), is_first_microbatch=True)
    found = launches(module, chosen, is_first_microbatch=False)
    for way, counts in zip(("forward", "backward"), found, strict=True):
        assert counts == expected(KEPT_WEIGHTS, layer, way), way


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_rotary_positions() -> None:
    """Queries, keys and values are split and turned by one operator, of one kernel; its gradient takes the place of the
    `cat`. Of the angles there are cos and sin, made once."""
    name, layer, angles = "current", "TransformerLayer", mz.RotaryPositionEmbedding(HIDDEN // HEADS).cpu()(40)
    x = torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16)
    graphs = graphs_of(LAYERS[layer](), x, RECIPES[name], rotary_pos_emb=angles)
    forward, backward = (Counter(kind(node) for node in g.nodes if node.op == "call_function") for g in graphs)
    plain = [expected(QUANTIZED, layer, way) for way in ("forward", "backward")]
    assert forward - Counter({"": forward[""]}) == plain[0] + Counter(rope_split=1, cos=1, sin=1)
    assert backward - Counter({"": backward[""]}) == plain[1] - Counter(cat=1) + Counter(rope_join=1)
    with hopper() as names:
        for node in [node for graph in graphs for node in graph.nodes if "rope" in str(node.target)]:
            _lib._IMPLEMENTATIONS[node.target][1](*torch.fx.map_arg(node.args, without_data))
    assert names == ["_rope_kernel"] * 2


# What each operator of a LayerNormMLP launches on a Hopper GPU, in order; several ways of one operator between bars.
# Names with `_kernel` are Triton's, the others PyTorch's or operators of ours. `to` is to the same dtype: no launch.
KERNELS: dict[str, str] = {
    "delayed": """
        norm_stats                                    _stats_kernel
        float8_quantize_scaled                        zero_ cast_kernel | zero_ cast_tile_kernel
        float8_quantize_scaled_of_norm                zero_ cast_tile_kernel
        float8_quantize_scaled_of_activation          zero_ cast_tile_kernel
        float8_quantize_scaled_of_activation_backward zero_ cast_tile_kernel
        gemm                                          _scaled_mm
        norm_backward                                 _backward_kernel _finish_kernel""",
    "current": """
        norm_stats                             _stats_kernel
        float8_quantize                        _amax_kernel cast_kernel | _amax_kernel cast_tile_kernel
        float8_quantize_of_norm                _amax_tile_kernel cast_tile_kernel
        float8_quantize_of_activation          new_zeros _write_kernel cast_tile_kernel
        float8_quantize_of_activation_backward new_zeros _gated_backward_kernel cast_tile_kernel
        gemm                                   _scaled_mm
        norm_backward                          _backward_kernel _finish_kernel""",
    "rowwise": """
        norm_stats                                     _stats_kernel
        float8_rowwise_quantize                        partial_kernel cast_kernel | rows_kernel
        float8_rowwise_quantize_of_norm                partial_kernel cast_kernel
        float8_rowwise_quantize_of_activation          partial_kernel cast_kernel
        float8_rowwise_quantize_of_activation_backward partial_kernel cast_kernel
        gemm                                           _scaled_mm
        norm_backward                                  _backward_kernel _finish_kernel""",
    "block": """
        norm_stats                                   _stats_kernel
        float8_block_quantize                        _block_kernel | _square_kernel
        float8_block_quantize_of_norm                _block_kernel
        float8_block_quantize_of_activation          _block_kernel
        float8_block_quantize_of_activation_backward activation_backward _block_kernel
        gemm                                         _scaled_mm_v2
        norm_backward                                _backward_kernel _finish_kernel""",
    "mxfp8": """
        norm_stats                            _stats_kernel
        mxfp8_quantize                        _groups_kernel | _rows_kernel
        mxfp8_quantize_of_norm                _groups_kernel
        mxfp8_quantize_of_activation          _groups_kernel
        mxfp8_quantize_of_activation_backward _groups_kernel
        gemm                                  mxfp8_dequantize mxfp8_dequantize mm
        norm_backward                         _backward_kernel _finish_kernel""",
    "nvfp4": """
        norm_stats                            _stats_kernel
        nvfp4_quantize                        _amax_kernel _quantize_kernel | _amax_tile_kernel _quantize_kernel
        nvfp4_quantize_of_norm                norm_apply _amax_tile_kernel _quantize_kernel
        nvfp4_quantize_of_activation          activation_forward _amax_tile_kernel _quantize_kernel
        draw_rng                              randint
        nvfp4_quantize_of_activation_backward activation_backward _amax_tile_kernel _quantize_kernel
        gemm                                  full nvfp4_dequantize to full nvfp4_dequantize to mul mul mm mul
        norm_backward                         _backward_kernel _finish_kernel""",
}
# No kernel: memory is described, or found.
FREE = (*VIEWS, "empty", "empty_like", "empty_strided", "new_empty", "select", "unbind", "device")
PRODUCTS = ("mm", "_scaled_mm", "_scaled_mm_v2")  # without an implementation for tensors without data


class Note(TorchDispatchMode):
    """Adds every operator to the names. Products are only noted."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in FREE:
            self.names.append(name)
        return kwargs["out"] if name in PRODUCTS else func(*args, **(kwargs or {}))


@contextmanager
def hopper() -> Iterator[list[str]]:
    """Meanwhile operators of ours may be called by their CUDA code; names of what it would launch on a Hopper GPU."""
    names: list[str] = []
    caches = (hw.gemm_backend, quantize_ops._takes_sources)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), torch.no_grad(), Note(names):
        patch.setattr(Fast, "launch", lambda self, grid, *args, **constants: names.append(self.kernel.__name__))
        patch.setattr(JITFunction, "run", lambda self, *args, **kwargs: names.append(self.__name__))
        patch.setattr(torch.cuda, "current_device", lambda: None)  # that of a tensor on the CPU
        patch.setattr(gemm, "capability_of", lambda x: (9, 0))
        patch.setattr(hw, "cuda_version", lambda: (12, 9))
        patch.setattr(hw, "has_triton_kernels", lambda: True)
        for cache in caches:
            cache.cache_clear()
        yield names
    for cache in caches:
        cache.cache_clear()


def without_data(node: torch.fx.Node) -> torch.Tensor:
    made = node.meta["val"]
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    """At a size that takes more than one program."""
    size = 512
    layer = mz.LayerNormMLP(size, size, activation="swiglu", **OPTIONS)
    graphs = graphs_of(layer, torch.randn(size, size, dtype=torch.bfloat16), RECIPES[name])
    found: dict[str, set[str]] = {}
    with hopper() as names:
        for node in [node for graph in graphs for node in graph.nodes if node.target in _lib._IMPLEMENTATIONS]:
            names.clear()
            _lib._IMPLEMENTATIONS[node.target][1](*torch.fx.map_arg(node.args, without_data))
            found.setdefault(node.target._schema.name.split("::")[-1], set()).add(" ".join(names))
    wanted = [line.split(maxsplit=1) for line in KERNELS[name].strip().splitlines()]
    assert found == {operator: set(kernels.split(" | ")) for operator, kernels in wanted}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("rows", "cols", "both", "kernels"),
    [
        (2048, 2048, True, "partial_kernel cast_kernel"),
        (2176, 2048, True, "partial_kernel finish_kernel cast_kernel"),  # too large
        (64, 4096, True, "partial_kernel cast_kernel"),
        (64, 4224, True, "partial_kernel finish_kernel cast_kernel"),  # too many partial amaxes of a row
        (64, 4224, False, "partial_kernel cast_kernel"),  # which nobody asks for
        (8192, 256, True, "partial_kernel cast_kernel"),
        (8448, 256, True, "partial_kernel finish_kernel cast_kernel"),  # too many of a column
        (0, 256, True, "finish_kernel"),  # columns without elements have scales
    ],
)
def test_a_cast_of_both_directions_finishes_the_scales_of_a_small_tensor(
    rows: int, cols: int, both: bool, kernels: str
) -> None:
    with hopper() as names:
        x = torch.empty(rows, cols, dtype=torch.bfloat16)
        _lib._IMPLEMENTATIONS[float8_rowwise_quantize][1](x, None, None, E4M3, False, 0.0, both, True)
    assert " ".join(names) == kernels


# What quantizes all experts of a GroupedLinear, and what that launches; weights of block scaling have their own kernel.
EXPERTS = {
    "delayed": ("float8_quantize_scaled_groups", {"_foreach_zero_ cast_tile_kernel"}),
    "current": ("float8_quantize_groups", {"_amax_kernel cast_tile_kernel"}),
    "rowwise": ("float8_rowwise_quantize_groups", {"partial_kernel finish_kernel cast_kernel", "rows_kernel"}),
    "block": ("float8_block_quantize_groups", {"_block_kernel", "_square_kernel"}),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    """Inputs, weights, gradients, and weights again in backward: each takes one operator for all experts, and as many
    launches as for one."""
    operator, kernels = EXPERTS[name]
    layer = mz.GroupedLinear(4, 256, 256, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(512, 256, dtype=torch.bfloat16)
    graphs = graphs_of(layer, x, RECIPES[name], m_splits=[128, 0, 256, 128])
    nodes = [[node for node in graph.nodes if "quantize" in str(node.target)] for graph in graphs]
    assert [len(each) for each in nodes] == [2, 2]
    found = set()
    with hopper() as names:
        for node in [node for each in nodes for node in each]:
            assert node.target._schema.name == f"mezzotint::{operator}"
            names.clear()
            _lib._IMPLEMENTATIONS[node.target][1](*torch.fx.map_arg(node.args, without_data))
            found.add(" ".join(names))
    assert found == kernels
