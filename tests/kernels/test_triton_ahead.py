"""Every Triton kernel compiles for every GPU that has FP8, on a machine without one.

Each file of `kernels/triton` lists its cases as `AHEAD`: (kernel, types of the runtime arguments, constants). Constants
that are no argument of the kernel (num_warps) are options of the compiler.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import mezzotint.kernels.triton as package
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton import (
    _jit_float8,
    _jit_rowwise,
    _produce,
    delayed,
    float8_amax,
    float8_block,
    float8_rowwise,
    mxfp8,
    norm,
    pointwise,
)
from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton._jit_source import SOURCE_MODES, source_kind, source_mode
from mezzotint.kernels.triton._launch import Fast

CAPABILITIES = (89, 90, 100, 120)
NEVER_RUN = (89, 100, 120)
MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
]
CASES = [(module, index) for module in MODULES for index in range(len(getattr(module, "AHEAD", ())))]


def cases_by_gpu() -> Iterator[Any]:
    """Every kernel for one kind of GPU on which none has run, in turn, and the first of each file for all. Compiling
    takes seconds, so `make test` has the first of each file, for one."""
    for turn, (module, index) in enumerate(CASES):
        usual = NEVER_RUN[turn % len(NEVER_RUN)]
        for capability in CAPABILITIES if index == 0 else (usual,):
            is_quick = index == 0 and capability == usual
            yield pytest.param(module, index, capability, marks=() if is_quick else pytest.mark.slow)


def kernels_of(module: ModuleType) -> Iterator[str]:
    """Names of the kernels, as against helpers, that the module defines."""
    for name, value in vars(module).items():
        if (
            isinstance(value, Fast | JITFunction)
            and re.fullmatch(r"\w+_kernel", name)
            and getattr(value, "kernel", value).__module__ == module.__name__
        ):
            yield name


def compile_ahead(kernel: Any, signature: dict[str, Any], constants: dict[str, Any], capability: int) -> Any:
    """Pointers and counts are multiples of 16, as they are for the shapes that matter. A tuple's constants are None."""
    kernel = getattr(kernel, "kernel", kernel)
    names = list(kernel.arg_names)
    options = {"enable_fp_fusion": False} | {k: v for k, v in constants.items() if k not in names}
    values: dict[tuple[int, ...], Any] = {(names.index(k),): v for k, v in constants.items() if k in names}
    assert set(signature) | set(constants) >= set(names), f"{kernel.__name__}: {names}"
    assert set(signature) <= set(names), f"{kernel.__name__}: {names}"
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = []
    for param in kernel.params:
        found = types[param.name]
        paths = [((param.num,), found)]
        if isinstance(found, tuple):
            paths = [((param.num, index), inner) for index, inner in enumerate(found)]
            values |= {path: None for path, inner in paths if inner == "constexpr"}
        aligned += [path for path, inner in paths if inner[0] in "*i" and not param.do_not_specialize]
    source = ASTSource(kernel, types, values, {path: [["tt.divisibility", 16]] for path in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(
    ("module", "index", "capability"),
    [*cases_by_gpu()],
    ids=lambda v: v.__name__.split(".")[-1] if isinstance(v, ModuleType) else str(v),
)
def test_kernel_compiles(module: ModuleType, index: int, capability: int) -> None:
    ptx = compile_ahead(*module.AHEAD[index], capability).asm["ptx"]
    # Reciprocals of what is normal, with normal results; an exponential that 1 is added to.
    assert ".ftz" not in re.sub(r"(rcp|ex2)\.approx\.ftz\.f32", "", ptx), "subnormals are kept"
    for cast in re.findall(r"cvt[\w.]*\.e[45]m[23]x2\.\w+", ptx):
        assert re.fullmatch(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", cast), "rounds once, from FP32, and saturates"


def test_fp16_and_bf16_are_added_in_fp32() -> None:
    """LLVM would add them in FP16, where small BF16 numbers are 0."""
    ptx = compile_ahead(*ahead(pointwise._scale_add_kernel, "fp16 bf16 fp16", **pointwise.write_config(64)), 90).asm[
        "ptx"
    ]
    assert "add.rn.f32" in ptx
    assert not re.search(r"add\.[\w.]*f16", ptx)


IN_GRAPHS = (_jit_float8, float8_amax, float8_block, _jit_rowwise, float8_rowwise, mxfp8, delayed)


@pytest.mark.cover(0)
@pytest.mark.parametrize("module", IN_GRAPHS, ids=lambda module: module.__name__.split(".")[-1])
def test_kernels_of_graphs_have_nothing_to_fuse(module: ModuleType) -> None:
    """The compiler launches them with its own options, under which a product and a sum may become one operation."""
    cases = [case for case in getattr(module, "AHEAD", ()) if case[2].get("SOURCE") is None]
    for kernel, signature, constants in cases:
        ptx = compile_ahead(kernel, signature, constants | {"enable_fp_fusion": True}, 90).asm["ptx"]
        assert not re.search(r"\b(fma|add|sub)(\.\w+)*\.(f16|bf16|f32)", ptx), (
            "no sum that a product could be fused with"
        )


def test_column_sums_in_graphs_have_no_products() -> None:
    for kernel, signature, constants in _produce.AHEAD:
        if kernel in (_produce._sums_kernel, _produce._finish_kernel) and constants.get("SOURCE") is None:
            ptx = compile_ahead(kernel, signature, constants | {"enable_fp_fusion": True}, 90).asm["ptx"]
            assert not re.search(r"\b(fma|mul)(\.\w+)*\.(f16|bf16|f32)", ptx)


def test_every_kernel_is_listed() -> None:
    """By its own module, or by those that launch it."""
    listed = {
        (getattr(kernel, "kernel", kernel).__module__, kernel.__name__)
        for module in MODULES
        for kernel, _, _ in getattr(module, "AHEAD", ())
    }
    assert {(module.__name__, name) for module in MODULES for name in kernels_of(module)} == listed


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [100, 4096, 20000])
def test_a_residual_leaves_the_order_of_sums(dtype: str, width: int) -> None:
    """The norm's backward: threads share out the rows in the same way with a residual, so that dx has the same bits."""
    options = norm.backward_config(width)
    layouts = []
    for residual in ("-", dtype, "fp32"):
        pointers = f"{dtype} {dtype} fp32 fp32 fp32 {dtype} fp32 fp32 {residual}"
        constants = {"ZERO_CENTERED": False, "WHOLE": options["BK"] >= width, **options}
        text = compile_ahead(*ahead(norm._backward_kernel, pointers, **constants), 90).asm["ttgir"]
        found = []
        for shape, name in re.findall(r'"tt\.reduce"[\s\S]*?\}\) : \(tensor<(\w+), (#\w+)>\) ->', text):
            found += [shape, *re.findall(rf"^{name} = (.*)$", text, re.MULTILINE)]
        layouts.append(found)
    assert len(layouts[0]) >= 4
    assert layouts[0] == layouts[1] == layouts[2]


def test_what_a_quantization_takes_in() -> None:
    """By measurement (`dev/log/operations.md`): a norm always, an activation and its gradient where computed once."""
    x, sums = torch.empty(4, 512), torch.empty(512)
    norm = SourceCall("norm", (x, None, None, None, None, False, True))
    assert {source_mode(norm, quantization) for quantization in SOURCE_MODES} == {"inside"}
    for name, is_gated in (("gelu", False), ("swiglu", True)):
        forward = SourceCall("activation", (x, None, name, (), None))
        backward = SourceCall("activation_backward", (x, x, None, name, (), None))
        summed = SourceCall("activation_backward", backward.args, sums)
        once = ("delayed", "blocks of 32")
        assert {source_mode(forward, quantization, 128) for quantization in (*once, "block")} == {"inside"}
        for quantization in once:
            assert source_mode(backward, quantization, 128) == "inside"
            assert source_mode(summed, quantization, 128) == ("inside" if is_gated else "before")
        assert source_mode(backward, "block", 128) == ("before" if is_gated else "inside")
        assert source_mode(summed, "block", 128) == "before"
        assert source_mode(forward, "current", 128) == "first"
        assert {source_mode(made, "current", 128) for made in (backward, summed)} == {"inside" if is_gated else "first"}
        assert {source_mode(made, "rowwise", 128) for made in (forward, backward, summed)} == {"first"}


def test_what_has_one_way() -> None:
    """Tensors, empty ones, halves that are no whole tiles."""
    x, nothing = torch.empty(4, 512), torch.empty(0, 512)
    for quantization in SOURCE_MODES:
        assert source_mode(x, quantization, 128) == "before"
        assert source_mode(SourceCall("activation", (nothing, None, "gelu", (), None)), quantization, 128) == "before"
        for tile in (0, 96, 512):
            assert (
                source_mode(SourceCall("activation_backward", (x, x, None, "geglu", (), None)), quantization, tile)
                == "before"
            )


def test_the_table_is_whole() -> None:
    """Every source has a row, in every column; only two passes have a first one."""
    x = torch.empty(4, 8)
    made = [SourceCall("norm", (x, None, None, None, None, False, True))]
    for name in ("relu", "reglu"):
        made.append(SourceCall("activation", (x, None, name, (), None)))
        made += [SourceCall("activation_backward", (x, x, None, name, (), None), sums) for sums in (None, x)]
    for quantization, ways in SOURCE_MODES.items():
        assert set(ways) == {source_kind(source) for source in made}
        assert "first" not in ways.values() or quantization in ("current", "rowwise")
