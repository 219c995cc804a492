"""The norm's statistics with the sum before them, compiled for a GPU on a machine without one."""

import re

import pytest

from mezzotint.kernels.triton import norm
from mezzotint.kernels.triton._jit import ahead
from tests.kernels.test_triton_ahead import compile_ahead


@pytest.mark.cover(0)
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 100), ("bf16", 4096), ("bf16", 20000), ("fp32", 4096)])
def test_a_sum_leaves_the_order_of_sums(dtype: str, width: int) -> None:
    """Threads share out the rows as they do without the sum before, so that statistics have the same bits."""
    options = norm.stats_config(width)
    layouts = []
    for given in ("- - -", f"{dtype} - {dtype}", f"{dtype} {dtype} {dtype}", f"fp32 fp32 {dtype}"):
        case = ahead(norm._stats_kernel, f"{dtype} {given} fp32 fp32", WHOLE=options["BK"] >= width, **options)
        text = compile_ahead(*case, 90).asm["ttgir"]
        found = []
        for shape, name in re.findall(r'"tt\.reduce"[\s\S]*?\}\) : \(tensor<(\w+), (#\w+)>\) ->', text):
            found += [shape, *re.findall(rf"^{name} = (.*)$", text, re.MULTILINE)]
        layouts.append(found)
    assert len(layouts[0]) >= 4
    assert layouts[1:] == [layouts[0]] * 3
