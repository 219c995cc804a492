"""This module has the low-level products under the names of Transformer Engine:
`general_gemm` and `general_grouped_gemm`.

Sides and layouts are those of a column-major GEMM, which gives, row-major, D [rows of B, rows of A]:

    layout   D              A               B               of a linear
    TN       B · Aᵀ         (N, K) row      (…, K) row      y = x wᵀ:   A weight, B input
    NN       B · A          (K, N) column   (…, K) row      dx = dy w:  A weight, B gradient
    NT       Bᵀ · A         (K, N) column   (K, M) column   dw = dyᵀ x: A input,  B gradient

"row" and "column" say which copy of a quantized tensor is read. D is multiplied by `alpha`; with `accumulate`, `beta` ·
out is added; then the bias is added. All of this happens in FP32, with one cast at the end.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from mezzotint.constants import HIGH_PRECISION, DType
from mezzotint.functional.gemm import is_made_by_custom as _is_custom
from mezzotint.functional.gemm import multiply, operand
from mezzotint.functional.weight import as_storage
from mezzotint.kernels._lib import as_matrix
from mezzotint.kernels.activation import activation_backward, activation_forward, column_sum
from mezzotint.kernels.grouped_gemm import grouped_gemm
from mezzotint.kernels.operand import check_pair
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = [
    "general_gemm",
    "general_grouped_gemm",
    "get_cublas_workspace",
    "get_cublas_workspace_size_bytes",
    "is_custom",
    "replace_raw_data",
    "validate_gemm_scale",
]

LAYOUTS = ("TN", "NN", "NT")
HIGH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


@torch.no_grad()
def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Quantizer | None = None,
    gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    workspace: Any = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, None]:
    """Multiply A and B, and return (D, the bias gradient or None, the input of GELU or None, None).

    With `grad=False`, `bias` [N] is added, and `gelu` gives D = gelu(pre); pre, in the bias's dtype, is written to
    `gelu_in` if that is given. With `grad=True`, `gelu` gives D · gelu'(`gelu_in`), and with `bias`, of which only
    the dtype counts, the bias gradient is the sum over the rows of B, or of D with `gelu`. `quantization_params`
    quantizes D. `out` receives D.

    `workspace`, a parameter of versions of Transformer Engine that have `get_workspace`, is not used.
    """
    _no_userbuffers(ub=ub, ub_type=ub_type, extra_output=extra_output, bulk_overlap=bulk_overlap)
    _check_layout(layout)
    A, B = as_storage(A), as_storage(B)  # the compiler cannot call methods of a quantized tensor
    dtype = _output_dtype(out_dtype, out, A)
    scale = _beta(beta, accumulate, out)
    if gelu and accumulate:
        raise ValueError("accumulate is True with gelu: D is the sum or its activation; call it twice")
    if accumulate and quantization_params is not None:
        raise ValueError(
            "accumulate is True with quantization_params: a quantized D cannot be added to; quantize after"
        )
    shape = _output_shape(A, B, layout)
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: layout {layout!r} of these gives {shape}")

    added = None if grad else bias
    fast = not use_split_accumulator
    bias_grad = None
    if accumulate and alpha == 1 and scale == 1 and out.is_contiguous():
        _product(A, B, layout, dtype, added, as_matrix(out), fast)
        product = out
    else:
        pre_dtype = bias.dtype if gelu and not grad and bias is not None else dtype
        product = _scaled_product(A, B, layout, pre_dtype, added, out, alpha, scale, fast).view(shape)
        if gelu and not grad:
            gelu_in = product if gelu_in is None else _checked_gelu_in(gelu_in, shape).copy_(product)
            product = activation_forward(product, None, "gelu", ()).to(dtype)
        elif gelu:
            if gelu_in is None:
                raise ValueError("gelu_in is None: with grad=True and gelu=True give what went into the activation")
            product = activation_backward(product, _checked_gelu_in(gelu_in, shape), None, "gelu", ()).to(dtype)
    if grad and bias is not None:
        bias_grad = column_sum(product if gelu else _plain(B), bias.dtype)
    return _written(product, out, quantization_params), bias_grad, gelu_in if gelu else None, None


@torch.no_grad()
def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: Sequence[torch.Tensor] | None,
    quantization_params: Sequence[Quantizer | None] | None,
    out_dtype: torch.dtype | None,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: DType | None = None,
    single_output: bool = False,
) -> tuple[list[Any], list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Call `general_gemm` for each pair, and return lists of D, of the bias or bias gradient, and of the input of GELU.

    With `single_output`, `out` holds one tensor in which the groups, of `m_splits` rows, lie one below the
    other. A group may be empty.
    """
    _check_layout(layout)
    A, B = [as_storage(a) for a in A], [as_storage(b) for b in B]  # as in general_gemm
    count = len(A)
    if count == 0 or len(B) != count:
        raise ValueError(f"A has {count} groups, B has {len(B)}: expected the same number, at least one")
    if m_splits is not None and layout != "NT" and [_rows(b) for b in B] != list(m_splits):
        raise ValueError(f"m_splits is {list(m_splits)}: B has groups of {[_rows(b) for b in B]} rows")
    if D_dtype is not None and D_dtype not in HIGH:
        raise ValueError(f"D_dtype is {D_dtype!r}: expected one of {sorted(HIGH)}; quantize with quantization_params")
    outs = _outputs(out, count, single_output, m_splits)
    dtype = _output_dtype(HIGH[D_dtype] if D_dtype is not None else out_dtype, outs[0], A[0])
    biases: list[torch.Tensor | None] = list(bias) if use_bias and bias else [None] * count
    if use_bias and (bias is None or len(bias) != count):
        raise ValueError(f"use_bias is True: give bias, one for each of {count} groups")

    quantizers = [None] * count if quantization_params is None else list(quantization_params)
    is_plain = not gelu and all(q is None for q in quantizers) and not is_custom(A[0])
    if is_plain and (not accumulate or all(x is not None and x.is_contiguous() and x.dtype == dtype for x in outs)):
        made = _grouped(
            A, B, layout, dtype, None if grad else biases, outs if accumulate else None, use_split_accumulator
        )
        if not accumulate:
            made = [_written(product, x, None) for product, x in zip(made, outs, strict=True)]
        grads = [column_sum(_plain(b), dtype) if grad and use_bias else None for b in B]
        given = list(out) if single_output and out is not None else made
        return given, grads if grad else biases, [None] * count
    results = [
        general_gemm(
            a,
            b,
            dtype,
            quantizer,
            gelu,
            accumulate=accumulate,
            layout=layout,
            out=x,
            bias=one,
            use_split_accumulator=use_split_accumulator,
            grad=grad,
        )
        for a, b, quantizer, x, one in zip(A, B, quantizers, outs, biases, strict=True)
    ]
    given = list(out) if single_output and out is not None else [result[0] for result in results]
    return given, [result[1] for result in results] if grad else biases, [result[2] for result in results]


