"""`load_quantized` reads a checkpoint in a published format as a model to train.

Codes become quantized parameters byte by byte, under a recipe that multiplies in their format; or their values become
weights in high precision. Either way `export` writes them again.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzotint.constants import HIGH_PRECISION
from mezzotint.convert.model import convert
from mezzotint.layer.parameters import replace_parameter
from mezzotint.recipe import Recipe, check_recipe
from mezzotint.serving.architectures import Mapped, check_model_type, map_names
from mezzotint.serving.codes import Codes, check_plain_dtype, join_codes, tensor_of
from mezzotint.serving.export import tensor_specs
from mezzotint.serving.own_model import is_own_model
from mezzotint.serving.published import PublishedFolder
from mezzotint.serving.schemes import check_spec
from mezzotint.serving.shards import StoredSpec
from mezzotint.serving.source import SCALES
from mezzotint.tensor.quantizer import Quantizer

# These say how a server quantizes activations. They are not trained, and here activations are quantized as they come.
OF_INPUTS = (".input_scale", ".input_global_scale")


def load_quantized(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    recipe: Recipe | None = None,
    high_precision: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return a model with the weights of a checkpoint in a published format.

    Weights that are published in codes become quantized parameters with the same bytes, and a model of Hugging Face is
    converted to run under a recipe. The copies that backward reads are made from these bytes. Experts that are one
    parameter of a model stay plain.

    Args:
        path: The folder of the checkpoint.
        model: The model that receives them: a model of Hugging Face, or one of `TransformerLayer`s. None makes the one
            that config.json describes, with transformers.
        recipe: The recipe under which the model runs, or None for the usual one of the format.
        high_precision: Whether plain weights are made instead, to be trained as any other; then nothing is converted.
            The default is False.
        dtype: The dtype of the weights' values, or None for what config.json says.

    Returns:
        The model.

    Raises:
        ValueError: If the checkpoint is not quantized, or does not fit the model.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "device": "cpu"}
        ...         self.embedding = torch.nn.Embedding(64, 128)
        ...         self.layers = torch.nn.ModuleList([mz.TransformerLayer(128, 256, 4, **options)])
        ...         self.norm = mz.RMSNorm(128, device="cpu")
        ...         self.head = mz.Linear(128, 64, bias=False, device="cpu")
        >>> config = {"rope_theta": 10000.0, "max_position_embeddings": 256}
        >>> report = mz.export(Model(), "compressed-tensors-mxfp8", "served", config=config)
        >>> model = mz.load_quantized("served", Model(), high_precision=True)
        >>> model.head.weight.shape
        torch.Size([64, 128])
    """
    folder = PublishedFolder(Path(path))
    if folder.scheme is None:
        raise ValueError(f"{path} is not quantized: load it with transformers, then mezzotint.convert")
    if recipe is not None:
        check_recipe(recipe)
    check_plain_dtype(dtype)
    dtype = _dtype_of(folder.config) if dtype is None else dtype
    check_model_type(folder.config)
    made = _make_model(folder.config, dtype) if model is None else model
    values = {name: value for name, value in made.state_dict().items() if not name.endswith("_extra_state")}
    weights = map_names({name: tuple(value.shape) for name, value in values.items()}, folder.config)
    quantizer = folder.quantizer()
    if recipe is not None:
        quantizer = folder.scheme.quantizer_of(recipe, "")
    _check_fit(folder, weights, quantizer)
    if not high_precision and not is_own_model(made):
        coded = [mapped.keys[0] for mapped in weights if folder.is_quantized(mapped.parts[0].name)]
        names = {key.rpartition(".")[0] for key in coded}  # names of layers, and of modules with experts
        convert(made, recipe or folder.scheme.recipe(), filter=lambda module, name: name in names)
    with torch.no_grad():
        _fill(made, folder, weights, quantizer, dtype, high_precision)
    return made


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if found not in HIGH_PRECISION:
        raise ValueError(f"config.json says dtype {name!r}: give dtype=torch.bfloat16, or another")
    return found


def _make_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model of transformers that a config.json describes, with weights that are to be replaced."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        raise ValueError("transformers is not installed: pip install transformers, or give model=") from None
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype", "torch_dtype")}
    described = transformers.AutoConfig.for_model(**plain)
    return transformers.AutoModelForCausalLM.from_config(described, dtype=dtype)


