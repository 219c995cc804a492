"""`mezzotint export` writes a run, or a checkpoint, as a folder that other programs serve."""

import re
from pathlib import Path

import torch

from mezzotint.serving.export import export_source
from mezzotint.trainer.console import CommandError, make_console
from mezzotint.trainer.progress import progress_bar
from mezzotint.trainer.publishing import source_of
from mezzotint.trainer.recipe_names import BF16, recipe_name
from mezzotint.trainer.recipes import COMMAND_RECIPES

PLAIN_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def run_export(
    checkpoint: str,
    to: str,
    out: str,
    recipe: str | None,
    dtype: str | None,
    requantize: bool,
    overwrite: bool,
    shard_mb: int,
) -> None:
    """Run the command that `app.py` describes."""
    if dtype is not None and dtype not in PLAIN_DTYPES:
        raise CommandError(f"--dtype is {dtype!r}: give one of {', '.join(PLAIN_DTYPES)}")
    try:
        source, trained = source_of(Path(checkpoint))
        if recipe is not None:
            name = recipe_name(recipe)
            if name == BF16:
                raise CommandError("--recipe is bf16, which quantizes nothing: give the recipe that weights are for")
            trained = COMMAND_RECIPES[name]
        with progress_bar("writing") as progress:
            report = export_source(
                source,
                to,
                Path(out),
                trained,
                dtype=None if dtype is None else PLAIN_DTYPES[dtype],
                requantize=requantize,
                overwrite=overwrite,
                max_shard_bytes=shard_mb * 10**6,
                progress=progress,
            )
    except ValueError as error:
        raise CommandError(_in_words_of_options(str(error))) from None
    make_console().print(str(report), highlight=False, soft_wrap=True)


def _in_words_of_options(message: str) -> str:
    """Replace the names of arguments in a message by those of the command's options."""
    for argument, option in (
        ("requantize=True", "--requantize"),
        ("overwrite=True", "--overwrite"),
        ("format is", "--to is"),
    ):
        message = message.replace(argument, option)
    return re.sub(r"recipe=(\w+)\(\)", r"--recipe \1", message)
