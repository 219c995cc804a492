"""Operands of emulated products: those that nobody keeps are not packed into codes.

Where a GPU has no product of a format, BF16 tensor cores multiply the values that the codes stand for. What serves a
product at once, and is then freed, is therefore quantized into these values by one kernel. What is kept for backward,
or over microbatches, stays in codes.
"""

from dataclasses import replace

from mezzotint import hw
from mezzotint.functional.linear import LinearQuantizers
from mezzotint.tensor.quantizer import Quantizer


def unpack_operands(
    quantizers: LinearQuantizers, weight_again: Quantizer | None, input_again: Quantizer | None, keeps_weights: bool
) -> tuple[LinearQuantizers, Quantizer | None, Quantizer | None]:
    """Return the quantizers of a GEMM, and those with which backward quantizes again, so that they unpack what nobody
    keeps. They are returned as they are if one of the GEMM's products is not emulated."""
    x, weight, dy = quantizers.input, quantizers.weight, quantizers.grad_output
    if x is None or weight is None or not all(is_emulated(each) for each in (x, weight, dy) if each is not None):
        return quantizers, weight_again, input_again
    # Of x and the weight forward keeps the column-wise copy if it makes one. The gradient serves both of its products.
    quantizers = replace(
        quantizers,
        input=x.as_unpacked(rowwise=True, columnwise=not x.columnwise_usage),
        weight=weight if keeps_weights else weight.as_unpacked(rowwise=True, columnwise=not weight.columnwise_usage),
        grad_output=None if dy is None else dy.as_unpacked(rowwise=True, columnwise=True),
    )
    return quantizers, _again(weight_again), _again(input_again)


def _again(quantizer: Quantizer | None) -> Quantizer | None:
    return None if quantizer is None else quantizer.as_unpacked(rowwise=True, columnwise=True)


def is_emulated(quantizer: Quantizer) -> bool:
    """Return whether a kernel can unpack what the quantizer makes, and the GPU has no product of its format."""
    unpacking = quantizer.unpacking()
    if unpacking is None or not hw.has_triton_kernels():
        return False
    return hw.gemm_backend(unpacking.kind, unpacking.kind, hw.capability()) is hw.EMULATED
