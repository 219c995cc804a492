"""What one compiled layer launches: every operator of its forward and backward graph is counted.

The graphs are those that a backend of `torch.compile` gets, after AOTAutograd has split them. An operator of ours is
one call of kernels; so a fusion that is lost, a tensor that is quantized twice, a new cast or copy shows as another
number here, on any machine. Operators that only look at memory in another way (views) are not counted. PyTorch's own
operators stand in the table as `other`, by name, although a compiler may make one kernel of several.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import mezzotint as mz
from mezzotint import recipe
from mezzotint.recipe import Recipe
from tests.recipes import RECIPES as SHORT_HISTORY

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
# Forward quantizes each input and each weight once, for both directions. Backward quantizes each incoming gradient
# once. In high precision nothing is quantized, and norm and activation write what they make. Attention is one operator
# of PyTorch each way.
QUANTIZED = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         1        1       0           1         0      0    0  -
LayerNormLinear  backward     2         1        0       0           0         1      0    0  -
LayerNormMLP     forward      2         2        1       1           1         0      0    0  -
LayerNormMLP     backward     4         1        0       1           0         1      0    0  -
TransformerLayer forward      4         5        2       1           2         0      0    0  attention,cat,add:2
TransformerLayer backward     8         3        0       1           0         2      0    0  attention,cat,add:2
"""
# Of the two `cat` the first puts the weights of queries, keys and values together, the second their gradients. The
# two `add` are the residual connections.

HIGH_PRECISION = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         0        0       0           1         0      1    0  -
LayerNormLinear  backward     2         0        0       0           0         1      0    0  -
LayerNormMLP     forward      2         0        0       0           1         0      1    1  -
LayerNormMLP     backward     4         0        0       0           0         1      0    1  -
TransformerLayer forward      4         0        0       0           2         0      2    1  attention,cat,add:2
TransformerLayer backward     8         0        0       0           0         2      0    1  attention,cat,add:2
"""

# NVFP4 forward and MXFP8 backward: what is kept for backward is quantized in a format of its own. Two quantizations
# read one tensor, so norm and activation write it.
CUSTOM = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormLinear  forward      1         4        0       0           1         0      1    0  -
LayerNormLinear  backward     2         1        0       0           0         1      0    0  -
LayerNormMLP     forward      2         8        0       0           1         0      1    1  -
LayerNormMLP     backward     4         1        0       1           0         1      0    0  -
"""

NOT_COUNTED = ("TransformerLayer", "custom")  # its parts are, and it takes long

# The second micro-batch: weights are not touched again, which is one quantization less for each, and no `cat` of them.
KEPT_WEIGHTS = """
layer            way       gemm  quantize  of_norm  of_act  norm_stats  norm_bwd  apply  act  other
LayerNormMLP     forward      2         0        1       1           1         0      0    0  -
LayerNormMLP     backward     4         1        0       1           0         1      0    0  -
TransformerLayer forward      4         1        2       1           2         0      0    0  attention,add:2
TransformerLayer backward     8         3        0       1           0         2      0    0  attention,cat,add:2
"""

# Beside these: for each module with parameters, delayed scaling notes the amaxes that were seen (`saw`) and, in
# backward, updates scales and histories; NVFP4 draws random numbers for each gradient that it rounds.
MODULES = {"LayerNormLinear": 1, "LayerNormMLP": 1, "TransformerLayer": 3}
STATE: dict[tuple[str, str], Callable[[int, int], Counter[str]]] = {
    ("delayed", "forward"): lambda modules, gradients: Counter(saw=modules, copy_=modules),
    ("delayed", "backward"): lambda modules, gradients: Counter(
        saw=modules, update=modules, copy_=2 * modules, clone=modules
    ),
    ("nvfp4", "backward"): lambda modules, gradients: Counter(draw_rng=gradients),
}

VIEWS = ("view", "_unsafe_view", "t", "transpose", "slice", "split_with_sizes", "detach", "alias", "getitem")
KINDS = {  # how an operator's name ends → its column
    "_quantize": "quantize",
    "_quantize_scaled": "quantize",
    "_of_norm": "of_norm",
    "_of_activation": "of_act",
    "_of_activation_backward": "of_act",
    "norm_stats": "norm_stats",
    "norm_backward": "norm_bwd",
    "norm_apply": "apply",
    "activation_forward": "act",
    "activation_backward": "act",
    "delayed_saw_": "saw",
    "delayed_update_": "update",
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


def launches(layer: nn.Module, chosen: Recipe | None, **kwargs: Any) -> list[Counter[str]]:
    """Counts of a forward and of its backward, compiled whole."""
    graphs: list[Counter[str]] = []

    def record(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(Counter(kind(node) for node in module.graph.nodes if node.op == "call_function"))
        del graphs[-1][""]
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=record,
        bw_compiler=record,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    call = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with mz.autocast(enabled=chosen is not None, recipe=chosen):
        y = call(x, **kwargs)
    y.backward(torch.ones_like(y))
    return graphs


@pytest.mark.parametrize(
    ("layer", "name"), [(layer, name) for layer in LAYERS for name in RECIPES if (layer, name) != NOT_COUNTED]
)
def test_a_step(layer: str, name: str) -> None:
    table = {"none": HIGH_PRECISION, "custom": CUSTOM}.get(name, QUANTIZED)
    for way, counts in zip(("forward", "backward"), launches(LAYERS[layer](), RECIPES[name]), strict=True):
        wanted = expected(table, layer, way)
        if (name, way) in STATE:
            wanted += STATE[name, way](MODULES[layer], wanted["quantize"] + wanted["of_act"])
        assert counts == wanted, way


@pytest.mark.parametrize("layer", ["LayerNormMLP", "TransformerLayer"])
def test_kept_weights(layer: str) -> None:
    module, chosen = LAYERS[layer](), recipe.Float8CurrentScaling()
    with mz.autocast(recipe=chosen):
        module(torch.randn(2, 32, HIDDEN, dtype=torch.bfloat16), is_first_microbatch=True)
    found = launches(module, chosen, is_first_microbatch=False)
    for way, counts in zip(("forward", "backward"), found, strict=True):
        assert counts == expected(KEPT_WEIGHTS, layer, way), way
