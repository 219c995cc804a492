"""An export takes its weights from a source: a model in memory, or a checkpoint that is read weight by weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mezzotint.convert.modules import Converted
from mezzotint.recipe import Recipe
from mezzotint.serving.architectures import Mapped, map_names
from mezzotint.serving.codes import is_quantized
from mezzotint.serving.own_model import is_own_model, own_config
from mezzotint.serving.published import PublishedFolder

# These files of a folder are copied beside its weights.
PASSED_ON = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json", "*.jinja")
SCALES = "_mezzotint_scales"  # an attribute of a loaded model: published scales of whole weights, by name


@dataclass(frozen=True)
class WeightSource:
    """A `WeightSource` gives weights by their names in a model."""

    config: Mapping[str, Any]  # of Hugging Face
    weights: list[Mapped]
    load: Callable[[str], Any]  # a parameter by its name: plain or quantized
    dtype: Callable[[str], torch.dtype]
    # This maps each weight that the model multiplies in low precision to its recipe, or to None for that of the region.
    # It is None itself if that is not known, so that the names decide.
    recipes: Mapping[str, Recipe | None] | None = None
    is_on_disk: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)  # a tokenizer and the like, which are passed on
    scales: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    base: PublishedFolder | None = None  # weights that still have its values are written as they are there

    def weight(self, mapped: Mapped) -> Any:
        """Return a weight as it is multiplied: (out, in), or for all experts together (experts, in, out)."""
        parameters = [self.load(key) for key in mapped.keys]
        value = parameters[0] if len(parameters) == 1 else torch.cat(parameters)
        return value if mapped.experts else mapped.take(value)


def source_of_model(model: Any, config: Mapping[str, Any] | None) -> WeightSource:
    """Return the weights of a model of Hugging Face, converted or not, or of one of `TransformerLayer`s."""
    given = dict(config or {})
    if is_own_model(model):
        described = own_config(model, given)
    elif hasattr(model, "config") and hasattr(model.config, "to_dict"):
        described = {**model.config.to_dict(), **given}
        described.pop("quantization_config", None)
    else:
        raise ValueError(
            f"model is a {type(model).__name__}: give a model of Hugging Face, or one with embedding, layers (of "
            "TransformerLayer), norm and head"
        )
    values = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    sharded = [name for name, value in values.items() if hasattr(value, "placements")]
    if sharded:
        raise ValueError(f"{sharded[0]} is a shard of a weight: gather the model in one process, then export it")
    weights = map_names({name: tuple(value.shape) for name, value in values.items()}, described)
    converted = {name: module for name, module in model.named_modules() if isinstance(module, Converted)}
    recipes = None
    if converted:
        recipes = {}
        for name, module in converted.items():
            for own, _ in module.named_parameters(recurse=False):  # type: ignore[attr-defined]
                recipes[f"{name}.{own}"] = getattr(module, "recipe", None)
    return WeightSource(
        described,
        weights,
        lambda key: values[key],
        lambda key: values[key].dtype,
        recipes,
        scales=vars(model).get(SCALES, {}),
    )


def source_of_folder(path: Path) -> WeightSource:
    """Return the weights of a checkpoint of Hugging Face in high precision."""
    folder = PublishedFolder(path)
    if folder.scheme is not None:
        raise ValueError(f"{path} is quantized already ({folder.scheme.name}): give a checkpoint in high precision")
    shapes = {name: folder.reader.spec(name).shape for name in folder.reader.places}
    return WeightSource(
        folder.config,
        map_names(shapes, folder.config),
        folder.reader.read,
        lambda key: folder.reader.spec(key).dtype,
        is_on_disk=True,
        files={file.name: file for pattern in PASSED_ON for file in sorted(path.glob(pattern)) if file.is_file()},
    )


def holds_codes(source: WeightSource, mapped: Mapped) -> bool:
    """Return whether the weight is quantized already, which one from a file never is: it has plain tensors."""
    return not source.is_on_disk and is_quantized(source.load(mapped.keys[0]))
