"""`mezzotint train` trains one model in one recipe, with checkpoints."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mezzotint.trainer.console import CommandError, as_count, make_console
from mezzotint.trainer.data import NUM_BYTES, Text, as_words, read_text
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.local_checkpoint import find_checkpoints, remove_remains
from mezzotint.trainer.loop import Stopped, run_training
from mezzotint.trainer.options import flag
from mezzotint.trainer.recipes import read_rules
from mezzotint.trainer.runs import (
    CONFIG,
    RESULT,
    check_free,
    clear_run,
    locked,
    new_folder,
    newest_run,
    read_run_config,
    write_run_config,
)
from mezzotint.trainer.sample import write_on
from mezzotint.trainer.settings import ONE_RANK_LAYOUT, RunConfig, TrainConfig, make_config
from mezzotint.trainer.sizes import MODEL, ModelConfig, find_model
from mezzotint.trainer.training import Training
from mezzotint.trainer.world import World, check_same_options, find_world, joined, losing_none, on_first, together


def run_train(
    *, out: str | None, resume: bool, overwrite: bool, model: str | None, timeout: int, given: dict[str, Any]
) -> None:
    """Run the command that `app.py` describes."""
    if resume and overwrite:
        raise CommandError("--resume and --overwrite: give one of them")
    if resume and out is None:
        raise CommandError(f"--resume needs the folder of the run: --resume --out {newest_run('train')}")
    if "rules" in given:  # a run keeps what the file says now, even if it changes later
        given = {**given, "rules": read_rules(given["rules"])}
    world = find_world()
    with joined(world, given.get("device", "auto"), timeout), losing_none(world):
        asked = {
            entry.name: given.get(entry.name) for kind in (ModelConfig, TrainConfig, Layout) for entry in fields(kind)
        }
        asked |= {"out": out, "resume": resume, "overwrite": overwrite, "model": model}
        check_same_options(world, {flag(name): value for name, value in asked.items()})
        _train(world, out, resume, overwrite, model, given)


def _train(
    world: World, out: str | None, resume: bool, overwrite: bool, model: str | None, given: dict[str, Any]
) -> None:
    with ExitStack() as held:
        if resume:
            training, folder = _resume(world, Path(str(out)), model, given, held)
        else:
            training, folder = _begin(world, out, overwrite, model, given, held)
        _run(training, folder)


def _run(training: Training, folder: Path) -> None:
    console = make_console()
    for line in _introduction(training, folder):
        console.print(line, highlight=False, soft_wrap=True)
    try:
        result = run_training(training, folder, console)
    except Stopped as stopped:
        how = "go on" if training.config.train.checkpoint_every else "without a checkpoint; begin again"
        message = f"{stopped}: {how} with mezzotint train --resume --out {folder}"
        raise CommandError(message, stopped.code) from None
    speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
    last = min(training.config.train.last, len(result.losses))
    console.print(f"final loss {result.final:.4f} (mean of the last {last}){speed}", highlight=False)
    if training.config.train.sample:
        _show_sample(training, console)
    console.print(f"run in {folder}", highlight=False, soft_wrap=True)


def _introduction(training: Training, folder: Path) -> list[str]:
    """Return the lines that say what will run, and on what."""
    config, train = training.config, training.config.train
    where = torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else "cpu"
    many = f" × {training.world.size} ranks" if training.world.size > 1 else ""
    how = "compiled" if train.compile else "eager"
    count = as_count(sum(value.numel() for value in training.whole.values()))
    steps = f"{train.steps} steps of {training.tokens_per_step:,} tokens"
    tokens, held = training.text.tokens.numel(), training.held_out.tokens.numel()
    source = "Python's own sources" if train.data is None else train.data
    kind = "bytes" if train.tokenizer is None else "tokens"
    return [
        f"{train.recipe_label} on {where}{many}, {how}: {count} parameters in {config.model.layers} layers, {steps}",
        f"text: {source}, {tokens:,} {kind}" + (f", and {held:,} held out" if held else ""),
        f"run in {folder}" + (f", which goes on after step {training.step}" if training.step else ""),
    ]


def _show_sample(training: Training, console: Console) -> None:
    tokenizer = training.config.train.tokenizer
    prompt, made = (as_words(part, tokenizer) for part in write_on(training, training.config.train.sample))
    console.print(f"after {prompt[-40:]!r} it writes:", highlight=False, markup=False, soft_wrap=True)
    console.print(made, highlight=False, markup=False, soft_wrap=True)


def _begin(
    world: World, out: str | None, overwrite: bool, model: str | None, given: dict[str, Any], held: ExitStack
) -> tuple[Training, Path]:
    """Return a new run and its folder; on rank 0 `held` keeps the lock of the folder."""
    is_run = on_first(world, lambda: out is not None and (Path(out) / CONFIG).exists())
    if out is not None and not (overwrite and is_run):
        on_first(world, lambda: check_free(Path(out)))
    # The run is made first, so that one that cannot be trained does not destroy the run that was there.
    config, text = together(world, lambda: _configure(world, model, given))
    training = _make(world, config, text)

    def take_folder() -> Path:
        folder = Path(str(out))
        if is_run and overwrite:
            held.enter_context(locked(folder))
            clear_run(folder)
        else:
            folder = new_folder(out, "train")
            held.enter_context(locked(folder))
        write_run_config(folder, config)
        return folder

    return training, on_first(world, take_folder)


def _configure(world: World, model: str | None, given: dict[str, Any]) -> tuple[RunConfig, Text]:
    sizes, settings = make_config(
        find_model(MODEL if model is None else model, {"vocab": NUM_BYTES, **given}), TrainConfig(), given
    )
    set_threads(settings)
    text = read_text(settings.data, settings.tokenizer)
    layout = make_layout(world, ONE_RANK_LAYOUT, given)
    return RunConfig(replace(sizes, vocab=text.vocab), settings, text.fingerprint, layout), text


def make_layout(world: World, base: Layout, given: Mapping[str, Any]) -> Layout:
    """Return the layout of all ranks; `base` says how they share the model where no option does."""
    parts = {name: given.get(name, getattr(base, name)) for name in ("tp", "fsdp", "ep")}
    if world.size == 1:
        for name in parts:
            if given.get(name) not in (None, getattr(ONE_RANK_LAYOUT, name)):
                raise CommandError(
                    f"{flag(name)} is for several ranks: start them with torchrun --nproc-per-node 8 -m mezzotint "
                    "train, or leave it out"
                )
        return ONE_RANK_LAYOUT
    for name in ("tp", "ep"):
        if world.size % max(parts[name], 1):
            raise CommandError(f"{flag(name)} is {parts[name]}: give a divisor of the {world.size} ranks")
    return Layout(world=world.size, **parts)


def _make(world: World, config: RunConfig, text: Text) -> Training:
    """Return the run, after a check that all ranks have the same configuration."""
    parts = {**asdict(config.model), **asdict(config.train), "data": config.fingerprint}
    check_same_options(world, {flag(name): value for name, value in parts.items()})
    return together(world, lambda: Training(config, text, world))


def set_threads(settings: TrainConfig) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _resume(
    world: World, folder: Path, model: str | None, given: dict[str, Any], held: ExitStack
) -> tuple[Training, Path]:
    saved = together(world, lambda: read_run_config(folder))
    on_first(world, lambda: held.enter_context(locked(folder)))
    config, text = together(world, lambda: _configure_again(world, folder, saved, model, given))
    training = _make(world, config, text)
    found = on_first(world, lambda: find_checkpoints(folder))
    if found:

        def check(values: Mapping[str, Any]) -> None:
            try:
                other = RunConfig.from_json(values)
            except (KeyError, TypeError, CommandError) as error:
                raise CommandError(f"{found[-1]} has no configuration of a run ({error}): move it away") from None
            _check_same(config, other, str(found[-1]))
            if other.fingerprint != saved.fingerprint:
                raise CommandError(
                    f"{found[-1]} is of a run on other text: move it away to resume from what is before it"
                )

        training.load(found[-1], check)
    if config.train.steps != saved.train.steps:
        longer = replace(saved, train=replace(saved.train, steps=config.train.steps))
        on_first(world, lambda: _begin_again(folder, longer))
    on_first(world, lambda: remove_remains(folder))
    return training, folder


def _begin_again(folder: Path, config: RunConfig) -> None:
    """Write the configuration of a run with another number of steps, and remove its result, as it has none yet."""
    write_run_config(folder, config)
    (folder / RESULT).unlink(missing_ok=True)


def _configure_again(
    world: World, folder: Path, saved: RunConfig, model: str | None, given: dict[str, Any]
) -> tuple[RunConfig, Text]:
    vocab, base = saved.model.vocab, saved.model
    if model is not None:
        base = replace(find_model(model, {"vocab": vocab, **given}), vocab=vocab)
    sizes, settings = make_config(base, saved.train, given)
    asked = RunConfig(sizes, settings, saved.fingerprint, make_layout(world, saved.layout, given))
    _check_same(asked, saved, f"the run in {folder}")
    set_threads(settings)
    text = read_text(settings.data, settings.tokenizer)
    if text.fingerprint != saved.fingerprint:
        raise CommandError(
            f"the text is not the one that the run in {folder} began with: give that as --data (and --tokenizer), or "
            "begin another run with another --out"
        )
    return asked, text


def _check_same(asked: RunConfig, other: RunConfig, what: str) -> None:
    differences = asked.differences(other)
    if differences:
        raise CommandError(
            f"{what} has {', '.join(differences)}: leave the option out, or begin another run with another --out"
        )
