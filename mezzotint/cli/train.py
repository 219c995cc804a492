"""`mezzotint train`: one model in one recipe, with checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mezzotint.cli.checkpoint import find_checkpoints, load_checkpoint, remove_remains
from mezzotint.cli.console import CommandError, make_console
from mezzotint.cli.data import read_text
from mezzotint.cli.loop import Stopped, Training, run_training
from mezzotint.cli.model import ModelConfig, find_model
from mezzotint.cli.options import takes
from mezzotint.cli.runs import (
    CONFIG,
    check_free,
    clear_run,
    new_folder,
    newest_run,
    read_config,
    write_config,
)
from mezzotint.cli.settings import RunConfig, TrainConfig, make_config

Out = Annotated[str | None, typer.Option(help="folder of the run", show_default="a new one under runs/")]
MODEL = "tiny"
Model = Annotated[
    str | None,
    typer.Option(help=f"sizes to begin with, as `mezzotint plan` takes them ({MODEL})", show_default=False),
]


@takes(ModelConfig, TrainConfig, without=("vocab",))
def train(
    *,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="begin the run in --out anew")] = False,
    model: Model = None,
    given: dict[str, Any],
) -> None:
    """Train a Llama-like language model on text that is on this machine.

    Ctrl-C stops after a step, with a checkpoint; `--resume` goes on from the last one.
    """
    if resume and overwrite:
        raise CommandError("--resume and --overwrite: give one of them")
    if resume and out is None:
        raise CommandError(f"--resume needs the folder of the run: --resume --out {newest_run('train')}")
    training, folder = _resume(Path(str(out)), model, given) if resume else _begin(out, overwrite, model, given)
    try:
        result = run_training(training, folder, make_console())
    except Stopped as stopped:
        how = "go on" if training.config.train.checkpoint_every else "without a checkpoint; begin again"
        message = f"{stopped}: {how} with mezzotint train --resume --out {folder}"
        raise CommandError(message, stopped.code) from None
    speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
    last = min(training.config.train.last, len(result.losses))
    make_console().print(f"final loss {result.final:.4f} (mean of the last {last}){speed}", highlight=False)
    make_console().print(f"run in {folder}", highlight=False, soft_wrap=True)


def _begin(out: str | None, overwrite: bool, model: str | None, given: dict[str, Any]) -> tuple[Training, Path]:
    is_run = out is not None and (Path(out) / CONFIG).exists()
    if out is not None and not (overwrite and is_run):
        check_free(Path(out))
    training = make_training(model, given)  # what cannot be trained costs nobody the run that was there
    if is_run and overwrite:
        folder = Path(str(out))
        clear_run(folder)
    else:
        folder = new_folder(out, "train")
    write_config(folder, training.config)
    return training, folder


def make_training(model: str | None, given: dict[str, Any]) -> Training:
    """A run at its beginning."""
    sizes, settings = make_config(find_model(model or MODEL), TrainConfig(), given)
    set_threads(settings)
    text = read_text(settings.data, settings.tokenizer)
    return Training(RunConfig(replace(sizes, vocab=text.vocab), settings, text.fingerprint), text)


def set_threads(settings: TrainConfig) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _resume(folder: Path, model: str | None, given: dict[str, Any]) -> tuple[Training, Path]:
    saved = read_config(folder)
    base = saved.model if model is None else replace(find_model(model), vocab=saved.model.vocab)
    sizes, settings = make_config(base, saved.train, given)
    asked = RunConfig(sizes, settings, saved.fingerprint)
    _check_same(asked, saved, f"the run in {folder}")
    set_threads(settings)
    text = read_text(settings.data, settings.tokenizer)
    if text.fingerprint != saved.fingerprint:
        raise CommandError(
            f"the text is not the one that the run in {folder} began with: give that as --data (and --tokenizer), or "
            "begin another run with another --out"
        )
    training = Training(asked, text)
    found = find_checkpoints(folder)
    if found:
        checkpoint = load_checkpoint(found[-1])
        try:
            other = RunConfig.from_json(checkpoint.config)
        except (KeyError, TypeError) as error:
            raise CommandError(f"{found[-1]} has no configuration of a run ({error}): move it away") from None
        _check_same(asked, other, str(found[-1]))
        if other.fingerprint != saved.fingerprint:
            raise CommandError(f"{found[-1]} is of a run on other text: move it away to resume from what is before it")
        training.restore(checkpoint)
    remove_remains(folder)
    return training, folder


def _check_same(asked: RunConfig, other: RunConfig, what: str) -> None:
    differences = asked.differences(other)
    if differences:
        raise CommandError(
            f"{what} has {', '.join(differences)}: leave the option out, or begin another run with another --out"
        )
