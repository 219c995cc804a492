"""This module reads a checkpoint in a published format, as it lies in its folder.

    config.json             the architecture and, of a quantized one, its quantization_config
    hf_quant_config.json    the same of ModelOpt
    *.safetensors           weights (`shards.py`)
    mezzotint.json          of one that was exported here: how weights were quantized, and a hash of each such file

The last one belongs to no format, and other programs do not read it. With it an export can be verified bit by bit, and
read again without the rounding of NVFP4's scales.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mezzotint.files import FileEntry, check_files, write_json
from mezzotint.serving.codes import Codes
from mezzotint.serving.schemes import HF_QUANT_CONFIG, SCHEMES, Scheme, scheme_of
from mezzotint.serving.shards import ShardReader
from mezzotint.tensor.quantizer import Quantizer

MODEL_CONFIG, MANIFEST = "config.json", "mezzotint.json"


@dataclass(frozen=True)
class Manifest:
    """A `Manifest` is what an export says of itself."""

    format: str
    quantizer: Mapping[str, Any]  # options of what quantized the weights
    requantized: Sequence[str] = ()  # weights that were quantized in parts, not as the whole that was trained
    amax: Mapping[str, float] = field(default_factory=dict)  # of NVFP4's weights, by name
    files: Mapping[str, FileEntry] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of an export."""
    write_json(folder / MANIFEST, asdict(manifest))


def options_of(quantizer: Any) -> dict[str, Any]:
    """Return the options that tell a quantizer from others of its class."""
    plain = {name: value for name, value in vars(quantizer).items() if not name.startswith("_")}
    made = {name: value for name, value in plain.items() if type(value) in (bool, int, float, str)}
    return {name: value for name, value in made.items() if not name.endswith("_usage")}


def with_options(quantizer: Quantizer, options: Mapping[str, Any]) -> Quantizer:
    """Return a quantizer with these options, or raise a ValueError if it has no option of that name and type."""
    made: Any = quantizer.copy()
    own = options_of(quantizer)
    for name, value in options.items():
        if name not in own or type(value) is not type(own[name]):
            raise ValueError(f"{MANIFEST} has {name} = {value!r}, which {type(quantizer).__name__} has not")
        setattr(made, name, value)
    return made


class PublishedFolder:
    """A `PublishedFolder` is read tensor by tensor; what is wrong with it raises a ValueError that says what."""

    def __init__(self, path: Path, *, check_hashes: bool = True) -> None:
        self.path = path
        self.reader = ShardReader(path)
        self.config = read_json_object(path / MODEL_CONFIG)
        self.manifest = self._read_manifest()
        described = self.config.get("quantization_config")
        if described is None and (path / HF_QUANT_CONFIG).exists():
            inner = read_json_object(path / HF_QUANT_CONFIG).get("quantization", {})
            described = {"quant_method": "modelopt", **inner}
        if described is not None and not isinstance(described, dict):
            raise ValueError(f"{path / MODEL_CONFIG} has a quantization_config that is no object")
        self.scheme: Scheme | None = None if described is None else scheme_of(described)
        if self.manifest is not None:
            if self.scheme is None or self.manifest.format != self.scheme.name:
                raise ValueError(f"{path / MANIFEST} says {self.manifest.format}, and {MODEL_CONFIG} another format")
            if check_hashes:
                self._check_hashes(self.manifest)

    def _read_manifest(self) -> Manifest | None:
        if not (self.path / MANIFEST).exists():
            return None
        values = read_json_object(self.path / MANIFEST)
        try:
            files = {str(name): FileEntry(**entry) for name, entry in values.pop("files").items()}
            made = Manifest(**values, files=files)
            amax = {str(name): float(value) for name, value in made.amax.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.path / MANIFEST} is not as it was written ({error}): remove it") from None
        if made.format not in SCHEMES or any(Path(name).name != name for name in files):
            raise ValueError(f"{self.path / MANIFEST} is not as it was written: remove it")
        return Manifest(made.format, dict(made.quantizer), tuple(made.requantized), amax, files)

    def _check_hashes(self, manifest: Manifest) -> None:
        try:
            check_files(self.path, manifest.files, manifest.files)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is damaged ({error}): copy it again or, if another program wrote it, remove {MANIFEST}"
            ) from None

    def quantizer(self) -> Quantizer:
        """Return the quantizer of the weights if it is known, else the default one of this format."""
        assert self.scheme is not None
        made = self.scheme.default_quantizer()
        return made if self.manifest is None else with_options(made, self.manifest.quantizer)

    def is_quantized(self, name: str) -> bool:
        """Return whether the weight of this name, without ".weight", is stored in codes."""
        return self.scheme is not None and all(each in self.reader.places for each in self.tensor_names(name).values())

    def tensor_names(self, name: str) -> dict[str, str]:
        """Return the names of a quantized weight's tensors by suffix."""
        assert self.scheme is not None
        return {suffix: self.scheme.tensor_name(name, suffix) for suffix in self.scheme.suffixes}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a quantized weight by suffix."""
        return {suffix: self.reader.read(each) for suffix, each in self.tensor_names(name).items()}

    def codes(self, name: str, quantizer: Quantizer) -> list[Codes]:
        """Return the codes of a quantized weight: one matrix, or one for each expert."""
        assert self.scheme is not None
        tensors = self.tensors(name)
        amax = None if self.manifest is None else self.manifest.amax.get(name)
        try:
            each = list(_unstack(tensors)) if self.scheme.is_for_experts else [tensors]
            return [self.scheme.codes(one, quantizer, amax) for one in each]
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{name} in {self.path} does not fit together ({error}): copy it again") from None


def _unstack(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the blocks [out, in/2] and scales [out, in/32] of each expert."""
    blocks, scales = tensors["blocks"], tensors["scales"]
    if blocks.dim() != 4 or blocks.shape[:3] != scales.shape:
        raise ValueError(f"blocks have shape {tuple(blocks.shape)}, scales {tuple(scales.shape)}")
    for one, scale in zip(blocks, scales, strict=True):
        yield {"blocks": one.flatten(1), "scales": scale}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, or raise a ValueError if it holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path} cannot be read: give the folder of a checkpoint of Hugging Face") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): copy it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object: copy it again")
    return values
