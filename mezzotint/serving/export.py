"""`export` writes a model, or a checkpoint, as a folder in a published format.

Weights that are quantized parameters are written as they are. Others are quantized by their recipe's quantizer of
weights, on the CPU, whose codes equal those of a GPU: what is served is what was trained. One weight is in memory at a
time, and the folder appears when it is complete.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzotint.files import describe_files, remove, sync, write_json
from mezzotint.notebook import html_table
from mezzotint.recipe import Recipe, check_recipe
from mezzotint.serving.architectures import GPT_OSS, Mapped, PublishedPart
from mezzotint.serving.codes import Codes, check_plain_dtype, codes_of, is_quantized, tensor_of
from mezzotint.serving.published import MODEL_CONFIG, Manifest, PublishedFolder, options_of, write_manifest
from mezzotint.serving.schemes import HF_QUANT_CONFIG, SCHEMES, Scheme, find_scheme
from mezzotint.serving.shards import ShardWriter, StoredSpec
from mezzotint.serving.source import WeightSource, holds_codes, source_of_folder, source_of_model
from mezzotint.tensor.quantizer import Quantizer

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportReport:
    """An `ExportReport` says what an export wrote."""

    path: Path
    format: str
    quantized: tuple[str, ...]  # weights in codes, by their published names
    kept: tuple[str, ...]  # other tensors
    as_they_were: tuple[str, ...]  # of the quantized ones, those that were quantized parameters
    requantized: tuple[str, ...]  # of the quantized ones, those with other blocks than were trained

    def __str__(self) -> str:
        again = f", {len(self.requantized)} of them in other blocks than were trained" if self.requantized else ""
        counts = f"{len(self.quantized)} weights are quantized{again}, {len(self.kept)} tensors are not"
        return f"{self.path}: {self.format}; {counts}"

    def _repr_html_(self) -> str:
        """Return the counts as a table for a notebook; the tensors themselves may be thousands."""
        parts = {
            "quantized": self.quantized,
            "of these, as they were": self.as_they_were,
            "of these, in other blocks than were trained": self.requantized,
            "not quantized": self.kept,
        }
        rows = [(name, str(len(tensors))) for name, tensors in parts.items()]
        return html_table(rows, note=f"{self.path}: {self.format}")


@dataclass(frozen=True)
class PlannedWeight:
    """A `PlannedWeight` is one weight of an export: its quantizer (None to keep it plain), and whether its
    parts are quantized separately."""

    mapped: Mapped
    quantizer: Quantizer | None
    is_cut: bool = False


def export(
    model: nn.Module | str | Path,
    format: str,
    path: str | Path,
    *,
    recipe: Recipe | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    requantize: bool = False,
    base: str | Path | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write a model in a published format into a folder, for programs that serve it, and return a report.

    Quantized parameters are written as they are. Other weights are quantized by `recipe` or, in a converted model, by
    its own; without any, by the format's usual recipe.

    Args:
        model: A model of Hugging Face, converted or not; one of `TransformerLayer`s with embedding, layers, norm and
            head; or the folder of a checkpoint of Hugging Face in high precision.
        format: A name of `mezzotint.serving.schemes`, such as "hf-fp8"; "compressed-tensors" means the one of its
            formats in which the recipe trains.
        path: The folder that is made.
        recipe: The recipe that quantizes weights which are in high precision, or None.
        config: Entries that complete config.json, or None. A model of `TransformerLayer`s needs `rope_theta` and
            `max_position_embeddings`.
        dtype: What tensors that are not quantized are cast to. None keeps theirs.
        requantize: Whether other blocks than those of training are allowed, where rows of one trained weight are
            published apart and cut its tiles. The default is False.
        base: The folder that the model was read from, or None: weights in high precision that still have the values of
            its codes are written as they are there.
        overwrite: Whether a folder that exists is replaced. The default is False.
        max_shard_bytes: How large one file of weights may become.

    Returns:
        An `ExportReport`, which prints what was written.

    Raises:
        ValueError: If the folder exists, or the format does not fit the model or the recipe.
        TypeError: If `recipe` is no recipe.

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
        >>> report.format, len(report.quantized)
        ('compressed-tensors-mxfp8', 7)
    """
    source = source_of_model(model, config) if isinstance(model, nn.Module) else source_of_folder(Path(model))
    if recipe is not None:
        check_recipe(recipe)
    if base is not None:
        source = replace(source, base=PublishedFolder(Path(base)))
    return export_source(
        source,
        format,
        Path(path),
        recipe,
        dtype=dtype,
        requantize=requantize,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )


