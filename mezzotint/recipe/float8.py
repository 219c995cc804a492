"""FP8 recipes whose FP32 scales come from the tensor itself: a scale covers a tensor, a row or a block."""

from typing import ClassVar

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import (
    Format,
    MMParams,
    OptionsConflictError,
    QParams,
    check_format_and_override,
    element_of,
    epsilon_of,
    params_of,
    set_default,
    set_params,
)
from mezzotint.recipe.roles import BACKWARD_TENSORS, QuantizerRole
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.float8_rowwise import Float8RowwiseQuantizer
from mezzotint.tensor.quantizer import Quantizer

GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")


@recipe_class
class _Float8Scaling(Recipe):
    """This base of FP8 recipes has scales from the tensor itself. Options may differ between GEMMs and between tensors;
    those that are left None are filled in."""

    _splits: ClassVar[tuple[bool, bool, bool]] = (False, True, True)  # accumulation: forward off, backward on

    def __post_init__(self) -> None:
        check_format_and_override(self)
        for name, split in zip(GEMMS, self._splits, strict=True):
            set_default(self, name, MMParams(split))
        power_2_scale = self._has_power_2_scales()
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            set_params(self, name, QParams(power_2_scale=power_2_scale))
            params = getattr(self, name)
            if params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization:
                raise ValueError(f"{name} is {params}: FP8 has power_2_scale and amax_epsilon; leave the others out")

    def _has_power_2_scales(self) -> bool:
        """Return whether scales are powers of two for tensors whose own options do not say it."""
        raise NotImplementedError

    def products(self) -> tuple[bool, bool, bool]:
        fprop, dgrad, wgrad = [not getattr(self, name).use_split_accumulator for name in GEMMS]
        return fprop, dgrad, wgrad