def replace_raw_data(tensor: QuantizedTensorStorage, new_raw_data: torch.Tensor) -> None:
    """Copy the row-wise codes into a buffer of the same size, and make the tensor hold that buffer instead."""
    if not isinstance(tensor, QuantizedTensorStorage):
        raise TypeError(f"tensor is {type(tensor).__name__}: give a quantized one")
    name = tensor._ROWWISE[0]
    old = getattr(tensor, name)
    if old is None:
        raise ValueError(f"tensor holds no row-wise data: {tensor!r}; quantize with rowwise=True")
    if (new_raw_data.dtype, new_raw_data.shape, new_raw_data.device) != (old.dtype, old.shape, old.device):
        raise ValueError(
            f"new_raw_data is {new_raw_data.dtype} {tuple(new_raw_data.shape)} on {new_raw_data.device}: expected "
            f"{old.dtype} {tuple(old.shape)} on {old.device}"
        )
    with torch.no_grad():
        setattr(tensor, name, new_raw_data.copy_(old))


def is_custom(x: Any = None) -> bool:
    """Return whether `x` is a user's own quantizer (`custom = True`), or was made by one."""
    return x.is_custom() if isinstance(x, Quantizer) else _is_custom(x)


# Helpers


def _no_userbuffers(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name} is given: there are no CUDA userbuffers here; overlap with functional collectives "
                "(mezzotint.comm.collectives: start_…, then wait), which torch.compile schedules"
            )


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}")


def _output_dtype(out_dtype: torch.dtype | None, out: Any, A: Any) -> torch.dtype:
    is_plain = out is not None and not isinstance(out, QuantizedTensorStorage)
    if is_plain and out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out is {out.dtype}, out_dtype {out_dtype}: give one of them, or the same")
    dtype = out.dtype if is_plain else A.dtype if out_dtype is None else out_dtype
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"out_dtype is {dtype}: expected one of {HIGH_PRECISION}; quantize with quantization_params")
    return dtype


def _beta(beta: float | None, accumulate: bool, out: Any) -> float:
    """Return the factor of `out` in the sum."""
    if not accumulate:
        if beta is not None and beta != 0:
            raise ValueError(f"beta is {beta} with accumulate=False: give accumulate=True, or leave beta")
        return 0.0
    if out is None or isinstance(out, QuantizedTensorStorage):
        raise ValueError("accumulate is True: give out, a tensor in high precision to add to")
    return 1.0 if beta is None else beta


def _rows(x: Any) -> int:
    return x.shape[:-1].numel()


def _output_shape(A: Any, B: Any, layout: str) -> tuple[int, ...]:
    leading = (B.shape[-1],) if layout[1] == "T" else tuple(B.shape[:-1])
    return (*leading, _rows(A) if layout[0] == "T" else A.shape[-1])


