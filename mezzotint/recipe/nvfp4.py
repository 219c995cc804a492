"""NVFP4BlockScaling: this recipe uses FP4 with one scale per 16 elements under one scale of the tensor."""

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.options import (
    Format,
    OptionsConflictError,
    QParams,
    check_format_and_override,
    params_of,
    set_params,
)
from mezzotint.recipe.roles import BACKWARD_TENSORS, QuantizerRole
from mezzotint.tensor.nvfp4 import NVFP4Quantizer
from mezzotint.tensor.quantizer import Quantizer


@recipe_class
class NVFP4BlockScaling(Recipe):
    """This recipe uses FP4 with one E4M3 scale per 16 elements under one scale per tensor.

    Input and gradient go through a random Hadamard transform for the weight gradient, gradients are rounded
    stochastically, and weights are scaled by tiles of 16x16; each can be disabled.

    Args:
        disable_rht: Whether the random Hadamard transform is left out, which spreads outliers of input and gradient
            before the product of the weight gradient. The default is False.
        disable_stochastic_rounding: Whether gradients are rounded to nearest instead of stochastically. The default is
            False.
        disable_2d_quantization: Whether weights have one scale per 16 elements of a row instead of one per tile of
            16x16. The default is False.
        row_scaled_activation: Whether each row of an activation has an amax of its own instead of the tensor's. It
            needs `disable_rht`. The default is False.
        nvfp4_4over6: For which tensors each block chooses whether its amax becomes 4 or 6, the two largest values of
            FP4: "none" (the default), "weights", "activations" or "all". For activations it needs `disable_rht`.
        nvfp4_4over6_e4m3_use_256: For which of these tensors the scales of blocks are at most 256 instead of 448. The
            default is "all".
        nvfp4_4over6_err_mode: The error by which a block chooses: "MAE" (mean absolute error, the default) or "MSE"
            (mean squared error).
        fp4_format: The element type, of which there is only `Format.E2M1`.
        fp8_format: The element type of what is FP8 in this recipe; only `Format.E4M3` is taken.
        fp8_dpa: Whether attention runs in FP8, which is not supported: attention raises an error if it is True. The
            default is False.
        fp8_mha: Whether tensors around attention are FP8, which is not supported either. The default is False.
        backward_override: How backward computes without quantizing: "high_precision" with the original tensors,
            "dequantized" with the values that forward multiplied, or None (the default) to quantize.
        fp4_quant_fwd_inp: How inputs are quantized, a `QParams`. None means as the switches above say.
        fp4_quant_fwd_weight: How weights are quantized, a `QParams`. None means as the switches above say.
        fp4_quant_bwd_grad: How gradients are quantized, a `QParams`. None means as the switches above say.

    Raises:
        ValueError: If an option has a value that the recipe does not take, or two options exclude each other.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> layer = mz.Linear(128, 128, device="cpu")
        >>> with mz.autocast(recipe=mz.recipe.NVFP4BlockScaling()):
        ...     y = layer(torch.randn(128, 128))
        >>> y.shape
        torch.Size([128, 128])
    """

    colour = "#D55E00"
    _family = "nvfp4"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp4_quant_fwd_inp: QParams | None = None  # None: as the switches above say
    fp4_quant_fwd_weight: QParams | None = None
    fp4_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        if self.fp4_format is not Format.E2M1:
            raise ValueError(f"fp4_format is {self.fp4_format}: there is only Format.E2M1")
        check_format_and_override(self, (Format.E4M3,))
        which = ("none", "weights", "activations", "all")
        for name, value in (
            ("nvfp4_4over6", self.nvfp4_4over6),
            ("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256),
        ):
            if value not in which:
                raise ValueError(f"{name} is {value!r}: give one of {', '.join(which)}")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode is {self.nvfp4_4over6_err_mode!r}: give 'MAE' or 'MSE'")
        transform = not self.disable_rht
        set_params(self, "fp4_quant_fwd_inp", QParams(random_hadamard_transform=transform))
        set_params(self, "fp4_quant_fwd_weight", QParams(fp4_2d_quantization=not self.disable_2d_quantization))
        grad = QParams(random_hadamard_transform=transform, stochastic_rounding=not self.disable_stochastic_rounding)
        set_params(self, "fp4_quant_bwd_grad", grad)
        self._check_params()

    def _check_params(self) -> None:
        """Raise an error unless the options that are given tensor by tensor make sense together."""
        x, weight, grad = self.fp4_quant_fwd_inp, self.fp4_quant_fwd_weight, self.fp4_quant_bwd_grad
        assert x is not None
        assert weight is not None
        assert grad is not None
        for name, params in (("fwd_inp", x), ("fwd_weight", weight), ("bwd_grad", grad)):
            if params.power_2_scale or params.amax_epsilon:
                raise ValueError(
                    f"fp4_quant_{name} is {params}: NVFP4 has no power_2_scale and no amax_epsilon; leave them out"
                )
        is_plain = self.row_scaled_activation or self.nvfp4_4over6 in ("activations", "all")
        if is_plain and x.random_hadamard_transform:
            raise OptionsConflictError(
                "row_scaled_activation and nvfp4_4over6 for activations take no Hadamard transform, and the gradient "
                "must not have one that the input lacks: give disable_rht=True as well"
            )
        if weight.random_hadamard_transform:
            raise ValueError(
                "fp4_quant_fwd_weight has random_hadamard_transform=True: only the weight gradient's operands, input "
                "and gradient, are transformed; leave it False"
            )
        if x.random_hadamard_transform != grad.random_hadamard_transform and self.backward_override is None:
            raise OptionsConflictError(
                f"fp4_quant_fwd_inp has random_hadamard_transform={x.random_hadamard_transform}, fp4_quant_bwd_grad "
                f"{grad.random_hadamard_transform}: the weight gradient multiplies both; give it to both or to none"
            )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight, is_backward = role.tensor_type == "weight", role.tensor_type in BACKWARD_TENSORS
        params = params_of(self, "fp4", role)
        group = ("weights", "all") if is_weight else ("activations", "all")
        four_over_six = not is_backward and self.nvfp4_4over6 in group
        transform = params.random_hadamard_transform
        return NVFP4Quantizer(
            with_rht=transform,
            with_post_rht_amax=transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=self.row_scaled_activation and not is_weight and not is_backward,
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if four_over_six and self.nvfp4_4over6_e4m3_use_256 in group else 448,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
        )

    def alignment(self) -> int:
        return 128
