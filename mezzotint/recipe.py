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
from mezzotint.recipe_names import RECIPE_CLASSES, recipe_short_name
from mezzotint.tensor.checks import check_choice, check_epsilon
from mezzotint.tensor.float8 import Float8CurrentScalingQuantizer, Float8ScaledQuantizer
from mezzotint.tensor.float8_block import Float8BlockQuantizer
from mezzotint.tensor.float8_rowwise import Float8RowwiseQuantizer
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.mxfp4 import MXFP4Quantizer
from mezzotint.tensor.mxfp6 import MXFP6Quantizer
from mezzotint.tensor.mxfp8 import MXFP8Quantizer
from mezzotint.tensor.nvfp4 import NVFP4Quantizer
from mezzotint.tensor.packed_mx import SCALE_RULES
from mezzotint.tensor.quantizer import Quantizer

FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")
OVERRIDES = (None, "high_precision", "dequantized")
MAX_MARGIN = 100  # of delayed scaling: the largest value of a format · 2^-margin is a normal number of FP32
GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")


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
    _epsilon: ClassVar[str] = "0.0"  # amax_epsilon as text: see `_epsilon_of`

    def __post_init__(self) -> None:
        check_epsilon(self.amax_epsilon)
        object.__setattr__(self, "_epsilon", repr(self.amax_epsilon))


def element(fp8_format: Format, forward: bool) -> DType:
    """The element type of a format's forward, or backward, tensors."""
    is_e5m2 = fp8_format is Format.E5M2 or (fp8_format is Format.HYBRID and not forward)
    return DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3


def slot(gemm: int, tensor_type: str) -> int:
    """The place of a GEMM's tensor among those of its direction: the tensors of GEMM 0, then of GEMM 1, …."""
    types = BACKWARD_TENSORS if tensor_type in BACKWARD_TENSORS else FORWARD_TENSORS
    return len(types) * gemm + types.index(tensor_type)


@dataclass(frozen=True)
class QuantizerRole(GraphConstant):
    """What a tensor is: the kind of module, "input" | "weight" | "output" | "grad_output" | "grad_input", its name."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.name, self.module_type, self.tensor_type) if part)


@dataclass(frozen=True)
class QuantizerRequest(GraphConstant):
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

    def scaled_quantizer(self, forward: bool) -> Quantizer:
        """What quantizes a forward, or backward, tensor by the scale that is kept for it."""
        return Float8ScaledQuantizer(element(self.fp8_format, forward))


@dataclass(frozen=True, eq=False)
class Recipe(GraphConstant):
    """Base of all recipes."""

    # In figures. Those of ours are Okabe and Ito's, which colour-blind readers can tell apart.
    colour: ClassVar[str] = "grey"

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        """How the tensor of this role is quantized."""
        raise NotImplementedError(f"{type(self).__name__} does not say how tensors are quantized")

    def answers_once(self) -> bool:
        """Return whether `quantizer` goes by the fields of the recipe and the type of the tensor alone. A factory, or a
        user's own recipe, may go by the name of the module, or by what changes: it is asked at each run."""
        return type(self).quantizer in _ANSWERS

    def products(self) -> tuple[bool, bool, bool]:
        """Whether forward, input-gradient and weight-gradient GEMM may accumulate fast, with fewer bits."""
        return True, False, False

    def override(self) -> str | None:
        """None, or how backward computes without quantizing: on the original tensors, or on what forward made."""
        return getattr(self, "backward_override", None)

    def quantizes_attention(self) -> bool:
        """Whether it asks for attention in low precision."""
        return bool(getattr(self, "fp8_dpa", False) or getattr(self, "fp8_mha", False))

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

    colour = "#E69F00"

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
            fp8_format=self.fp8_format,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
            reduce_amax=self.reduce_amax,
        )


@dataclass(frozen=True)
class _Float8Scaling(Recipe):
    """FP8 with scales from the tensor itself. GEMMs and tensors can be told apart; what is left None is filled in."""

    _splits: ClassVar[tuple[bool, bool, bool]] = (False, True, True)  # accumulation: forward off, backward on

    def __post_init__(self) -> None:
        _check_options(self)
        for name, split in zip(GEMMS, self._splits, strict=True):
            _set_default(self, name, MMParams(split))
        power_2_scale = self._has_power_2_scales()
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            _set_params(self, name, QParams(power_2_scale=power_2_scale))
            params = getattr(self, name)
            if params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization:
                raise ValueError(f"{name} is {params}: FP8 has power_2_scale and amax_epsilon; leave the others out")

    def _has_power_2_scales(self) -> bool:
        """Where a tensor's options do not say it."""
        raise NotImplementedError

    def products(self) -> tuple[bool, bool, bool]:
        fprop, dgrad, wgrad = [not getattr(self, name).use_split_accumulator for name in GEMMS]
        return fprop, dgrad, wgrad


