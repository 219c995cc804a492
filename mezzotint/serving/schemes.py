"""Published formats have one record each, which says which tensors a linear weight becomes, and
what config.json says of them.

    hf-fp8                         weight (E4M3), weight_scale_inv (FP32 of a 128x128 tile)
    compressed-tensors-fp8         weight (E4M3), weight_scale (FP32 [out, 1], of a row)
    compressed-tensors-fp8-tensor  weight (E4M3), weight_scale (FP32 [1], of the weight)
    compressed-tensors-mxfp8       weight (E4M3), weight_scale (E8M0 as uint8, of 32 elements)
    compressed-tensors-mxfp4       weight_packed (two E2M1 a byte), weight_scale (E8M0 as uint8, of 32 elements)
    compressed-tensors-nvfp4       weight_packed, weight_scale (E4M3, of 16 elements), weight_global_scale (FP32 [1])
    modelopt-nvfp4                 weight (packed), weight_scale (E4M3, of 16 elements), weight_scale_2 (FP32)
    mxfp4                          of experts alone: <name>_blocks, <name>_scales (E8M0 as uint8, of 32 elements)

NVFP4 here keeps the amax of the weight. Published files have 6·448 / amax (weight_global_scale) or amax /
(6·448) (weight_scale_2), rounded to FP32. FP4 formats quantize weights alone; FP8 and MXFP8 say that activations
are to be quantized as they come.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzotint.constants import FP4_MAX, FP8_BLOCK, HIGH_PRECISION, MX_BLOCK, NVFP4_BLOCK, DType
from mezzotint.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from mezzotint.serving.codes import Codes, empty_codes
from mezzotint.serving.shards import StoredSpec
from mezzotint.tensor.float8 import Float8Tensor
from mezzotint.tensor.float8_block import Float8BlockwiseQTensor
from mezzotint.tensor.float8_rowwise import Float8RowwiseTensor
from mezzotint.tensor.mxfp4 import MXFP4Tensor
from mezzotint.tensor.mxfp8 import MXFP8Tensor
from mezzotint.tensor.nvfp4 import NVFP4Tensor
from mezzotint.tensor.quantizer import Quantizer

PublishedTensors = Mapping[str, torch.Tensor]
E4M3_MAX = 448
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A `Scheme` describes one published format."""

    name: str
    recipe: type[Recipe]  # the default one that trains in it; its quantizer of weights makes the codes
    held_by: type[Any]  # the tensors of the package that hold its codes
    block: tuple[int, int]  # rows and columns that share a scale; 0: all of them
    suffixes: tuple[str, ...]  # of a weight's tensors
    buffers: tuple[str, ...]  # the package's buffer for each
    config: Callable[[Sequence[str]], dict[str, Any]]  # names of what is not quantized → quantization_config
    dtypes: tuple[torch.dtype, ...]
    joint: str = "."  # between the name of a module and the suffix
    is_for_experts: bool = False  # experts alone are quantized, all of a layer in one tensor

    def tensor_name(self, weight: str, suffix: str) -> str:
        """Return the published name of one of a weight's tensors."""
        return f"{weight}{self.joint}{suffix}"

    def default_quantizer(self) -> Quantizer:
        """Return the quantizer of weights that is used unless a recipe says otherwise."""
        return self.quantizer_of(self.recipe(), "")

    def quantizer_of(self, recipe: Recipe, name: str) -> Quantizer:
        """Return the quantizer that a recipe has for a weight, or raise a ValueError if
        that does not make this format."""
        made: Any = recipe.quantizer(QuantizerRole("linear", "weight", name))
        kind = made._classes()[1] if isinstance(made, Quantizer) and made._plan() is not None else None
        if kind is not self.held_by:
            what = "keeps its scale from step to step" if kind is None else f"makes {kind.__name__}"
            raise ValueError(
                f"{type(recipe).__name__} quantizes {name or 'weights'} otherwise than {self.name} ({what}, not "
                f"{self.held_by.__name__}): give the format that was trained, or recipe={self.recipe.__name__}()"
            )
        if not self.can_hold(made):
            raise ValueError(
                f"{self.name} has no place for {made!r}: it holds E4M3, or E2M1 under scales up to {E4M3_MAX}"
            )
        return made

    def can_hold(self, quantizer: Any) -> bool:
        """Return whether codes of this quantizer mean the same in published files."""
        is_square = getattr(quantizer, "block_scaling_dim", 2) == 2
        is_plain = not getattr(quantizer, "row_scaled_nvfp4", False)
        is_plain &= getattr(quantizer, "nvfp4_e4m3_max", E4M3_MAX) == E4M3_MAX
        return is_square and is_plain and quantizer.dtype in (DType.kFloat8E4M3, DType.kFloat4E2M1)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a weight of this shape is quantized: readers infer a block's
        size from the number of scales."""
        return len(shape) == 2 and all(
            block == 0 or size % block == 0 or (block == FP8_BLOCK and size < block)
            for size, block in zip(shape, self.block, strict=True)
        )

    def publish(self, codes: Codes, known: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of a weight by suffix.

        `known` has the scales that this weight was read from, rounded or in another dtype; they are written again if
        they still stand for the same values.
        """
        made = {}
        for suffix, buffer, dtype in zip(self.suffixes, self.buffers, self.dtypes, strict=True):
            value = codes.buffers[buffer]
            before = None if known is None else known.get(suffix)
            if before is not None and torch.equal(_buffer_of(before, buffer, suffix, value.shape), value):
                made[suffix] = before
                continue
            if buffer == "_amax_rowwise":
                value = _publish_amax(value, suffix)
            elif value.dtype == torch.uint8:
                value = value.contiguous().view(dtype)
            if value.dim() == 1 and codes.along[buffer][0] is not None:  # one scale for each row
                value = value[:, None]
            made[suffix] = value.contiguous()
        return made

    def codes(self, tensors: PublishedTensors, quantizer: Quantizer, amax: float | None = None) -> Codes:
        """Return the codes that `publish` made these tensors from; `amax` is that of NVFP4 if it is
        known, and is used if it fits."""
        first = tensors[self.suffixes[0]]
        per = 2 if self.dtypes[0] == torch.uint8 else 1
        if first.dim() != 2:
            raise ValueError(f"{self.suffixes[0]} has shape {tuple(first.shape)}, which is no matrix")
        shape = (first.shape[0], first.shape[1] * per)
        wanted = empty_codes(quantizer, shape)
        self._check(tensors, wanted)
        buffers = {}
        for suffix, name in zip(self.suffixes, self.buffers, strict=True):
            value, like = tensors[suffix], wanted.buffers[name]
            if name == "_amax_rowwise":
                exact = None if amax is None else torch.tensor([amax], dtype=torch.float32)
                fits = exact is not None and torch.equal(_publish_amax(exact, suffix).view(1), value.view(1))
                buffers[name] = exact if exact is not None and fits else _amax_of(value, suffix)
            else:
                buffers[name] = _buffer_of(value, name, suffix, like.shape)
        return Codes(shape, buffers, wanted.along)

    def _check(self, tensors: PublishedTensors, wanted: Codes) -> None:
        """Raise an error if tensors have other dtypes or shapes than `publish` gives."""
        for suffix, spec in self._specs(wanted).items():
            check_spec(suffix, StoredSpec(tensors[suffix].dtype, tuple(tensors[suffix].shape)), spec)

    def specs(self, quantizer: Quantizer, shape: tuple[int, int]) -> dict[str, StoredSpec]:
        """Return the dtypes and shapes of the tensors of a weight of this shape."""
        return self._specs(empty_codes(quantizer, shape))

    def _specs(self, codes: Codes) -> dict[str, StoredSpec]:
        made = self.publish(codes)
        return {suffix: StoredSpec(tensor.dtype, tuple(tensor.shape)) for suffix, tensor in made.items()}


