"""This module pairs torchao's eager functions that run on a CPU with our leaf ops for the same thing.

A pair compares like with like: the same direction, element type and scaling rule. What they return in another layout
(MX columns come transposed) is compared after the clock has stopped.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import _cases as cases
from bench._cases import Case, Named

FP8 = torch.float8_e4m3fn
CUDA_ONLY = "torchao's needs CUDA (Triton or CuTe kernels)"
Compared = list[tuple[str, torch.Tensor, torch.Tensor]]  # what, ours, theirs


@dataclass(frozen=True, slots=True)
class Pair:
    """A `Pair` is our op in one direction, and their function on the same x, or None if they have none."""

    case: Case
    direction: str  # "row" | "column" | "both" | "dequantize"
    against: str
    theirs: Callable[[torch.Tensor], Any] | None = None
    compare: Callable[[Named, Any], Compared] | None = None
    note: str = ""  # why codes differ if they do, or why there is no peer


def plain_mx(x: torch.Tensor, floor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP8 by the plain formula, and return E8M0 bytes (M, K/32) and codes (M, K)."""
    blocks = x.float().view(x.shape[0], -1, 32)
    top = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.log2(top).floor() - 8 if floor else torch.log2(top / 448).ceil()).clamp(-127, 127)
    codes = (blocks * torch.exp2(-exponent)).clamp(-448, 448).to(FP8)
    return (exponent + 127).to(torch.uint8).squeeze(-1), codes.view(x.shape)


