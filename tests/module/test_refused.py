"""What modules refuse: options, inputs, splits, buffers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from tests.module.cases import layer
from tests.recipes import IN, MODULES, OPTIONS, OUT, RECIPES, gradient, make, sample, splits, step

over_modules = pytest.mark.parametrize("name", MODULES)


# Signatures, as upstream has them but for the device, and torch's name of `params_dtype`, last and by name

UB = ["ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]


# What is refused


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "features": (layer(mz.Linear, 0, 4), ValueError, r"in_features is 0: give a positive int"),
    "out-features": (layer(mz.Linear, 4, -1), ValueError, r"out_features is -1: give a positive int"),
    "float-features": (layer(mz.LayerNormLinear, 4.0, 4), ValueError, r"in_features is 4.0: give a positive int"),
    "hidden": (layer(mz.LayerNormMLP, None, 4), ValueError, r"hidden_size is None: give a positive int"),
    "ffn": (layer(mz.LayerNormMLP, 4, 0), ValueError, r"ffn_hidden_size is 0: give a positive int"),
    "gemms": (layer(mz.GroupedLinear, 0, 4, 4), ValueError, r"num_gemms is 0: give a positive int"),
    "activation": (
        layer(mz.LayerNormMLP, 8, 8, activation="swish"),
        ValueError,
        r"activation is 'swish': give one of gelu, .*clamped_swiglu",
    ),
    "activation-params": (
        layer(mz.LayerNormMLP, 8, 8, activation="clamped_swiglu", activation_params={"beta": 1.0}),
        ValueError,
        r"activation_params has beta: clamped_swiglu takes limit, alpha, glu_linear_offset",
    ),
    "no-activation-params": (
        layer(mz.LayerNormMLP, 8, 8, activation_params={"limit": 1.0}),
        ValueError,
        r"activation_params has limit: gelu takes none",
    ),
    "normalization": (
        layer(mz.LayerNormLinear, 8, 8, normalization="BatchNorm"),
        ValueError,
        r"normalization is 'BatchNorm': give 'LayerNorm' or 'RMSNorm'",
    ),
    "mlp-normalization": (
        layer(mz.LayerNormMLP, 8, 8, normalization="layernorm"),
        ValueError,
        r"normalization is 'layernorm': give",
    ),
}
SIZES = {mz.Linear: (8, 8), mz.LayerNormLinear: (8, 8), mz.LayerNormMLP: (8, 8), mz.GroupedLinear: (2, 8, 8)}
# What a module may be asked for that is not there.
ABSENT: dict[str, tuple[Any, type[Exception], str]] = {
    "parallel_mode": ("columns", ValueError, r"parallel_mode is 'columns': give None, 'column' or 'row'"),
    "tp_size": (0, ValueError, r"tp_size is 0: give the number of ranks, 1 or more"),
    "symmetric_ar_type": ("two_shot", NotImplementedError, r"symmetric_ar_type='two_shot': .*leave it off"),
    **{ub: (True, NotImplementedError, rf"{ub}=True: there are no .*; leave it off\. .* torch\.compile") for ub in UB},
}


@pytest.mark.parametrize(
    ("cls", "option"),
    [(cls, option) for cls in SIZES for option in ABSENT if option in inspect.signature(cls).parameters],
)
def test_absent(cls: Any, option: str) -> None:
    value, error, message = ABSENT[option]
    with pytest.raises(error, match=message):
        cls(*SIZES[cls], **{option: value}, **OPTIONS)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make_module, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make_module()


def test_what_asks_for_nothing_is_accepted() -> None:
    for mode in (None, "column", "row"):
        mz.Linear(8, 8, parallel_mode=mode, tp_size=1, ub_name="qkv", **OPTIONS)
    mz.LayerNormMLP(8, 8, set_parallel_mode=True, seq_length=4, micro_batch_size=2, **OPTIONS)
    mz.GroupedLinear(2, 8, 8, use_grouped_tensor=False, **OPTIONS)


@over_modules
def test_refused_inputs(name: str) -> None:
    module = make(name)
    arguments = ([10, 10, 20],) if name == "grouped_linear" else ()
    for wrong, error, message in (
        ([[1.0] * IN], TypeError, r"inp is list: give a torch.Tensor"),
        (torch.ones(40, IN + 1), ValueError, rf"inp has shape \(40, {IN + 1}\): its last dimension must be {IN}"),
        (torch.tensor(1.0), ValueError, rf"inp has shape \(\): its last dimension must be {IN}"),
        (torch.ones(40, IN, dtype=torch.int64), TypeError, r"inp has dtype torch.int64: modules take float32"),
        (torch.ones(40, IN, dtype=torch.float64), TypeError, r"inp has dtype torch.float64: modules take float32"),
    ):
        with pytest.raises(error, match=message):
            module(wrong, *arguments)


# Groups


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([20, 20], r"m_splits has 2 entries: this module has 3 groups"),
        ([10, 10, 10, 10], r"m_splits has 4 entries: this module has 3 groups"),
        ([10, 10, 10], r"m_splits adds up to 30, inp has 40 rows: they must be equal"),
        (torch.tensor([10, 10, 21]), r"m_splits adds up to 41, inp has 40 rows: they must be equal"),
    ],
    ids=str,
)
def test_wrong_splits(sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("grouped_linear")(sample(), sizes)


@pytest.mark.parametrize("sizes", [[-1, 41, 0], [10.0, 10.0, 20.0], 40], ids=str)
def test_splits_that_are_no_sizes(sizes: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="m_splits"):
        make("grouped_linear")(sample(), sizes)


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("shape", [(40,), (2, 20)])
def test_given_buffers(recipe: str, shape: tuple[int, ...]) -> None:
    module, twin = make("grouped_linear"), make("grouped_linear")
    x = sample().view(*shape, IN)
    expected = step(twin, x, RECIPES[recipe], lambda x, *_: twin(x, splits(40)))
    out = torch.full((*shape, OUT), float("nan"), dtype=torch.bfloat16)
    dgrad_out = torch.full((*shape, IN), float("nan"), dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = module(leaf, splits(40), out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(out.detach(), expected["output"])
    gradient(y).backward()
    assert torch.equal(dgrad_out, expected["input"])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected["input"])
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[key]), key


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_given_buffers_in_a_graph(recipe: str) -> None:
    made = []
    for backend in ("eager", "aot_eager"):
        module = make("grouped_linear")
        out, dgrad_out = (torch.full((2, 20, n), float("nan"), dtype=torch.bfloat16) for n in (OUT, IN))
        leaf = sample().view(2, 20, IN).requires_grad_()
        call = module if backend == "eager" else torch.compile(module, backend=backend, fullgraph=True)
        with mz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = call(leaf, splits(40), out=out, dgrad_out=dgrad_out)
        assert torch.equal(y, out)
        gradient(y).backward()
        made.append((out.detach(), dgrad_out, leaf.grad))
    for actual, expected in zip(*made, strict=True):
        assert torch.equal(actual, expected)


def test_a_given_buffer_serves_again() -> None:
    module, out = make("grouped_linear"), torch.empty(40, OUT, dtype=torch.bfloat16)
    for seed in range(2):
        module(sample(seed=seed), splits(40), out=out).float().sum().backward()
    assert not out.requires_grad


@pytest.mark.parametrize("shape", [(2, 40, OUT), (40, OUT)])
def test_a_wrong_buffer(shape: tuple[int, ...]) -> None:
    out = torch.empty(shape, dtype=torch.bfloat16 if len(shape) == 3 else torch.float16)
    with pytest.raises((ValueError, TypeError), match="out"):
        make("grouped_linear")(sample(), splits(40), out=out)
