"""Recipes: frozen values that say, for every tensor of a module, how it is quantized.

    recipe.quantizer(role)    the quantizer of a tensor, or a request for state (delayed scaling)
    recipe.products()         how the three GEMMs of a linear accumulate

Equal recipes are interchangeable: a compiled module does not recompile for an equal one. To change an option make
another recipe (`dataclasses.replace`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

from mezzotint.constants import DType
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.float8_rowwise import Float8RowwiseQuantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer
from mezzotint.tensor.quantizer import Quantizer

BACKWARD_TENSORS = ("grad_output", "grad_input")
OVERRIDES = (None, "high_precision", "dequantized")


class _Maxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element types of forward and backward tensors, by their largest values. HYBRID: E4M3 forward, E5M2 backward."""

    E2M1 = _Maxima(6, 6)
    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates: `use_split_accumulator` promotes partial sums to full FP32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a tensor is quantized, where a recipe lets it be said per tensor."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    _is_filled: ClassVar[bool] = False  # by a recipe, from its switches: a changed copy of the recipe fills it again


@dataclass(frozen=True)
class QuantizerRole:
    """What a tensor is: the kind of module, "input" | "weight" | "output" | "grad_output" | "grad_input", its name."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.name, self.module_type, self.tensor_type) if part)


@dataclass(frozen=True)
class QuantizerRequest:
    """What a factory may return in the place of a quantizer: state that the module keeps for it."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A scale from the maxima of past iterations."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        _check_delayed(self)


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        """How the tensor of this role is quantized."""
        raise NotImplementedError(f"{type(self).__name__} does not say how tensors are quantized")

    def products(self) -> tuple[bool, bool, bool]:
        """Whether forward, input-gradient and weight-gradient GEMM may accumulate fast, with fewer bits."""
        return True, False, False

    def override(self) -> str | None:
        """None, or how backward computes without quantizing: on the original tensors, or on what forward made."""
        return getattr(self, "backward_override", None)

    def keeps_wgrad(self) -> bool:
        """Whether the weight gradient alone is computed in high precision."""
        return False

    def alignment(self) -> int:
        """Rows of a group of tokens are padded to a multiple of this by `Fp8Padding`."""
        return 16

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_rowwise_scaling(cls) -> bool:
        return issubclass(cls, Float8RowwiseScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the maxima of past iterations."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_format(self, (Format.E4M3, Format.HYBRID))
        _check_delayed(self)
        if self.backward_override is not None:
            raise ValueError(
                f"backward_override is {self.backward_override!r}: delayed scaling has none, its scales are made in "
                "backward; use Float8CurrentScaling"
            )

    def quantizer(self, role: QuantizerRole) -> QuantizerRequest:
        return DelayedScalingRequest(
            self.fp8_format,
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.scaling_factor_compute_algo,
            self.reduce_amax,
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor itself."""

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

    def __post_init__(self) -> None:
        _check_format(self, (Format.E4M3, Format.HYBRID))
        _check_override(self)
        _fill_products(self, False, True, True)
        _fill_params(self, self.use_power_2_scales)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params_of(self, role)
        return Float8CurrentScalingQuantizer(
            _element(self.fp8_format, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon
        )

    def products(self) -> tuple[bool, bool, bool]:
        return _fast(self)


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """FP8 with one scale per row and per column, from the tensor itself."""

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

    def __post_init__(self) -> None:
        _check_format(self, (Format.E4M3, Format.HYBRID))
        _check_override(self)
        _fill_products(self, False, True, True)
        _fill_params(self, self.use_power_2_scales)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params_of(self, role)
        return Float8RowwiseQuantizer(
            _element(self.fp8_format, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon
        )

    def products(self) -> tuple[bool, bool, bool]:
        return _fast(self)

    def keeps_wgrad(self) -> bool:
        return self.high_precision_wgrad


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per 1x128 block of activations and gradients and per 128x128 tile of weights."""

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

    def __post_init__(self) -> None:
        _check_format(self, (Format.E4M3, Format.HYBRID))
        _check_override(self)
        _fill_products(self, True, True, True)
        _fill_params(self, not self.use_f32_scales)
        x, w, grad = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        for name, dim in (("x", x), ("w", w), ("grad", grad)):
            if dim not in (1, 2):
                raise ValueError(f"{name}_block_scaling_dim is {dim}: give 1 (1x128) or 2 (128x128)")
        if (x, w, grad).count(2) > 1:
            raise ValueError(
                f"block scaling dims are x={x}, w={w}, grad={grad}: no GEMM multiplies 128x128 by 128x128; "
                "give 2 to one of them at most"
            )
        for gemm in (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad):
            if gemm is not None and not gemm.use_split_accumulator:
                raise ValueError("use_split_accumulator is False: block scaling always promotes its partial sums")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params_of(self, role)
        if role.tensor_type == "weight":
            dim = self.w_block_scaling_dim
        else:
            dim = self.grad_block_scaling_dim if role.tensor_type in BACKWARD_TENSORS else self.x_block_scaling_dim
        return Float8BlockQuantizer(
            _element(self.fp8_format, role),
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dim,
        )

    def products(self) -> tuple[bool, bool, bool]:
        return _fast(self)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with one E8M0 scale per 32 elements."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False  # weights by 32x32 tiles

    def __post_init__(self) -> None:
        _check_format(self, (Format.E4M3, Format.HYBRID))
        _check_override(self)
        if self.margin != 0:
            raise ValueError(f"margin is {self.margin}: the scale of a block follows from the block; leave it 0")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        two_d = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(_element(self.fp8_format, role), with_2d_quantization=two_d)

    def alignment(self) -> int:
        return 32


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 with one E4M3 scale per 16 elements under one scale per tensor.

    Input and gradient go through a Hadamard transform for the weight gradient, gradients are rounded
    stochastically, weights are scaled by 16x16 tiles; each can be disabled.
    """

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
        _check_format(self, (Format.E4M3,))
        _check_override(self)
        which = ("none", "weights", "activations", "all")
        for name, value in (
            ("nvfp4_4over6", self.nvfp4_4over6),
            ("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256),
        ):
            if value not in which:
                raise ValueError(f"{name} is {value!r}: give one of {', '.join(which)}")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode is {self.nvfp4_4over6_err_mode!r}: give 'MAE' or 'MSE'")
        if not self.disable_rht and (self.row_scaled_activation or self.nvfp4_4over6 in ("activations", "all")):
            raise ValueError(
                "row_scaled_activation and nvfp4_4over6 for activations take no Hadamard transform, and the gradient "
                "must not have one that the input lacks: give disable_rht=True as well"
            )
        if self.row_scaled_activation and self.nvfp4_4over6 in ("activations", "all"):
            raise ValueError("row_scaled_activation and nvfp4_4over6 for activations exclude each other: choose one")
        transform = not self.disable_rht
        _set_params(self, "fp4_quant_fwd_inp", QParams(random_hadamard_transform=transform))
        _set_params(self, "fp4_quant_fwd_weight", QParams(fp4_2d_quantization=not self.disable_2d_quantization))
        grad = QParams(random_hadamard_transform=transform, stochastic_rounding=not self.disable_stochastic_rounding)
        _set_params(self, "fp4_quant_bwd_grad", grad)
        self._check_params()

    def _check_params(self) -> None:
        """Options given tensor by tensor must make sense together."""
        x, weight, grad = self.fp4_quant_fwd_inp, self.fp4_quant_fwd_weight, self.fp4_quant_bwd_grad
        assert x is not None
        assert weight is not None
        assert grad is not None
        for name, params in (("fwd_inp", x), ("fwd_weight", weight), ("bwd_grad", grad)):
            if params.power_2_scale or params.amax_epsilon:
                raise ValueError(
                    f"fp4_quant_{name} is {params}: NVFP4 has no power_2_scale and no amax_epsilon; leave them out"
                )
        if weight.random_hadamard_transform:
            raise ValueError(
                "fp4_quant_fwd_weight has random_hadamard_transform=True: only the weight gradient's operands, input "
                "and gradient, are transformed; leave it False"
            )
        if x.random_hadamard_transform != grad.random_hadamard_transform and self.backward_override is None:
            raise ValueError(
                f"fp4_quant_fwd_inp has random_hadamard_transform={x.random_hadamard_transform}, fp4_quant_bwd_grad "
                f"{grad.random_hadamard_transform}: the weight gradient multiplies both; give it to both or to none"
            )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight, is_backward = role.tensor_type == "weight", role.tensor_type in BACKWARD_TENSORS
        if is_weight:
            params = self.fp4_quant_fwd_weight
        else:
            params = self.fp4_quant_bwd_grad if is_backward else self.fp4_quant_fwd_inp
        assert params is not None
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


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """`qfactory(role)` gives the quantizer, or a request for state, of each tensor."""

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        _check_override(self)
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is {type(self.qfactory).__name__}: give a function of a QuantizerRole")
        if self.quantization_alignment < 1:
            raise ValueError(f"quantization_alignment is {self.quantization_alignment}: give 1 or more")

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        made = self.qfactory(role)
        # Inside a graph torch 2.11 does not know the class of a quantizer that was made there: by what it is not.
        is_wrong = made is None or isinstance(made, str | int | float | type | tuple | list | dict)
        if is_wrong or (not torch.compiler.is_compiling() and not isinstance(made, Quantizer | QuantizerRequest)):
            raise TypeError(
                f"qfactory gave {type(made).__name__} for {role}: give a Quantizer (IdentityQuantizer to leave the "
                "tensor as it is) or a DelayedScalingRequest"
            )
        return made

    def alignment(self) -> int:
        return self.quantization_alignment


def _element(fp8_format: Format, role: QuantizerRole) -> DType:
    """E5M2 for backward tensors of HYBRID, else E4M3."""
    is_e5m2 = fp8_format is Format.HYBRID and role.tensor_type in BACKWARD_TENSORS
    return DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3


def _params_of(recipe: Any, role: QuantizerRole) -> QParams:
    if role.tensor_type == "weight":
        return recipe.fp8_quant_fwd_weight
    return recipe.fp8_quant_bwd_grad if role.tensor_type in BACKWARD_TENSORS else recipe.fp8_quant_fwd_inp


def _fast(recipe: Any) -> tuple[bool, bool, bool]:
    gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    fprop, dgrad, wgrad = (not gemm.use_split_accumulator for gemm in gemms)
    return fprop, dgrad, wgrad


def _set_params(recipe: Any, name: str, default: QParams) -> None:
    """What was left None, or was filled in before this recipe was copied (`dataclasses.replace`).

    (An instance as a field's default is something that torch 2.11 cannot trace.)
    """
    given = getattr(recipe, name)
    if given is not None and not isinstance(given, QParams):
        raise TypeError(f"{name} is {type(given).__name__}: give a mezzotint.recipe.QParams")
    if given is None or given._is_filled:
        object.__setattr__(default, "_is_filled", True)
        object.__setattr__(recipe, name, default)


def _fill_products(recipe: Any, fprop: bool, dgrad: bool, wgrad: bool) -> None:
    for name, split in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)):
        field = f"fp8_gemm_{name}"
        given = getattr(recipe, field)
        if given is None:
            object.__setattr__(recipe, field, MMParams(split))
        elif not isinstance(given, MMParams):
            raise TypeError(f"{field} is {type(given).__name__}: give a mezzotint.recipe.MMParams")


def _fill_params(recipe: Any, power_2_scale: bool) -> None:
    for name in ("fwd_inp", "fwd_weight", "bwd_grad"):
        field = f"fp8_quant_{name}"
        _set_params(recipe, field, QParams(power_2_scale=power_2_scale))
        params = getattr(recipe, field)
        if params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization:
            raise ValueError(f"{field} is {params}: FP8 has power_2_scale and amax_epsilon; leave the others out")


def _check_format(recipe: Any, allowed: tuple[Format, ...]) -> None:
    if recipe.fp8_format not in allowed:
        names = " or ".join(f"Format.{fmt.name}" for fmt in allowed)
        raise ValueError(f"fp8_format is {recipe.fp8_format}: {type(recipe).__name__} takes {names}")


def _check_delayed(recipe: Any) -> None:
    """Options of delayed scaling: of the recipe, or of a request."""
    if recipe.amax_history_len < 1:
        raise ValueError(f"amax_history_len is {recipe.amax_history_len}: give 1 or more")
    if not callable(recipe.amax_compute_algo) and recipe.amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is {recipe.amax_compute_algo!r}: give 'max', 'most_recent' or a function")
    if recipe.scaling_factor_compute_algo is not None and not callable(recipe.scaling_factor_compute_algo):
        raise ValueError(
            f"scaling_factor_compute_algo is {recipe.scaling_factor_compute_algo!r}: give None or a function"
        )


def _check_override(recipe: Any) -> None:
    if recipe.backward_override not in OVERRIDES:
        raise ValueError(
            f"backward_override is {recipe.backward_override!r}: give None, 'high_precision' or 'dequantized'"
        )