def quiet_import() -> bool:
    """Return whether torchao is installed, without the warnings of its import about GPU libraries that a CPU
    build of PyTorch cannot load."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True


def pairs() -> list[Pair]:
    """Return every pair, or ours alone if torchao is not installed."""
    if quiet_import():
        return [*_float8(), *_block(), *_mx(), *_nvfp4()]
    return [
        Pair(case, direction, "", note="torchao is not installed")
        for case in cases.CASES.values()
        for direction in case.directions
    ]


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def _float8() -> Iterator[Pair]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig, hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import tensor_to_amax

    config = LinearMMConfig()
    current, delayed, rows = cases.float8_current(), cases.float8_delayed(), cases.float8_rowwise()
    dynamic = "float8 hp_tensor_to_float8_dynamic"

    def tensorwise(x: torch.Tensor) -> Any:
        return hp_tensor_to_float8_dynamic(x, FP8, config)

    def twice(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        q = tensorwise(x)
        return q, q._data.t().contiguous()

    def scaled(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        scale = delayed.options(True, False, x.device)[0]
        return hp_tensor_and_scale_to_float8(x, scale, FP8, config), tensor_to_amax(x)

    def axiswise(x: torch.Tensor) -> Any:
        return hp_tensor_to_float8_dynamic(
            x,
            FP8,
            config,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )

    def columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = axiswise(x.t())
        return q._data.contiguous(), q._scale  # as their GEMM takes it row-major

    yield Pair(
        cases.amax(),
        "row",
        "float8 tensor_to_amax",
        tensor_to_amax,
        lambda a, b: [("amax", a["amax"], b.float().view(1))],
    )
    yield Pair(
        current,
        "row",
        f"{dynamic}, tensorwise",
        tensorwise,
        lambda a, b: [("codes", a["data"], _bytes(b._data)), ("scale", a["scale_inv"], (1 / b._scale).view(1))],
        "FP64 division rounds the scale twice",
    )
    yield Pair(
        current,
        "both",
        f"{dynamic}, tensorwise, and .t().contiguous()",
        twice,
        lambda a, b: [("codes", a["data"], _bytes(b[0]._data)), ("columns", a["transpose"], _bytes(b[1]))],
        "FP64 division rounds the scale twice",
    )
    yield Pair(
        delayed,
        "row",
        "float8 hp_tensor_and_scale_to_float8 and tensor_to_amax",
        scaled,
        lambda a, b: [("codes", a["data"], _bytes(b[0]._data)), ("amax", a["amax"], b[1].float().view(1))],
    )
    yield Pair(
        rows,
        "row",
        f"{dynamic}, axiswise, pow2",
        axiswise,
        lambda a, b: [
            ("codes", a["rowwise_data"], _bytes(b._data)),
            ("scales", a["rowwise_scale_inv"], (1 / b._scale).view(-1)),
        ],
    )
    yield Pair(
        rows,
        "column",
        f"{dynamic} of x.t(), axiswise, pow2",
        columns,
        lambda a, b: [
            ("codes", a["columnwise_data"], _bytes(b[0])),
            ("scales", a["columnwise_scale_inv"], (1 / b[1]).view(-1)),
        ],
    )
    yield Pair(
        current,
        "dequantize",
        "Float8TrainingTensor.to_original_precision",
        lambda q: tensorwise(q).to_original_precision,
        lambda a, b: [("values", a["out"], b)],
        "theirs divides by the scale, ours multiplies by its inverse",
    )


def _block() -> Iterator[Pair]:
    from torchao.prototype.blockwise_fp8_training import kernels as ao
    from torchao.quantization.quant_primitives import _dequantize_affine_float8

    line = cases.float8_block("float8_block_1d, FP32 scales", two_d=False, pow2=False)
    square = cases.float8_block("float8_block_2d, FP32 scales", two_d=True, pow2=False)
    divided = "FP64 division rounds the scale twice; their 1/s is not rounded to nearest"

    def back(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        codes, scale_inv = ao.torch_blockwise_scale_act_quant_lhs(x)
        return lambda: _dequantize_affine_float8(codes, scale_inv, x.dtype)

    def tiles(side: str) -> Callable[[Named, Any], Compared]:
        return lambda a, b: [
            ("codes", a[f"{side}_data"], _bytes(b[0].t() if side == "columnwise" else b[0])),
            ("scales", a[f"{side}_scale_inv"], b[1].t() if side == "rowwise" else b[1]),
        ]

    yield Pair(
        line,
        "row",
        "torch_blockwise_scale_act_quant_lhs",
        ao.torch_blockwise_scale_act_quant_lhs,
        tiles("rowwise"),
        divided,
    )
    yield Pair(
        line,
        "column",
        "torch_blockwise_scale_act_quant_rhs",
        ao.torch_blockwise_scale_act_quant_rhs,
        tiles("columnwise"),
        f"a Python loop over columns; {divided}",
    )
    yield Pair(
        square,
        "row",
        "torch_blockwise_scale_weight_quant",
        ao.torch_blockwise_scale_weight_quant,
        lambda a, b: [
            ("codes", a["rowwise_data"], _bytes(b[0])),
            ("scales", a["rowwise_scale_inv"][:, : b[1].shape[1]], b[1]),
        ],
        divided,
    )
    yield Pair(cases.float8_block("float8_block_1d", two_d=False), "both", "", note="torchao has no pow2 block scales")
    yield Pair(line, "dequantize", "_dequantize_affine_float8", back, lambda a, b: [("values", a["out"], b)])


def _mx() -> Iterator[Pair]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def rows(a: Named, b: Any) -> Compared:
        return [("codes", a["rowwise_data"], _bytes(b[1])), ("scales", a["rowwise_scale_inv"], _bytes(b[0]))]

    def columns(a: Named, b: Any) -> Compared:
        return [
            ("codes", a["columnwise_data"], _bytes(b[1]).t()),
            ("scales", a["columnwise_scale_inv"], _bytes(b[0]).t()),
        ]

    def rows_of(mode: Any, x: torch.Tensor) -> Any:
        return to_mx(x, FP8, 32, mode)

    def columns_of(mode: Any, x: torch.Tensor) -> Any:
        return to_mx(x.t().contiguous(), FP8, 32, mode)

    def back(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        scale, codes = to_mx(x, FP8, 32, ScaleCalculationMode.RCEIL)
        return lambda: to_dtype(codes, scale, FP8, 32, x.dtype)

    for name, floor, mode in (
        ("mxfp8", False, ScaleCalculationMode.RCEIL),
        ("mxfp8 floor", True, ScaleCalculationMode.FLOOR),
    ):
        case = cases.mxfp8(name, floor=floor)
        yield Pair(case, "row", f"to_mx, {mode.name}", partial(rows_of, mode), rows)
        yield Pair(case, "row", "plain formula", partial(plain_mx, floor=floor), rows)
        yield Pair(
            case,
            "column",
            f"to_mx of x.t().contiguous(), {mode.name}",
            partial(columns_of, mode),
            columns,
        )
    yield Pair(cases.mxfp8("mxfp8_2d", two_d=True), "both", "", note="torchao's 32x32 is CUDA only (CuTe, 3-D weights)")
    yield Pair(cases.mxfp8("mxfp8"), "dequantize", "mx_tensor.to_dtype", back, lambda a, b: [("values", a["out"], b)])


def _nvfp4() -> Iterator[Pair]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

    plain = cases.nvfp4("nvfp4")
    why = "theirs divides by 6, rounds other products, lifts scales to 2^-6"

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(torch.max(torch.abs(x))))

    def back(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        top = per_tensor_amax_to_scale(torch.max(torch.abs(x)))
        scale, codes = nvfp4_quantize(x, 16, top)
        q = NVFP4Tensor(codes, scale, 16, x.dtype, top)
        return lambda: q.dequantize(x.dtype)

    def side(name: str) -> Callable[[Named, Any], Compared]:
        return lambda a, b: [
            ("code bytes", a[f"{name}_data"], _bytes(b[1])),
            ("scales", a[f"{name}_scale_inv"], _bytes(b[0])),
        ]

    yield Pair(plain, "row", "nvfp4_quantize, dynamic per-tensor scale", quantize, side("rowwise"), why)
    yield Pair(
        plain,
        "column",
        "nvfp4_quantize of x.t().contiguous()",
        lambda x: quantize(x.t().contiguous()),
        side("columnwise"),
        why,
    )
    yield Pair(cases.nvfp4("nvfp4_2d", two_d=True), "both", "", note=CUDA_ONLY)
    yield Pair(cases.nvfp4("nvfp4_rht_sr", training=True), "both", "", note=CUDA_ONLY)
    yield Pair(plain, "dequantize", "NVFP4Tensor.dequantize", back, lambda a, b: [("values", a["out"], b)], why)
