"""`mezzotint compare` trains the same model on the same data and seed in several recipes, and BF16 with other seeds."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mezzotint.cli.chance import band_width, in_bands
from mezzotint.cli.figure import draw
from mezzotint.cli.train import set_threads
from mezzotint.files import write_json
from mezzotint.trainer.console import CommandError, as_size, make_console, make_table
from mezzotint.trainer.data import NUM_BYTES, read_text
from mezzotint.trainer.loop import Result, Stopped, run_training
from mezzotint.trainer.recipe_names import BF16, recipe_names
from mezzotint.trainer.runs import check_free, new_folder, write_run_config
from mezzotint.trainer.settings import RunConfig, TrainConfig, make_config
from mezzotint.trainer.sizes import MODEL, ModelConfig, find_model
from mezzotint.trainer.training import Training
from mezzotint.trainer.world import find_world

# The final loss may be this far from BF16's, in nats a token, if nothing but the seed differs from the defaults.
ALLOWED = 0.03


def run_compare(*, recipes: str, seeds: int, out: str | None, model: str | None, given: dict[str, Any]) -> None:
    """Run the command that `app.py` describes."""
    if find_world().size > 1:
        raise CommandError("compare runs in one process: start it without torchrun; train runs in several")
    names = [BF16, *(name for name in recipe_names(recipes) if name != BF16)]
    if out is not None:
        check_free(Path(out))
    sizes, settings = make_config(
        find_model(MODEL if model is None else model, {"vocab": NUM_BYTES, **given}),
        TrainConfig(checkpoint_every=0),
        given,
    )
    set_threads(settings)
    text = read_text(settings.data, settings.tokenizer)
    config = RunConfig(replace(sizes, vocab=text.vocab), settings, text.fingerprint)
    planned = [replace(settings, seed=settings.seed + number) for number in range(seeds)]
    planned += [replace(settings, recipe=name) for name in names[1:]]
    folder, console = None, make_console()
    results: list[Result] = []
    for train in planned:
        training = Training(replace(config, train=train), text)
        folder = folder or new_folder(out, "compare")  # not earlier, so that a failure leaves no folder behind
        name = train.recipe if train.seed == settings.seed else f"{train.recipe}-s{train.seed}"
        try:
            results.append(_run(training, folder / name, console))
        except (Stopped, CommandError) as error:
            if results:
                console.print(as_table(results[:seeds], results[seeds:], settings, None))
            raise CommandError(f"{name}: {error}; what is finished is in {folder}", error.code) from None
        del training  # free it before the next is made
        gc.collect()
    assert folder is not None
    _report(results[:seeds], results[seeds:], config, folder, console)


def _report(baselines: list[Result], others: list[Result], config: RunConfig, folder: Path, console: Console) -> None:
    """Print, write and draw the results, and raise an error if a gap is too large.

    `baselines` are the runs of BF16 by seed, of which the first has the seed of the `others`.
    """
    settings, limit = config.train, ALLOWED if is_default(config) else None
    console.print(as_table(baselines, others, settings, limit))
    figure, report = folder / "compare.png", folder / "compare.json"
    write_json(report, as_report(baselines, others, config))
    draw(figure, title_of(baselines[0], settings), baselines, others, settings.last)
    console.print(f"losses: {report}", highlight=False, soft_wrap=True)
    console.print(f"figure: {figure}", highlight=False, soft_wrap=True)
    far = [result.recipe for result in others if limit is not None and not abs(gap(result, baselines)) <= limit]
    if far:
        raise CommandError(f"{', '.join(far)}: farther from BF16 than {limit}; {report} has every loss", 1)


def _run(training: Training, folder: Path, console: Console) -> Result:
    folder.mkdir()
    write_run_config(folder, training.config)
    return run_training(training, folder, console)


def gap(result: Result, baselines: Sequence[Result]) -> float:
    """Return by how much a final loss is larger than BF16's of the same seed."""
    return result.final - baselines[0].final


def is_default(config: RunConfig) -> bool:
    """Return whether a configuration is the default one, but for the seed and options that decide no number."""
    train = config.train
    usual = TrainConfig(seed=train.seed, compile=train.compile)
    is_own_text = train.data is not None or train.tokenizer is not None
    if is_own_text or train.steps != usual.steps:
        return False
    return not config.differences(RunConfig(ModelConfig(), usual, ""))


def title_of(first: Result, settings: TrainConfig) -> str:
    how = "compiled" if settings.compile else "eager"
    return f"{settings.steps} steps, seed {settings.seed}, {how}, {first.device}"


def as_table(
    baselines: Sequence[Result], others: Sequence[Result], settings: TrainConfig, limit: float | None
) -> Table:
    """Return the table of results; `limit` is that of the gaps, or None if none is known.

    With several seeds of BF16, gaps are also in units of the band between their losses.
    """
    last = min(settings.last, settings.steps)
    width = band_width([result.final for result in baselines])
    chance = [] if width is None else ["chance"]
    numbers = (f"loss, last {last}", "gap to BF16", *chance, "tokens/s", "peak memory", "graphs", "compile s")
    title = [title_of(baselines[0], settings)]
    title += [] if limit is None else [f"gaps to BF16 are at most ±{limit} where all is well"]
    title += [] if width is None else [f"the band of chance, between {len(baselines)} seeds of BF16, is {width:.4f}"]
    table = make_table("\n".join(title), {"recipe": "left", **dict.fromkeys(numbers, "right")})
    for number, result in enumerate([*baselines, *others]):
        speed, is_first, is_baseline = result.tokens_per_second, number == 0, number < len(baselines)
        table.add_row(
            result.recipe if is_first or not is_baseline else f"{result.recipe}-s{settings.seed + number}",
            f"{result.final:.4f}",
            "" if is_first else f"{gap(result, baselines):+.4f}",
            *([] if width is None else ["" if is_baseline else in_bands(gap(result, baselines), width)]),
            "" if speed is None else f"{speed:,.0f}",
            as_size(result.peak_memory),
            str(result.graphs),
            f"{result.compile_seconds:.1f}",
        )
    return table


def as_report(baselines: Sequence[Result], others: Sequence[Result], config: RunConfig) -> dict[str, Any]:
    """Return the results as JSON values; `band` is None with one seed of BF16, and `seeds` has
    the results of its other seeds."""
    width = band_width([result.final for result in baselines])
    rows = [
        {
            **asdict(result),
            "gap": gap(result, baselines),
            "is_within_chance": None if width is None else abs(gap(result, baselines)) <= width,
        }
        for result in (baselines[0], *others)
    ]
    seeds = [{"seed": config.train.seed + i, **asdict(result)} for i, result in enumerate(baselines)]
    return {"config": config.as_json(), "band": width, "seeds": seeds[1:], "results": rows}
