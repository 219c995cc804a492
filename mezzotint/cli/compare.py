"""`mezzotint compare`: the same model, data and seed in several recipes, side by side."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mezzotint.cli.figure import draw
from mezzotint.cli.train import set_threads
from mezzotint.files import write_json
from mezzotint.trainer.console import CommandError, as_size, make_console
from mezzotint.trainer.data import NUM_BYTES, read_text
from mezzotint.trainer.loop import Result, Stopped, run_training
from mezzotint.trainer.recipe_names import BF16, recipe_names
from mezzotint.trainer.runs import check_free, new_folder, write_run_config
from mezzotint.trainer.settings import RunConfig, TrainConfig, make_config
from mezzotint.trainer.sizes import MODEL, ModelConfig, find_model
from mezzotint.trainer.training import Training
from mezzotint.trainer.world import find_world

# How far from BF16's the final loss may be, in nats a token, where nothing but the seed differs from the defaults.
ALLOWED = 0.03


def run_compare(*, recipes: str, out: str | None, model: str | None, given: dict[str, Any]) -> None:
    """The command; see `app.py`."""
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
    folder, console = None, make_console()
    results: list[Result] = []
    for name in names:
        chosen = replace(config, train=replace(settings, recipe=name))
        training = Training(chosen, text)
        folder = folder or new_folder(out, "compare")  # not before: what cannot be trained leaves none behind
        try:
            results.append(_run(training, folder / name, console))
        except (Stopped, CommandError) as error:
            if results:
                console.print(as_table(results, settings, None))
            raise CommandError(f"{name}: {error}; what is finished is in {folder}", error.code) from None
        del training  # before the next is made
        gc.collect()
    assert folder is not None
    limit = ALLOWED if is_default(config) else None
    console.print(as_table(results, settings, limit))
    figure, report = folder / "compare.png", folder / "compare.json"
    write_json(report, as_report(results, config))
    draw(figure, title_of(results, settings), results, settings.last)
    console.print(f"losses: {report}", highlight=False, soft_wrap=True)
    console.print(f"figure: {figure}", highlight=False, soft_wrap=True)
    far = [result.recipe for result in results if limit is not None and not abs(gap(result, results)) <= limit]
    if far:
        raise CommandError(f"{', '.join(far)}: farther from BF16 than {limit}; {report} has every loss", 1)


def _run(training: Training, folder: Path, console: Console) -> Result:
    folder.mkdir()
    write_run_config(folder, training.config)
    return run_training(training, folder, console)


def gap(result: Result, results: Sequence[Result]) -> float:
    """Final loss over BF16's."""
    return result.final - results[0].final


def is_default(config: RunConfig) -> bool:
    """But for the seed, and what decides no number."""
    train = config.train
    usual = TrainConfig(seed=train.seed, compile=train.compile)
    is_own_text = train.data is not None or train.tokenizer is not None
    if is_own_text or train.steps != usual.steps:
        return False
    return not config.differences(RunConfig(ModelConfig(), usual, ""))


def title_of(results: Sequence[Result], settings: TrainConfig) -> str:
    how = "compiled" if settings.compile else "eager"
    return f"{settings.steps} steps, seed {settings.seed}, {how}, {results[0].device}"


def as_table(results: Sequence[Result], settings: TrainConfig, limit: float | None) -> Table:
    """`limit`: of the gaps, where one is known."""
    table = Table(title=title_of(results, settings), title_justify="left")
    table.add_column("recipe")
    last = min(settings.last, settings.steps)
    away = "gap to BF16" if limit is None else f"gap to BF16 (±{limit})"
    for name in (f"loss, last {last}", away, "tokens/s", "peak memory", "graphs", "compile s"):
        table.add_column(name, justify="right")
    for result in results:
        speed = result.tokens_per_second
        table.add_row(
            result.recipe,
            f"{result.final:.4f}",
            "" if result is results[0] else f"{gap(result, results):+.4f}",
            "" if speed is None else f"{speed:,.0f}",
            as_size(result.peak_memory),
            str(result.graphs),
            f"{result.compile_seconds:.1f}",
        )
    return table


def as_report(results: Sequence[Result], config: RunConfig) -> dict[str, Any]:
    rows = [{**asdict(result), "gap": gap(result, results)} for result in results]
    return {"config": config.as_json(), "results": rows}