def export_source(
    source: WeightSource,
    format: str,
    path: Path,
    recipe: Recipe | None,
    *,
    dtype: torch.dtype | None = None,
    requantize: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write weights from any source, as `export` does; `progress` is called with how many of
    how many weights are written."""
    check_plain_dtype(dtype)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: give overwrite=True to replace it, or another path")
    scheme = find_scheme(format, recipe or _own_recipe(source))
    if source.base is not None and source.base.scheme is not scheme:
        raise ValueError(f"base is not in {scheme.name}: give the folder that the model was read from, or None")
    planned = plan_weights(source, scheme, recipe, requantize=requantize)
    aside = path.with_name(f".{path.name}.writing")
    remove(aside)
    try:
        aside.mkdir(parents=True)
        report = _write(source, scheme, planned, aside, dtype, max_shard_bytes, progress)
        _put(aside, path)
    except BaseException:
        remove(aside)
        raise
    return replace(report, path=path)


def _put(aside: Path, path: Path) -> None:
    """Rename a folder to `path`; what had that name before is removed, and restored if the renaming fails."""
    gone = path.with_name(f".{path.name}.removing")
    remove(gone)
    is_there = path.exists()
    if is_there:
        path.rename(gone)
    try:
        aside.rename(path)
    except OSError:
        if is_there:
            gone.rename(path)
        raise
    sync(path.parent)
    remove(gone)


def _own_recipe(source: WeightSource) -> Recipe | None:
    return next((each for each in (source.recipes or {}).values() if each is not None), None)


def plan_weights(
    source: WeightSource, scheme: Scheme, recipe: Recipe | None, *, requantize: bool = False
) -> list[PlannedWeight]:
    """Return what is done to each weight."""
    is_gpt_oss = source.config.get("model_type") == GPT_OSS
    if scheme.is_for_experts != is_gpt_oss:
        fitting = [each for each in SCHEMES.values() if each.is_for_experts == is_gpt_oss]
        other = next((each for each in fitting if each.held_by is scheme.held_by), fitting[0])
        raise ValueError(
            f"format is {scheme.name!r}, and the model a {source.config.get('model_type')}: give {other.name!r}"
        )
    planned = []
    for mapped in source.weights:
        quantizer = _quantizer_for(source, mapped, scheme, recipe)
        is_cut = quantizer is not None and _is_cut(mapped, scheme)
        if is_cut and (not requantize or holds_codes(source, mapped)):
            names = ", ".join(part.name for part in mapped.parts)
            raise ValueError(
                f"{mapped.keys[0]} is quantized in {scheme.block[0]}x{scheme.block[1]} tiles, which {names} cut: give "
                "requantize=True to quantize those each alone, to other codes than were trained, or a format whose "
                "scales are of rows"
            )
        planned.append(PlannedWeight(mapped, quantizer, is_cut))
    return planned


def _quantizer_for(source: WeightSource, mapped: Mapped, scheme: Scheme, recipe: Recipe | None) -> Quantizer | None:
    name = mapped.keys[0]
    if holds_codes(source, mapped):
        held: Any = source.load(name)
        if not isinstance(held, scheme.held_by) or held._quantizer is None or not scheme.can_hold(held._quantizer):
            raise ValueError(
                f"{name} is a {type(held).__name__} that {scheme.name} cannot hold as it is: give the format that "
                "it is in, or dequantize it first"
            )
        quantizer: Quantizer = held._quantizer
        return quantizer
    if not mapped.is_linear or (scheme.is_for_experts and not mapped.experts):
        return None
    own: Recipe | None = None
    if source.recipes is not None:
        if name not in source.recipes:
            return None
        own = source.recipes[name]
    shapes = [(len(part.rows) if part.rows is not None else mapped.shape[0], mapped.shape[1]) for part in mapped.parts]
    if not all(scheme.fits(shape) for shape in shapes):
        return None
    return scheme.quantizer_of(recipe or own or scheme.recipe(), name.removesuffix(".weight"))


def _is_cut(mapped: Mapped, scheme: Scheme) -> bool:
    """Return whether a published part has some rows of a tile, and not all."""
    if scheme.block[0] <= 1 or len(mapped.parts) == 1:
        return False
    for part in mapped.parts:
        assert part.rows is not None
        tiles = part.rows // scheme.block[0]
        if bool((torch.bincount(tiles)[tiles.unique()] != scheme.block[0]).any()):
            return True
    return False


def published_weight(
    source: WeightSource, planned: PlannedWeight, scheme: Scheme
) -> Iterator[tuple[PublishedPart, dict[str, Any]]]:
    """Yield the parts of a quantized weight, each with its tensors by suffix and, for NVFP4, its amax as "amax"."""
    mapped, quantizer = planned.mapped, planned.quantizer
    assert quantizer is not None
    with torch.no_grad():
        weight = source.weight(mapped)
        if source.base is not None and _is_untouched(source.base, mapped, weight, quantizer):
            for part in mapped.parts:
                tensors = {**source.base.tensors(part.name)}
                codes_there = source.base.codes(part.name, quantizer)[0]
                yield part, _with_amax(tensors, codes_there)
            return
        if mapped.experts:
            yield mapped.parts[0], _stack([_codes(expert.t(), quantizer) for expert in weight], scheme)
            return
        codes = None if planned.is_cut else _codes(weight, quantizer)
        for part in mapped.parts:
            if codes is None:
                assert part.rows is not None
                own = _codes(weight[part.rows], quantizer)
            else:
                own = codes if part.rows is None else codes.take_rows(part.rows)
            yield part, _with_amax(scheme.publish(own, source.scales.get(part.name)), own)


def _with_amax(tensors: dict[str, Any], codes: Codes) -> dict[str, Any]:
    amax = codes.buffers.get("_amax_rowwise")
    return tensors if amax is None else {**tensors, "amax": float(amax)}


def _is_untouched(base: PublishedFolder, mapped: Mapped, weight: Any, quantizer: Quantizer) -> bool:
    """Return whether a plain weight has, bit by bit, the values that another checkpoint has in codes."""
    if is_quantized(weight) or not all(base.is_quantized(part.name) for part in mapped.parts):
        return False
    rowwise = quantizer.with_usage(columnwise=False)
    for part in mapped.parts:
        values = [tensor_of(one, rowwise, weight.dtype).dequantize() for one in base.codes(part.name, quantizer)]
        there = torch.stack([value.t() for value in values]) if mapped.experts else values[0]
        here = weight if part.rows is None else weight[part.rows]
        if there.shape != here.shape or not torch.equal(there, here.cpu()):
            return False
    return True


def _codes(weight: Any, quantizer: Quantizer) -> Codes:
    weight = weight.detach().cpu()
    if not is_quantized(weight):
        weight = quantizer.with_usage(rowwise=True, columnwise=False).quantize(weight.contiguous())
    return codes_of(weight)


def _stack(codes: list[Codes], scheme: Scheme) -> dict[str, Any]:
    """Return the tensors of all experts: blocks (experts, out, in/32, 16) and scales (experts, out, in/32)."""
    each = [scheme.publish(one) for one in codes]
    scales = torch.stack([one["scales"] for one in each])
    blocks = torch.stack([one["blocks"] for one in each])
    return {"blocks": blocks.view(*scales.shape, -1), "scales": scales}


def plain_parts(mapped: Mapped, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are published for a weight that is not quantized, with their full names."""
    for part in mapped.parts:
        name = f"{part.name}.weight" if mapped.is_linear and not mapped.experts else part.name
        yield name, weight if part.rows is None else weight[part.rows]


def tensor_specs(
    mapped: Mapped, quantizer: Quantizer | None, scheme: Scheme, dtype: torch.dtype
) -> dict[str, StoredSpec]:
    """Return the tensors that a weight is published as; without a quantizer, plain ones of this dtype."""
    made = {}
    for part in mapped.parts:
        shape = mapped.shape if part.rows is None else (part.rows.numel(), *mapped.shape[1:])
        if quantizer is None:
            name = f"{part.name}.weight" if mapped.is_linear and not mapped.experts else part.name
            made[name] = StoredSpec(dtype, (mapped.experts, *shape[::-1]) if mapped.experts else tuple(shape))
            continue
        for suffix, spec in scheme.specs(quantizer, (shape[0], shape[1])).items():
            size = spec.shape
            if mapped.experts:
                blocks = shape[1] // scheme.block[1]
                inner = (blocks, scheme.block[1] // 2) if suffix == "blocks" else (blocks,)
                size = (mapped.experts, shape[0], *inner)
            made[scheme.tensor_name(part.name, suffix)] = StoredSpec(spec.dtype, size)
    return made


def _announce(
    source: WeightSource, planned: PlannedWeight, scheme: Scheme, dtype: torch.dtype | None
) -> dict[str, StoredSpec]:
    """Return the tensors that a weight will be written as; scales that are written again may have other dtypes."""
    mapped = planned.mapped
    is_known = source.base is not None or any(part.name in source.scales for part in mapped.parts)
    if planned.quantizer is None or not is_known:
        return tensor_specs(mapped, planned.quantizer, scheme, dtype or source.dtype(mapped.keys[0]))
    made = {}
    for part, tensors in published_weight(source, planned, scheme):
        for suffix, tensor in tensors.items():
            if suffix != "amax":
                made[scheme.tensor_name(part.name, suffix)] = StoredSpec(tensor.dtype, tuple(tensor.shape))
    return made


def _write(
    source: WeightSource,
    scheme: Scheme,
    planned: list[PlannedWeight],
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> ExportReport:
    quantized: list[str] = []
    kept: list[str] = []
    as_they_were: list[str] = []
    requantized: list[str] = []
    amax: dict[str, float] = {}
    with ShardWriter(folder, [_announce(source, each, scheme, dtype) for each in planned], max_shard_bytes) as writer:
        for number, each in enumerate(planned, 1):
            if each.quantizer is None:
                with torch.no_grad():
                    for name, value in plain_parts(each.mapped, source.weight(each.mapped)):
                        writer.write(name, value.to(dtype or value.dtype))
                        kept.append(name)
            else:
                for part, tensors in published_weight(source, each, scheme):
                    if "amax" in tensors:
                        amax[part.name] = tensors.pop("amax")
                    for suffix, tensor in tensors.items():
                        writer.write(scheme.tensor_name(part.name, suffix), tensor)
                    quantized.append(part.name)
                    as_they_were += [part.name] if holds_codes(source, each.mapped) else []
                    requantized += [part.name] if each.is_cut else []
            if progress is not None:
                progress(number, len(planned))
        writer.finish()
        names = writer.file_names
    _write_config(source, scheme, planned, folder, dtype)
    options = [options_of(each.quantizer) for each in planned if each.quantizer is not None]
    if not options:
        raise ValueError(f"{scheme.name} quantizes no weight of this model: their sizes do not fit its blocks")
    if any(each != options[0] for each in options):
        raise ValueError("weights are quantized with several options: an export has one; give recipe= one for all")
    files = describe_files(folder, names)
    write_manifest(folder, Manifest(scheme.name, options[0], tuple(requantized), amax, files))
    return ExportReport(folder, scheme.name, tuple(quantized), tuple(kept), tuple(as_they_were), tuple(requantized))


def _write_config(
    source: WeightSource, scheme: Scheme, planned: list[PlannedWeight], folder: Path, dtype: torch.dtype | None
) -> None:
    """Write config.json, ModelOpt's own file if that is the format, and copy the tokenizer."""
    plain = [each.mapped for each in planned if each.quantizer is None]
    kept = []
    for mapped in plain:
        if len(mapped.shape) == 2:
            names = [part.name.removesuffix(".weight") for part in mapped.parts]
            kept += [name for name in names if not name.endswith("embed_tokens")]
    if source.config.get("tie_word_embeddings"):
        kept.append("lm_head")
    floating = dtype or source.dtype(plain[0].keys[0]) if plain else torch.bfloat16
    config = dict(source.config)
    config.pop("torch_dtype", None)
    config["dtype"] = str(floating).removeprefix("torch.")
    config["quantization_config"] = scheme.config(kept)
    write_json(folder / MODEL_CONFIG, config)
    if config["quantization_config"]["quant_method"] == "modelopt":
        described = config["quantization_config"]
        about = {key: described[key] for key in ("quant_algo", "kv_cache_quant_algo", "group_size")}
        said = {"producer": {"name": "mezzotint"}, "quantization": {**about, "exclude_modules": kept}}
        write_json(folder / HF_QUANT_CONFIG, said)
    for name, file in source.files.items():
        shutil.copyfile(file, folder / name)