def _check_fit(folder: PublishedFolder, weights: list[Mapped], quantizer: Quantizer) -> None:
    """Raise an error if a checkpoint has other weights than the model, before any is replaced."""
    assert folder.scheme is not None
    wanted: dict[str, StoredSpec] = {}
    for mapped in weights:
        own = quantizer if folder.is_quantized(mapped.parts[0].name) else None
        specs = tensor_specs(mapped, own, folder.scheme, torch.float32)
        missing = sorted(specs.keys() - folder.reader.places.keys())
        if missing:
            raise ValueError(f"{folder.path} has no {', '.join(missing[:3])}: give the checkpoint of this model")
        for name, spec in specs.items():
            try:
                check_spec(name, folder.reader.spec(name), spec)
            except ValueError as error:
                raise ValueError(f"{folder.path} does not fit the model ({error}): give its own model") from None
        wanted |= specs
    more = sorted(name for name in folder.reader.places.keys() - wanted.keys() if not name.endswith(OF_INPUTS))
    if more:
        names = ", ".join(more[:3])
        raise ValueError(f"{folder.path} has {names}, for which the model has no place: give its own model")


def _fill(
    model: Any,
    folder: PublishedFolder,
    weights: list[Mapped],
    quantizer: Quantizer,
    dtype: torch.dtype,
    high_precision: bool,
) -> None:
    scales: dict[str, Mapping[str, torch.Tensor]] = {}
    for mapped in weights:
        parameters = [_parameter(model, key) for key in mapped.keys]
        if not folder.is_quantized(mapped.parts[0].name):
            _copy(mapped, parameters, _plain(folder, mapped))
            continue
        parts = [folder.codes(part.name, quantizer) for part in mapped.parts]
        plain = high_precision or mapped.experts or mapped.expert is not None or len(parameters) > 1
        if plain:
            rowwise = quantizer.with_usage(columnwise=False)
            each = [[tensor_of(one, rowwise, dtype).dequantize() for one in codes] for codes in parts]
            values = [torch.stack([one.t() for one in one_of]) if mapped.experts else one_of[0] for one_of in each]
            _copy(mapped, parameters, values)
        else:
            _check_shape(mapped, [codes[0].shape for codes in parts])
            made = tensor_of(_join(mapped, [codes[0] for codes in parts]), quantizer, dtype)
            owner, _, name = mapped.keys[0].rpartition(".")
            replace_parameter(model.get_submodule(owner), name, made.to(parameters[0].device))
        for part in mapped.parts:
            known = _scales_to_keep(folder, part.name)
            if known:
                scales[part.name] = known
    if scales:
        vars(model)[SCALES] = scales


def _scales_to_keep(folder: PublishedFolder, name: str) -> dict[str, torch.Tensor]:
    """Return the scales that the package cannot represent exactly: rounded ones of whole weights,
    and those in less than FP32."""
    scheme = folder.scheme
    assert scheme is not None
    kept = {}
    for suffix, buffer, dtype in zip(scheme.suffixes, scheme.buffers, scheme.dtypes, strict=True):
        each = folder.tensor_names(name)[suffix]
        if dtype == torch.float32 and (buffer == "_amax_rowwise" or folder.reader.spec(each).dtype != dtype):
            kept[suffix] = folder.reader.read(each)
    return kept


def _parameter(model: nn.Module, key: str) -> Any:
    owner, _, name = key.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _plain(folder: PublishedFolder, mapped: Mapped) -> list[torch.Tensor]:
    is_named = mapped.is_linear and not mapped.experts
    return [folder.reader.read(f"{part.name}.weight" if is_named else part.name) for part in mapped.parts]


def _join(mapped: Mapped, parts: list[Codes]) -> Codes:
    rows = [part.rows for part in mapped.parts if part.rows is not None]
    try:
        return join_codes(parts, rows) if rows else parts[0]
    except ValueError as error:
        raise ValueError(
            f"{mapped.keys[0]} cannot be put together ({error}): give high_precision=True, or a model of Hugging Face"
        ) from None


def _copy(mapped: Mapped, parameters: list[Any], parts: list[torch.Tensor]) -> None:
    """Write the values of published parts into a parameter, or into several that lie one below the other."""
    if mapped.experts:
        parameters[0].copy_(parts[0])
        return
    _check_shape(mapped, [tuple(part.shape) for part in parts])
    whole = parts[0]
    if mapped.parts[0].rows is not None:
        whole = torch.empty(mapped.shape, dtype=parts[0].dtype)
        for part, value in zip(mapped.parts, parts, strict=True):
            whole[part.rows] = value
    if mapped.expert is not None:
        parameters[0].data[mapped.expert].copy_(whole)
        return
    for parameter, value in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data.copy_(value)


def _check_shape(mapped: Mapped, found: list[tuple[int, ...]]) -> None:
    for part, shape in zip(mapped.parts, found, strict=True):
        wanted = mapped.shape if part.rows is None else (part.rows.numel(), *mapped.shape[1:])
        if tuple(shape) != tuple(wanted):
            raise ValueError(f"{part.name} has shape {tuple(shape)}, and the model {tuple(wanted)}: give its own model")
