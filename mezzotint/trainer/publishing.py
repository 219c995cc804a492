"""This module makes runs and checkpoints a source of weights to export and to verify, as
Hugging Face's checkpoints are.

Weights are read one by one, and nothing but weights is read.
"""

from pathlib import Path

from mezzotint.recipe import Recipe
from mezzotint.serving.architectures import map_names
from mezzotint.serving.own_model import own_config
from mezzotint.serving.shards import ShardReader
from mezzotint.serving.source import WeightSource, source_of_folder
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.local_checkpoint import WEIGHTS, find_checkpoints, open_checkpoint
from mezzotint.trainer.manifest import ABOUT, ONE
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.runs import CONFIG
from mezzotint.trainer.settings import RunConfig


def source_of(path: Path) -> tuple[WeightSource, Recipe | None]:
    """Return the weights at `path`, and the recipe that they were trained under if it is known.

    `path` is a run, whose newest checkpoint is taken, a checkpoint, or a folder of Hugging Face's.
    """
    if not path.is_dir():
        raise CommandError(f"{path} is no folder: give a run, a checkpoint, or a checkpoint of Hugging Face")
    if (path / ABOUT).exists():
        return _source_of_checkpoint(path)
    if (path / "checkpoints").is_dir():
        found = find_checkpoints(path)
        if not found:
            raise CommandError(f"{path} has no checkpoint yet: wait for one, or train with --checkpoint-every 100")
        return _source_of_checkpoint(found[-1])
    if not (path / CONFIG).exists():
        raise CommandError(f"{path} has no {CONFIG}: give a run, a checkpoint, or a checkpoint of Hugging Face")
    return source_of_folder(path), None


def _source_of_checkpoint(path: Path) -> tuple[WeightSource, Recipe | None]:
    about = open_checkpoint(path)
    if about.kind != ONE:
        raise CommandError(f"{path} was written by several ranks: go on with it in one process first (--resume)")
    try:
        config = RunConfig.from_json(about.config)
    except (KeyError, TypeError, CommandError) as error:
        raise CommandError(f"{path} has no configuration of a run ({error}): give another checkpoint") from None
    model = LanguageModel(config.model, device="meta")
    reader = ShardReader(path / WEIGHTS)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    for name, shape in shapes.items():
        if reader.spec(name).shape != shape:
            raise CommandError(f"{name} in {path} has shape {reader.spec(name).shape}, not {shape}: give another one")
    given = {"rope_theta": config.model.rope_base, "max_position_embeddings": config.model.sequence}
    described = own_config(model, given)
    tokenizer = {} if config.train.tokenizer is None else {"tokenizer.json": Path(config.train.tokenizer)}
    source = WeightSource(
        described,
        map_names(shapes, described),
        reader.read,
        lambda key: reader.spec(key).dtype,
        is_on_disk=True,
        files={name: file for name, file in tokenizer.items() if file.is_file()},
    )
    return source, COMMAND_RECIPES[config.train.recipe]