def check_spec(name: str, found: StoredSpec, wanted: StoredSpec) -> None:
    """Raise an error if a tensor has another dtype or shape; FP32 scales may have a lower
    precision, and a single one any shape."""
    is_scale = wanted.dtype == torch.float32
    same = found.dtype in HIGH_PRECISION if is_scale else found.dtype == wanted.dtype
    if not same or (found.shape != wanted.shape and not (is_scale and found.numel == wanted.numel == 1)):
        raise ValueError(f"{name} is {found.dtype} {found.shape}, not {wanted.dtype} {wanted.shape}")


def _buffer_of(tensor: torch.Tensor, buffer: str, suffix: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a published tensor as the package's buffer."""
    if buffer == "_amax_rowwise":
        return _amax_of(tensor, suffix)
    value = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.float()
    return value.reshape(tuple(shape))


def _publish_amax(amax: torch.Tensor, suffix: str) -> torch.Tensor:
    """Return the scale of a whole weight: FP32 [1] or, for ModelOpt, without dimensions."""
    top = torch.full_like(amax, FP4_MAX * E4M3_MAX)
    if suffix == "weight_scale_2":
        return torch.where(amax > 0, amax / top, 1.0).view(())
    return torch.where(amax > 0, top / amax, 1.0)


def _amax_of(scale: torch.Tensor, suffix: str) -> torch.Tensor:
    """Return the amax, FP32 [1], that a published scale stands for, up to its rounding."""
    top, scale = torch.full((1,), FP4_MAX * E4M3_MAX), scale.float().view(1)
    return scale * top if suffix == "weight_scale_2" else top / scale


def _hf_fp8(kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": list(kept),
    }


def _compressed(
    format: str, bits: int, strategy: str, inputs: str | None, **more: Any
) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return a function that makes the configuration of compressed-tensors; `inputs` is the strategy of activations,
    None if they are not quantized."""
    plain = {"num_bits": bits, "type": "float", "symmetric": True}
    weights = {**plain, **more, "strategy": strategy, "dynamic": False}
    activations = None if inputs is None else {**plain, **more, "strategy": inputs, "dynamic": True}

    def config(kept: Sequence[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(kept),
        }

    return config


def _modelopt(kept: Sequence[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": NVFP4_BLOCK,
        "kv_cache_quant_algo": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": list(kept),
    }


def _mxfp4(kept: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}


_E8M0 = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8", "group_size": MX_BLOCK}
_E4M3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn", "group_size": NVFP4_BLOCK}
_ROWWISE = ("_rowwise_data", "_rowwise_scale_inv")
_FP8, _BYTE, _FP32 = torch.float8_e4m3fn, torch.uint8, torch.float32

_ALL = (
    Scheme(
        name="hf-fp8",
        recipe=Float8BlockScaling,
        held_by=Float8BlockwiseQTensor,
        block=(FP8_BLOCK, FP8_BLOCK),
        suffixes=("weight", "weight_scale_inv"),
        buffers=_ROWWISE,
        dtypes=(_FP8, _FP32),
        config=_hf_fp8,
    ),
    Scheme(
        name="compressed-tensors-fp8",
        recipe=Float8RowwiseScaling,
        held_by=Float8RowwiseTensor,
        block=(0, 0),
        suffixes=("weight", "weight_scale"),
        buffers=_ROWWISE,
        dtypes=(_FP8, _FP32),
        config=_compressed("float-quantized", 8, "channel", "token"),
    ),
    Scheme(
        name="compressed-tensors-fp8-tensor",
        recipe=Float8CurrentScaling,
        held_by=Float8Tensor,
        block=(0, 0),
        suffixes=("weight", "weight_scale"),
        buffers=("_data", "_scale_inv"),
        dtypes=(_FP8, _FP32),
        config=_compressed("float-quantized", 8, "tensor", "token"),
    ),
    Scheme(
        name="compressed-tensors-mxfp8",
        recipe=MXFP8BlockScaling,
        held_by=MXFP8Tensor,
        block=(0, MX_BLOCK),
        suffixes=("weight", "weight_scale"),
        buffers=_ROWWISE,
        dtypes=(_FP8, _BYTE),
        config=_compressed("mxfp8-quantized", 8, "group", "group", **_E8M0),
    ),
    Scheme(
        name="compressed-tensors-mxfp4",
        recipe=MXFP4BlockScaling,
        held_by=MXFP4Tensor,
        block=(0, MX_BLOCK),
        suffixes=("weight_packed", "weight_scale"),
        buffers=_ROWWISE,
        dtypes=(_BYTE, _BYTE),
        config=_compressed("mxfp4-pack-quantized", 4, "group", None, **_E8M0),
    ),
    Scheme(
        name="compressed-tensors-nvfp4",
        recipe=NVFP4BlockScaling,
        held_by=NVFP4Tensor,
        block=(0, NVFP4_BLOCK),
        suffixes=("weight_packed", "weight_scale", "weight_global_scale"),
        buffers=(*_ROWWISE, "_amax_rowwise"),
        dtypes=(_BYTE, _FP8, _FP32),
        config=_compressed("nvfp4-pack-quantized", 4, "tensor_group", None, **_E4M3),
    ),
    Scheme(
        name="modelopt-nvfp4",
        recipe=NVFP4BlockScaling,
        held_by=NVFP4Tensor,
        block=(0, NVFP4_BLOCK),
        suffixes=("weight", "weight_scale", "weight_scale_2"),
        buffers=(*_ROWWISE, "_amax_rowwise"),
        dtypes=(_BYTE, _FP8, _FP32),
        config=_modelopt,
    ),
    Scheme(
        name="mxfp4",
        recipe=MXFP4BlockScaling,
        held_by=MXFP4Tensor,
        block=(0, MX_BLOCK),
        suffixes=("blocks", "scales"),
        buffers=_ROWWISE,
        dtypes=(_BYTE, _BYTE),
        config=_mxfp4,
        joint="_",
        is_for_experts=True,
    ),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _ALL}


def find_scheme(name: str, trained: Recipe | None = None) -> Scheme:
    """Return a format by its name; "compressed-tensors" means the one of its formats in which
    `trained` quantizes weights."""
    if name in SCHEMES:
        return SCHEMES[name]
    family = [scheme for scheme in _ALL if scheme.name.startswith(f"{name}-")] if name == "compressed-tensors" else []
    for scheme in family if trained is not None else ():
        if isinstance(trained, scheme.recipe):
            return scheme
    names = ", ".join(scheme.name for scheme in family or _ALL)
    raise ValueError(f"format is {name!r}: give one of {names}")


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the format that a quantization_config describes."""
    method = str(config.get("quant_method", "")).lower()
    for scheme in _ALL:
        own = scheme.config(())
        if own["quant_method"] != method:
            continue
        if method == "compressed-tensors":
            if _weights_of(own) == _weights_of(config):
                return scheme
        elif method != "modelopt" or str(config.get("quant_algo")) in ("W4A16_NVFP4", "NVFP4"):
            return scheme
    what = f"{method or 'no quant_method'}" + (f" with {config['format']}" if "format" in config else "")
    raise ValueError(f"quantization_config has {what}, which is not read: there are {', '.join(SCHEMES)}")


def _weights_of(config: Mapping[str, Any]) -> Any:
    """Return the values that tell the formats of compressed-tensors apart."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    return tuple(weights.get(key) for key in ("num_bits", "type", "strategy", "group_size", "symmetric"))
