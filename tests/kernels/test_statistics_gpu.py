"""Statistics of a tensor on a GPU: the CPU's counts and maxima for every format, and nobody waits for the GPU."""

import math
import warnings

import pytest
import torch

import mezzotint as mz
from mezzotint.functional.observation import statistics_of
from mezzotint.kernels.statistics import SUMS, tensor_statistics
from tests.quantizer_formats import FORMATS

pytestmark = pytest.mark.gpu

SQUARES = [SUMS.index("signal"), SUMS.index("noise")]


def check(made: torch.Tensor, want: torch.Tensor) -> None:
    """Counts and maxima to the bit; sums of squares, which are added in another order, to FP64's rounding."""
    made = made.cpu()
    torch.testing.assert_close(made[SQUARES], want[SQUARES], rtol=1e-12, atol=0)
    made[SQUARES] = want[SQUARES]
    assert torch.equal(made, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (17, 40), (300, 1000), (4096, 520), (0, 8), (8, 0)])
def test_the_cpus_table(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2.0 ** torch.randint(-14, 12, shape)).to(dtype)
    quantized = (x.float() * (1 + torch.randint(-1, 2, shape) / 16)).where(torch.rand(shape) > 0.1, 0.0)
    scale = torch.rand(shape)
    for value in (math.nan, math.inf, -math.inf, 0.0, 1e-42):
        for tensor in (x, quantized, scale):
            tensor[torch.rand(shape) < 0.02] = value
    check(
        tensor_statistics(x.cuda(), quantized.cuda(), scale.cuda(), 464.0),
        tensor_statistics(x, quantized, scale, 464.0),
    )
    apart = torch.stack([x, x], 1).cuda()[:, 0]
    check(tensor_statistics(apart, quantized.cuda(), None, 0.0), tensor_statistics(x, quantized, None, 0.0))


@pytest.mark.parametrize("name", [name for name, made in FORMATS.items() if not made.is_random])
def test_every_format(name: str) -> None:
    x = torch.randn(96, 160).bfloat16()
    if FORMATS[name].is_value:
        quantizer = FORMATS[name].quantizer(columnwise=False)
        check(statistics_of(x.cuda(), quantizer.quantize(x.cuda())), statistics_of(x, quantizer.quantize(x)))


def test_a_step_does_not_wait() -> None:
    """Forward and backward of an inspected step, without the write at its end."""
    model = mz.LayerNormMLP(128, 256, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inspector = mz.inspect(model, every=1)
    for _ in range(2):  # the first one loads kernels
        with inspector:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is a prototype
                torch.cuda.set_sync_debug_mode("error" if inspector.step else "default")
            try:
                with mz.autocast("mxfp8"):
                    model(x).float().square().mean().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(inspector.last) == 6
