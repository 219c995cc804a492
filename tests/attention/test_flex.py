"""FlexAttention takes the same rules: on a CPU as it runs without a compiler, forward only."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint.attention import attend
from mezzotint.attention.flex import flex_attend, flex_serves
from mezzotint.attention.masks import resolve_rule
from tests.attention.reference import attention

HEADS, GROUPS, CHANNELS = 4, 2, 16


def heads(q_size: int, k_size: int) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((q_size, HEADS), (k_size, GROUPS), (k_size, GROUPS))
    return [torch.randn(2, size, count, CHANNELS, generator=make) for size, count in shapes]


@pytest.mark.cover(1)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [(1, 2), (0, 0), (2, -1)])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_windows(mask: str, window: tuple[int, int]) -> None:
    for sizes in ((5, 7), (7, 5)):  # bottom right, fewer keys: the first queries see nothing
        parts = heads(*sizes)
        rule = resolve_rule(mask, window, None)
        y = flex_attend(*[x.transpose(1, 2) for x in parts], rule, CHANNELS**-0.5)
        expected, _ = attention(*parts, mask, window=window)
        torch.testing.assert_close(y.transpose(1, 2).flatten(2).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.compile
def test_it_traces_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "flex_serves", lambda q, v, rule: torch.compiler.is_compiling())
    module = mz.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd", window_size=(3, 0))
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter)
    for size in (8, 11, 14):
        parts = heads(size, size)
        torch.testing.assert_close(call(*parts), module(*parts), rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2
    assert "flex_attention" in counter.graphs[-1].print_readable(print_output=False)


def test_eager_code_does_not_take_it() -> None:
    """Without a compiler it is slow."""
    q = torch.zeros(1, 1, 256, 64)
    assert not flex_serves(q, q, resolve_rule("causal", (8, 0), None))
