"""The end of a product that a GEMM could not finish: this module applies scales and bias in FP32 and casts once."""

import torch

from mezzotint.kernels._lib import Late
from mezzotint.kernels._recorder import noted
from mezzotint.kernels._relaunch import Relaunched

Scale = torch.Tensor | float  # FP32 [1] or (1, 1), (R, 1), (1, C); a number


def finish_reference(out: torch.Tensor, product: torch.Tensor, scales: list[Scale], bias: torch.Tensor | None) -> None:
    steps = [(torch.mul, scale) for scale in scales] + ([] if bias is None else [(torch.add, bias)])
    for step, value in steps[:-1]:
        step(product, value, out=product)
    if steps:
        step, value = steps[-1]
        step(product, value, out=out)  # the cast is in the same pass
    elif product is not out:
        out.copy_(product)


_finish = Relaunched(Late("finish:finish", finish_reference))


def finish(out: torch.Tensor, product: torch.Tensor, scales: list[Scale], bias: torch.Tensor | None) -> None:
    """Write into `out` (R, C) the FP32 `product` times each scale, in order, plus bias [C], cast once. This overwrites
    `product`, which may be `out`. On CUDA it is one pass; PyTorch's own pass, which casts as it writes, has half the
    speed of a copy."""
    is_traced = type(product) is not torch.Tensor  # into a program of PyTorch's operators
    if product.is_cuda and product.dtype == torch.float32 and (scales or bias is not None) and not is_traced:
        noted(_finish)(out, product, scales, bias)
    else:
        finish_reference(out, product, scales, bias)