def _sides(layout: str) -> tuple[bool, bool]:
    """Return whether B, and whether A, is read column-wise."""
    return layout[1] == "T", layout[0] == "N"


def _product(
    A: Any, B: Any, layout: str, dtype: torch.dtype, bias: torch.Tensor | None, accumulate: Any, fast: bool
) -> torch.Tensor:
    b_columnwise, a_columnwise = _sides(layout)
    if not (is_custom(A) and is_custom(B)):
        check_pair(operand(B, b_columnwise), operand(A, a_columnwise), "B", "A")
    if bias is not None and tuple(bias.shape) != _output_shape(A, B, layout)[-1:]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected {_output_shape(A, B, layout)[-1:]}")
    columnwise = {"a_columnwise": b_columnwise, "b_columnwise": a_columnwise}
    return multiply(B, A, **columnwise, out_dtype=dtype, bias=bias, accumulate=accumulate, fast=fast)


def _scaled_product(
    A: Any,
    B: Any,
    layout: str,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: Any,
    alpha: float,
    beta: float,
    fast: bool,
) -> torch.Tensor:
    """Return alpha · D + beta · out + bias, (rows, columns)."""
    if alpha == 1 and beta == 0:
        return _product(A, B, layout, dtype, bias, None, fast)
    product = _product(A, B, layout, torch.float32, None, None, fast).mul_(alpha)
    if beta != 0:
        product.add_(as_matrix(out).float(), alpha=beta)
    if bias is not None:
        product.add_(bias.float())
    return product.to(dtype)


def _checked_gelu_in(gelu_in: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if gelu_in.numel() != torch.Size(shape).numel():
        raise ValueError(f"gelu_in has shape {tuple(gelu_in.shape)}: expected {shape}")
    return gelu_in.view(shape)


def _plain(x: Any) -> torch.Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensorStorage) else x


def _written(product: torch.Tensor, out: Any, quantizer: Quantizer | None) -> Any:
    """Return the product, quantized if a quantizer is given, in `out` if that is given."""
    if quantizer is not None:
        return quantizer.quantize(product) if out is None else quantizer.update_quantized(product, out)
    if out is None or out is product:
        return product
    return out.quantize_(product) if isinstance(out, QuantizedTensorStorage) else out.copy_(product)


def _outputs(
    out: Sequence[torch.Tensor] | None, count: int, single_output: bool, m_splits: Sequence[int] | None
) -> list[Any]:
    """Return the tensor that receives each group, None for each if nothing is given."""
    if out is None:
        if single_output:
            raise ValueError("single_output is True: give out, a list of the one tensor that takes all groups")
        return [None] * count
    if not single_output:
        if len(out) != count:
            raise ValueError(f"out has {len(out)} tensors: expected one for each of {count} groups, or single_output")
        return list(out)
    if len(out) != 1 or m_splits is None:
        raise ValueError(f"single_output is True: give one tensor in out, not {len(out)}, and m_splits")
    if sum(m_splits) != out[0].shape[0]:
        raise ValueError(f"m_splits add up to {sum(m_splits)}, out[0] has {out[0].shape[0]} rows: expected the same")
    return list(out[0].split(list(m_splits)))


def _grouped(
    A: Sequence[Any],
    B: Sequence[Any],
    layout: str,
    dtype: torch.dtype,
    biases: list[torch.Tensor | None] | None,
    accumulate: list[Any] | None,
    use_split_accumulator: bool,
) -> list[Any]:
    b_columnwise, a_columnwise = _sides(layout)
    given = [bias for bias in biases or () if bias is not None]
    left, right = [operand(b, b_columnwise) for b in B], [operand(a, a_columnwise) for a in A]
    for i, pair in enumerate(zip(left, right, strict=True)):
        check_pair(*pair, f"B[{i}]", f"A[{i}]")
    return grouped_gemm(
        left,
        right,
        out_dtype=dtype,
        bias=given or None,
        accumulate=accumulate,
        fast_accum=not use_split_accumulator,
    )


def get_cublas_workspace_size_bytes() -> int:
    """Return 0, as products need no workspace of ours."""
    return 0


@cache
def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> Any:
    """Return an empty tensor, or a list of one for grouped products, which `generic_gemm` accepts and ignores."""
    empty = torch.empty(0, dtype=torch.uint8, device="cpu" if device is None else torch.device("cuda", device))
    return [empty] if grouped_gemm else empty


def validate_gemm_scale(scale: float | None, required: bool) -> float:
    """Return a factor of a product: 0 if it is not required, 1 if it is required and None is given."""
    if not required:
        if scale is not None and scale != 0:
            raise ValueError(f"scale is {scale}: it is not used here; give None or 0")
        return 0.0
    return 1.0 if scale is None else scale
