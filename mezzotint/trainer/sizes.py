"""The sizes of a model: they are given by the name of a published one, by a file, or one by one."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from mezzotint.trainer.console import CommandError
from mezzotint.trainer.options import check_options, flag, is_a, option, words

# These options are one panel of the help.
_size = partial(option, panel="Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A `ModelConfig` holds the sizes of a model, and of the batch that a step sees at once."""

    hidden: int = _size(128, "Set the width of the model.", at_least=1)
    ffn: int = _size(384, "Set the width inside each MLP.", at_least=1)
    layers: int = _size(2, "Set the number of transformer layers.", at_least=1, bits=20)
    heads: int = _size(4, "Set the number of attention heads.", at_least=1)
    kv_heads: int = _size(2, "Set the number of heads that keys and values have.", at_least=1)
    head_dim: int | None = _size(None, "Set the channels of each head; without it they are hidden / heads.", at_least=2)
    vocab: int = _size(256, "Set the number of different tokens.", at_least=1)
    sequence: int = _size(64, "Set the number of tokens in a sequence.", at_least=1)
    batch: int = _size(8, "Set the number of sequences in a microbatch.", at_least=1)
    rope_base: float = _size(10000.0, "Set the base of the rotary position embedding.", at_least=1.0)
    tied: bool = _size(False, "Use the weight of the embedding in the head, too.")
    experts: int = _size(
        0, "Give each layer this many MLPs, of which a token uses --topk; 0 gives it one MLP for all.", at_least=0
    )
    topk: int = _size(2, "Send each token to this many experts.", at_least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.head_dim is None and self.hidden % self.heads:
            raise CommandError(f"hidden is {self.hidden}: give a multiple of heads={self.heads}, or head_dim")
        if self.channels % 2:
            raise CommandError(f"a head has {self.channels} channels: rotary positions turn pairs, give an even number")
        if self.heads % self.kv_heads:
            raise CommandError(f"kv_heads is {self.kv_heads}: give a divisor of heads={self.heads}")
        if self.experts and self.topk > self.experts:
            raise CommandError(f"topk is {self.topk}: give at most experts={self.experts}")

    @property
    def channels(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim


_LLAMA3 = ModelConfig(vocab=128256, rope_base=500000.0, sequence=8192, batch=1, kv_heads=8, heads=32, hidden=4096)
MODEL = "tiny"  # the default
MODELS = {
    MODEL: ModelConfig(),
    "llama3.2-1b": replace(_LLAMA3, hidden=2048, ffn=8192, layers=16, tied=True),
    "llama3.2-3b": replace(_LLAMA3, hidden=3072, ffn=8192, layers=28, heads=24, tied=True),
    "llama3-8b": replace(_LLAMA3, ffn=14336, layers=32),
    "llama3-70b": replace(_LLAMA3, hidden=8192, ffn=28672, layers=80, heads=64),
    "llama3-405b": replace(_LLAMA3, hidden=16384, ffn=53248, layers=126, heads=128),
}

# These are the names that other projects give to these fields.
ALIASES = {
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "intermediate_size": "ffn",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_gqa_groups": "kv_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab",
    "seq": "sequence",
    "seq_length": "sequence",
    "batch_size": "batch",
    "micro_batch_size": "batch",
    "rope_theta": "rope_base",
    "tie_word_embeddings": "tied",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "num_experts_per_tok": "topk",
}
# Hugging Face's configurations of these types describe this model; they have many keys besides sizes.
LLAMA_TYPES = ("llama", "mistral")


# A file or the command line must give these sizes. The others follow from them, or have a usual value.
NEEDED = ("hidden", "ffn", "layers", "heads", "vocab", "sequence", "batch")


def find_model(name: str, given: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the sizes of a name in `MODELS`, or of a JSON or TOML file, which `given`
    completes: no needed size is guessed."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"there is no model {name!r}: give one of {', '.join(MODELS)}, or a .json or .toml file")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read: {error}; give a JSON file, or TOML in a .toml file") from None
    if not isinstance(values, dict):
        raise CommandError(f"{path} holds no table of sizes: give hidden, ffn, layers, heads, … by name")
    return _as_config(values, path, given or {})


def _as_config(values: dict[str, Any], path: Path, given: Mapping[str, Any]) -> ModelConfig:
    known = {entry.name: entry.type for entry in fields(ModelConfig)}
    is_foreign = "model_type" in values
    if is_foreign and values["model_type"] not in LLAMA_TYPES:
        raise CommandError(f"{path} is of a {values['model_type']!r}: this builds {' and '.join(LLAMA_TYPES)} only")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name not in known:
            if is_foreign:
                continue
            raise CommandError(f"{path} has {key!r}, which is no size of a model: give {', '.join(known)}")
        if not is_a(value, known[name]):
            raise CommandError(f"{path} has {key} = {value!r}: give {words(known[name])}")
        if name in found and found[name] != value:
            raise CommandError(f"{path} has {key} = {value!r} and {name} = {found[name]!r}: give one of them")
        found[name] = value
    found |= {name: given[name] for name in known if name in given}
    missing = [name for name in NEEDED if name not in found]
    if missing:
        options = " ".join(f"{flag(name)} …" for name in missing)
        raise CommandError(f"{path} does not say {', '.join(missing)}: add them, or give {options}")
    found.setdefault("kv_heads", found["heads"])  # without grouped heads unless they are mentioned
    return ModelConfig(**found)