@dataclass(frozen=True)
class Float8CurrentScaling(_Float8Scaling):
    """FP8 with one scale per tensor, from the tensor itself."""

    colour = "#56B4E9"

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
        params = _params_of(self, "fp8", role)
        return Float8CurrentScalingQuantizer(
            _element_of(self, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=_epsilon_of(params)
        )


@dataclass(frozen=True)
class Float8RowwiseScaling(_Float8Scaling):
    """FP8 with one scale per row and per column, from the tensor itself."""

    colour = "#009E73"

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
        params = _params_of(self, "fp8", role)
        return Float8RowwiseQuantizer(
            _element_of(self, role), force_pow_2_scales=params.power_2_scale, amax_epsilon=_epsilon_of(params)
        )

    def keeps_wgrad(self) -> bool:
        return self.high_precision_wgrad


@dataclass(frozen=True)
class Float8BlockScaling(_Float8Scaling):
    """FP8 with one scale per 1x128 block of activations and gradients and per 128x128 tile of weights."""

    colour = "#CC79A7"

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
            raise ValueError(
                f"block scaling dims are x={x}, w={w}, grad={grad}: no GEMM multiplies 128x128 by 128x128; "
                "give 2 to one of them at most"
            )
        if any(self.products()):
            raise ValueError("use_split_accumulator is False: block scaling always promotes its partial sums")

    def _has_power_2_scales(self) -> bool:
        return not self.use_f32_scales

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        params = _params_of(self, "fp8", role)
        if role.tensor_type == "weight":
            dim = self.w_block_scaling_dim
        else:
            dim = self.grad_block_scaling_dim if role.tensor_type in BACKWARD_TENSORS else self.x_block_scaling_dim
        return Float8BlockQuantizer(
            _element_of(self, role),
            rowwise=True,
            columnwise=True,
            amax_epsilon=_epsilon_of(params),
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=2 if dim == 2 else 1,  # a constant, where the compiler takes ints for symbols
        )


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with one E8M0 scale per 32 elements."""

    colour = "#0072B2"

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False  # weights by 32x32 tiles

    def __post_init__(self) -> None:
        _check_options(self)
        if self.margin != 0:
            raise ValueError(f"margin is {self.margin}: the scale of a block follows from the block; leave it 0")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        two_d = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(_element_of(self, role), with_2d_quantization=two_d)

    def alignment(self) -> int:
        return 32


@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """FP4 with one E8M0 scale per 32 elements (OCP MX v1.0).

    As in NVFP4BlockScaling, input and gradient go through a Hadamard transform for the weight gradient, gradients are
    rounded stochastically, weights are scaled by square tiles, of 32x32; each can be disabled.
    `scale_rule`: "floor" is OCP's; the top of a block saturates. Under "roundup" nothing does, so that stochastic
    rounding keeps the mean of the largest elements, too.
    """

    colour = "#F0E442"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    scale_rule: str = "floor"
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_override(self)
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_weight = role.tensor_type == "weight"
        return MXFP4Quantizer(
            with_rht=not is_weight and not self.disable_rht,
            with_2d_quantization=is_weight and not self.disable_2d_quantization,
            stochastic_rounding=role.tensor_type in BACKWARD_TENSORS and not self.disable_stochastic_rounding,
            scale_rule=self.scale_rule,
        )

    def alignment(self) -> int:
        return 32


@dataclass(frozen=True)
class MXFP6BlockScaling(Recipe):
    """FP6 with one E8M0 scale per 32 elements (OCP MX v1.0).

    `fp6_format`: "HYBRID" is E2M3, the finer one, forward and E3M2, the wider one, for gradients; or one of them for
    all. `scale_rule`: "floor" is OCP's; the top of a block saturates. Under "roundup" nothing does.
    """

    colour = "#882255"

    fp6_format: str = "HYBRID"
    scale_rule: str = "floor"
    backward_override: str | None = None
    enable_2d_quantization: bool = False  # weights by 32x32 tiles

    def __post_init__(self) -> None:
        _check_override(self)
        check_choice("fp6_format", self.fp6_format, ("HYBRID", "E2M3", "E3M2"))
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        is_wide = self.fp6_format == "E3M2" or (self.fp6_format == "HYBRID" and role.tensor_type in BACKWARD_TENSORS)
        return MXFP6Quantizer(
            DType.kFloat6E3M2 if is_wide else DType.kFloat6E2M3,
            with_2d_quantization=self.enable_2d_quantization and role.tensor_type == "weight",
            scale_rule=self.scale_rule,
        )

    def alignment(self) -> int:
        return 32


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 with one E4M3 scale per 16 elements under one scale per tensor.

    Input and gradient go through a Hadamard transform for the weight gradient, gradients are rounded
    stochastically, weights are scaled by 16x16 tiles; each can be disabled.
    """

    colour = "#D55E00"

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
        _check_options(self, (Format.E4M3,))
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
        params = _params_of(self, "fp4", role)
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
    """`qfactory(role)` gives the quantizer, or a request for state, of each tensor.

    It is asked at every run of a module. In a graph it is asked while the graph is traced, which is traced again when
    something has changed that it has read: so a factory may change its answer, and both follow.
    """

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


RECIPES: dict[str, type[Recipe]] = {name: globals()[kind] for name, kind in RECIPE_CLASSES.items()}


def as_recipe(recipe: Recipe | str) -> Recipe:
    """Return the recipe, or the one with default options that a name stands for."""
    if isinstance(recipe, str):
        name = recipe_short_name(recipe)
        if name is None:
            raise ValueError(f"there is no recipe {recipe!r}: give one of {', '.join(RECIPES)}, or a Recipe")
        return RECIPES[name]()
    check_recipe(recipe)
    return recipe


_ANSWERS = frozenset(recipe.quantizer for recipe in RECIPES.values())


def check_recipe(recipe: Any) -> None:
    """What is given for a recipe is one, not its class or its name."""
    if not isinstance(recipe, Recipe):
        kind = "type" if isinstance(recipe, type) else type(recipe).__name__
        raise TypeError(f"recipe is {kind}: give one of mezzotint.recipe, such as DelayedScaling()")


def _element_of(recipe: Any, role: QuantizerRole) -> DType:
    return element(recipe.fp8_format, role.tensor_type not in BACKWARD_TENSORS)


def _params_of(recipe: Any, prefix: str, role: QuantizerRole) -> QParams:
    name = "bwd_grad" if role.tensor_type in BACKWARD_TENSORS else "fwd_inp"
    return getattr(recipe, f"{prefix}_quant_{'fwd_weight' if role.tensor_type == 'weight' else name}")


def _epsilon_of(params: QParams) -> float:
    """`amax_epsilon`. Under `torch.compile(dynamic=True)` a float that is read is a symbol, of which no quantizer can
    be made: that is a constant of the graph. Text is one, too."""
    return float(params._epsilon)


def _set_default(recipe: Any, name: str, default: Any) -> bool:
    """What was left None; whether it was. (A field whose default is an instance is not traced by torch 2.11.)"""
    given = getattr(recipe, name)
    if given is None:
        object.__setattr__(recipe, name, default)
    elif not isinstance(given, type(default)):
        wanted = type(default).__name__
        raise TypeError(f"{name} is {type(given).__name__}: give a mezzotint.recipe.{wanted}")
    return given is None


def _set_params(recipe: Any, name: str, default: QParams) -> None:
    """What was left None, or was filled in before this recipe was copied (`dataclasses.replace`)."""
    if _set_default(recipe, name, default) or getattr(recipe, name)._is_filled:
        object.__setattr__(default, "_is_filled", True)
        object.__setattr__(recipe, name, default)


def _check_options(recipe: Any, formats: tuple[Format, ...] = (Format.E4M3, Format.HYBRID)) -> None:
    _check_format(recipe, formats)
    _check_override(recipe)


def _check_format(recipe: Any, allowed: tuple[Format, ...]) -> None:
    if recipe.fp8_format not in allowed:
        names = " or ".join(f"Format.{fmt.name}" for fmt in allowed)
        raise ValueError(f"fp8_format is {recipe.fp8_format}: {type(recipe).__name__} takes {names}")


def _check_delayed(recipe: Any) -> None:
    """Options of delayed scaling: of the recipe, or of a request."""
    length = recipe.amax_history_len
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"amax_history_len is {length!r}: give 1 or more")
    margin = recipe.margin
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= MAX_MARGIN:
        raise ValueError(f"margin is {margin!r}: give a number from -{MAX_MARGIN} to {MAX_MARGIN}, 0 for none")
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