@recipe_class
class Float8CurrentScaling(_Float8Scaling):
    """This recipe uses FP8 with one scale per tensor, from the amax (the largest absolute value) of the tensor itself.

    Args:
        use_power_2_scales: Whether scales are rounded to powers of two. The default is False.
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is HYBRID.
        fp8_gemm_fprop: How the product of forward accumulates, an `MMParams`. None accumulates fast, without promoting
            partial sums.
        fp8_gemm_dgrad: How the product of the input gradient accumulates, an `MMParams`. None promotes partial sums to
            FP32.
        fp8_gemm_wgrad: How the product of the weight gradient accumulates, an `MMParams`. None promotes partial sums to
            FP32.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        fp8_quant_fwd_inp: How inputs are quantized, a `QParams`. None means as the options above say.
        fp8_quant_fwd_weight: How weights are quantized, a `QParams`. None means as the options above say.
        fp8_quant_bwd_grad: How gradients are quantized, a `QParams`. None means as the options above say.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.Float8CurrentScaling()):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#56B4E9"
    _family = "float8_current_scaling"

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams | None = None  # split accumulation: forward off, backward on
    fp8_gemm_dgrad: MMParams | None = None
    fp8_gemm_wgrad: MMParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None  # None: power-of-two scales as use_power_2_scales says
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def _has_power_2_scales(self) -> bool:
        return self.use_power_2_scales

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = params_of(self, "fp8", role)
        return Float8CurrentScalingQuantizer(
            element_of(self, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=epsilon_of(params)
        )


@recipe_class
class Float8RowwiseScaling(_Float8Scaling):
    """This recipe uses FP8 with one scale per row, and for the transposed copy one per column, from the tensor itself.

    Args:
        use_power_2_scales: Whether scales are rounded to powers of two. The default is True.
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is E4M3.
        fp8_gemm_fprop: How the product of forward accumulates, an `MMParams`. None accumulates fast, without promoting
            partial sums.
        fp8_gemm_dgrad: How the product of the input gradient accumulates, an `MMParams`. None promotes partial sums to
            FP32.
        fp8_gemm_wgrad: How the product of the weight gradient accumulates, an `MMParams`. None promotes partial sums to
            FP32.
        high_precision_wgrad: Whether the weight gradient is computed from the unquantized input and gradient. The
            default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        fp8_quant_fwd_inp: How inputs are quantized, a `QParams`. None means as the options above say.
        fp8_quant_fwd_weight: How weights are quantized, a `QParams`. None means as the options above say.
        fp8_quant_bwd_grad: How gradients are quantized, a `QParams`. None means as the options above say.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.Float8RowwiseScaling(high_precision_wgrad=True)):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#009E73"
    _family = "float8_rowwise_scaling"

    use_power_2_scales: bool = True
    fp8_format: Format = Format.E4M3
    fp8_gemm_fprop: MMParams | None = None  # split accumulation: forward off, backward on
    fp8_gemm_dgrad: MMParams | None = None
    fp8_gemm_wgrad: MMParams | None = None
    high_precision_wgrad: bool = False  # the weight gradient from the unquantized input and gradient
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def _has_power_2_scales(self) -> bool:
        return self.use_power_2_scales

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = params_of(self, "fp8", role)
        return Float8RowwiseQuantizer(
            element_of(self, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=epsilon_of(params)
        )

    def keeps_wgrad(self) -> bool:
        return self.high_precision_wgrad


@recipe_class
class Float8BlockScaling(_Float8Scaling):
    """This recipe uses FP8 with one scale per 1x128 block of activations and gradients and per 128x128 tile of weights.

    Args:
        use_f32_scales: Whether scales may be any FP32 number instead of powers of two. The default is False.
        fp8_format: The element types, a `Format`: `Format.E4M3` for all tensors, or `Format.HYBRID` for E4M3 in forward
            and E5M2 for gradients. The default is E4M3.
        x_block_scaling_dim: 1 for blocks of 1x128 elements of the input (the default), 2 for tiles of 128x128. At most
            one of the three kinds of tensor may have tiles.
        w_block_scaling_dim: The same choice for weights. The default is 2.
        grad_block_scaling_dim: The same choice for gradients. The default is 1.
        fp8_gemm_fprop: How the product of forward accumulates, an `MMParams`. Partial sums must be promoted to FP32,
            which is what None means.
        fp8_gemm_dgrad: The same for the product of the input gradient.
        fp8_gemm_wgrad: The same for the product of the weight gradient.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        fp8_quant_fwd_inp: How inputs are quantized, a `QParams`. None means as the options above say.
        fp8_quant_fwd_weight: How weights are quantized, a `QParams`. None means as the options above say.
        fp8_quant_bwd_grad: How gradients are quantized, a `QParams`. None means as the options above say.

    Raises:
        ValueError: If an option has a value that the recipe does not take.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.Float8BlockScaling()):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#CC79A7"
    _family = "float8_block_scaling"

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams | None = None  # split accumulation: always
    fp8_gemm_dgrad: MMParams | None = None
    fp8_gemm_wgrad: MMParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    _splits = (True, True, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        x, w, grad = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        for name, dim in (("x", x), ("w", w), ("grad", grad)):
            if dim not in (1, 2):
                raise ValueError(f"{name}_block_scaling_dim is {dim}: give 1 (1x128) or 2 (128x128)")
        if (x, w, grad).count(2) > 1:
            raise OptionsConflictError(
                f"block scaling dims are x={x}, w={w}, grad={grad}: no GEMM multiplies 128x128 by 128x128; "
                "give 2 to one of them at most"
            )
        if any(self.products()):
            raise ValueError("use_split_accumulator is False: block scaling always promotes its partial sums")

    def _has_power_2_scales(self) -> bool:
        return not self.use_f32_scales

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = params_of(self, "fp8", role)
        if role.tensor_type == "weight":
            dim = self.w_block_scaling_dim
        else:
            dim = self.grad_block_scaling_dim if role.tensor_type in BACKWARD_TENSORS else self.x_block_scaling_dim
        return Float8BlockQuantizer(
            element_of(self, role),
            rowwise=True,
            columnwise=True,
            amax_epsilon=epsilon_of(params),
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=2 if dim == 2 else 1,  # a constant even where the compiler makes ints symbols
        )
