"""How the rotary kernel moves memory: 16 bytes at a time, all of a thread's loads before its stores, none of it through
shared memory. What Triton makes of the tile decides that, so it is looked at in the compiled code."""

import re

import pytest

from mezzotint.kernels.triton._jit import ahead
from mezzotint.kernels.triton.rope import _rope_kernel, rope_config
from tests.kernels.test_triton_ahead import compile_ahead

HEADS, GROUPS, CHANNELS = 32, 8, 128


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("inverse", "blocks"), [(False, 1), (True, GROUPS)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_whole_vectors(dtype: str, inverse: bool, blocks: int, interleaved: bool) -> None:
    options = rope_config(HEADS + 2 * GROUPS, CHANNELS // 2, interleaved)
    case = ahead(
        _rope_kernel,
        f"{dtype} {dtype} {dtype} {dtype} fp32 fp32 - -",
        Q=HEADS // blocks,
        KV=GROUPS // blocks,
        BLOCKS=blocks,
        D=CHANNELS,
        TURNED=CHANNELS,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        **options,
    )
    compiled = compile_ahead(*case, 90)
    ptx = compiled.asm["ptx"]
    assert "fma.rn.f32" not in ptx, "products are rounded before they are added, as in the reference"
    moves = re.findall(r"\b(ld|st)\.(global|shared)([\w.:]*)", ptx)
    assert {move[1:] for move in moves} == {("global", ".v4.b32")}
    assert moves == sorted(moves), "loads first"
    assert compiled.metadata.shared == 0
    stored = 16 * 32 * options["num_warps"] * sum(move[0] == "st" for move in moves)
    assert stored == options["BH"] * CHANNELS * (2 if dtype == "bf16" else 4)
