"""This module writes the page of the convergence study and its figure from the files of its
runs: every number names its run.

Chance is what seeds do to BF16: the band is the distance between the lowest and the highest of its runs. A gap is a
run's loss less that of BF16 with the same seed, which saw the same text in the same order; one that is no larger
than the band can be chance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench._convergence_runs import ENTRIES, RUNS, Entry, RunFile, Study, is_finished, read_runs
from mezzotint.cli.chance import WITHIN, band_width, in_bands
from mezzotint.cli.figure import COLOURS, STYLE, draw_band, running_mean
from mezzotint.trainer.memory import plan_step
from mezzotint.trainer.recipe_names import BF16
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.settings import RunConfig

GIB = 2**30
INTRODUCTION = """\
# Convergence

Written by `python -m bench convergence --write docs/convergence.md` out of `dev/convergence/runs`, a file for each run.
The text is sources and documentation of the packages that `dev/convergence/corpus.toml` names, tokenized by a BPE
tokenizer that was trained on it; `dev/convergence/corpus.py` builds it. Files are held out by their hashes.

A gap is a run's loss less that of BF16 with the same seed, which begins with the same weights and sees the same text in
the same order. The band of chance is the distance between the lowest and the highest loss of the BF16 runs, whose seeds
change weights and order. A gap that is no larger than the band is within chance. Losses are in nats a token; held-out
losses are those of the trained weights in BF16.

The name of a run ends in its seed, `s1`. In `last10-bf16` the last tenth of the steps is in BF16, in `ends-bf16` the
first and the last layer are. The column "× BF16" divides by the speed of the BF16 runs of the same code, whose hash is
below, and is empty where there is none. A speed includes the whole step, with the optimizer's, and not compilation.
"""
LINES = ("--", ":", "-.")  # of a recipe's variants, in their order

UNKNOWN = (
    "Band of chance: not known until BF16 has run with two seeds or more. No gap can be called an effect before that."
)


def write_page(path: Path, folder: Path = RUNS, entries: Sequence[Entry] = ENTRIES) -> None:
    """Write the page, and beside it a figure for each study of which BF16 has run."""
    runs = read_runs(folder, entries)
    parts = [INTRODUCTION]
    for study in dict.fromkeys(entry.study for entry in entries):
        own = [entry for entry in entries if entry.study == study]
        parts.append(_section(study, own, runs, path))
    path.write_text("\n".join(parts), encoding="utf-8")


def _section(study: Study, entries: Sequence[Entry], runs: Mapping[str, RunFile], path: Path) -> str:
    lines = [f"## {_title(study)}", ""]
    lines += [_losses(entries, runs)]
    if any(is_finished(runs, entry) for entry in entries):
        lines += ["", _speeds(study, entries, runs)]
    drawn = {entry.name: runs[entry.name] for entry in entries if entry.name in runs}
    drawn = {name: run for name, run in drawn.items() if len(run.losses) >= study.train.last}
    if f"{study.name}-{BF16}-s1" in drawn:
        figure = path.with_name(f"{path.stem}-{study.name}.png")
        draw_study(figure, study, entries, drawn)
        lines += ["", f"![losses, and gaps to BF16, of {study.name}]({figure.name})"]
    sources = _sources(entries, runs)
    return "\n".join([*lines, *(["", sources] if sources else [])]) + "\n"


def _title(study: Study) -> str:
    model, train = study.model, study.train
    tokens = model.batch * model.sequence * train.accumulate
    return (
        f"{study.name}: {model.layers} layers of {model.hidden}, {train.steps} steps of {tokens:,} tokens, "
        f"learning rate {train.lr:g}"
    )


def band(entries: Sequence[Entry], runs: Mapping[str, RunFile], key: str) -> float | None:
    """Return how far apart the finished BF16 runs end, or None for less than two."""
    found = [
        run.end[key]
        for entry in entries
        if entry.recipe == BF16 and (run := runs.get(entry.name)) is not None and run.end and key in run.end
    ]
    return band_width(found)


def _losses(entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> str:
    last = entries[0].study.train.last
    head = ["run", f"loss, last {last}", "gap", "chance?", "held-out loss", "gap", "chance?"]
    lines = [_row(head), "|---|" + "---:|---:|---|" * 2]
    widths = {key: band(entries, runs, key) for key in ("final", "held_out")}
    judged: dict[bool, list[str]] = {True: [], False: []}  # whether both gaps of a run are within chance
    for entry in entries:
        run = runs.get(entry.name)
        if run is None or run.end is None or "diverged" in run.end:
            lines.append(_row([entry.name, _state(entry, run), *[""] * 5]))
            continue
        base = runs.get(f"{entry.study.name}-{BF16}-s{entry.seed}")
        cells, words = [entry.name], []
        for key, width in widths.items():
            cells.append(f"{run.end[key]:.4f}")
            if entry.recipe == BF16 or base is None or not base.end or key not in base.end:
                cells += ["", ""]
            else:
                gap = run.end[key] - base.end[key]
                words.append(in_bands(gap, width))
                cells += [f"{gap:+.4f}", words[-1]]
        lines.append(_row(cells))
        if any(words):
            judged[set(words) == {WITHIN}].append(f"`{entry.name}`")
    known = [f"{width:.4f} ({key.replace('_', '-')})" for key, width in widths.items() if width is not None]
    told = f"Band of chance: {', '.join(known)}." if known else UNKNOWN
    lines += ["", f"{told} {_evaluated(entries[0].study, runs)}"]
    said = {True: "Within chance in both losses", False: "Outside of it in one or both"}
    lines += [line for key, names in judged.items() if names for line in ("", f"{said[key]}: {', '.join(names)}.")]
    return "\n".join(lines + _switches(entries, runs))


def _evaluated(study: Study, runs: Mapping[str, RunFile]) -> str:
    """Return in words how many of the held-out tokens a held-out loss is the mean of."""
    model, asked = study.model, study.train.eval_batches * study.model.batch * study.model.sequence
    there = [run.settings["data"]["held_out_tokens"] for run in runs.values()]
    windows = min(there, default=asked + 1) // model.sequence  # of a window's tokens the last is only a target
    return f"A held-out loss is the mean of {min(asked, windows * model.sequence):,} tokens."


def _switches(entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> list[str]:
    """Return, for each run whose recipe changes at a step, a table of gaps before that step and at the end."""
    lines = []
    for entry in entries:
        if entry.schedule is not None and len(entry.schedule.phases) > 1 and _has_result(runs, entry):
            step = entry.schedule.phases[1][0]
            told = f"Until step {step}, where its recipe changes, `{entry.name}` repeats `{_plain(entry).name}`."
            lines += ["", told, "They differ there by chance alone: a GPU does not sum in the same order twice.", ""]
            lines += _switch(entry, step, [other for other in entries if _plain(other) == _plain(entry)], runs)
    return lines


def _switch(entry: Entry, step: int, others: Sequence[Entry], runs: Mapping[str, RunFile]) -> list[str]:
    """Return the table of a run whose recipe changes at `step`, and of other runs in its first recipe."""
    last, end = entry.study.train.last, entry.study.train.steps
    evaluated = max(at for at in runs[entry.name].held_out if at <= step)
    head = ["run", f"gap, {last} steps to {step}", f"last {last}", f"held-out gap, step {evaluated}", "at the end"]
    lines = [_row(head), "|---|" + "---:|" * 4]
    for other in others:
        base = replace(_plain(other), recipe=BF16)
        if _has_result(runs, other) and _has_result(runs, base):
            own, theirs = runs[other.name], runs[base.name]
            gaps = [fmean(own.losses[to - last : to]) - fmean(theirs.losses[to - last : to]) for to in (step, end)]
            gaps += [own.held_out[at] - theirs.held_out[at] for at in (evaluated, end)]
            lines.append(_row([other.name, *(f"{gap:+.4f}" for gap in gaps)]))
    return lines


def _plain(entry: Entry) -> Entry:
    """Return the run of a variant's recipe and seed without the variant."""
    return replace(entry, variant="", schedule=None)


def _has_result(runs: Mapping[str, RunFile], entry: Entry) -> bool:
    """Return whether a run came to its end with a loss."""
    return is_finished(runs, entry) and "diverged" not in (runs[entry.name].end or {})


def _state(entry: Entry, run: RunFile | None) -> str:
    """Return in words why a run has no result."""
    if run is None:
        return "not run yet"
    if run.end is None:
        return f"not run yet: interrupted after step {len(run.losses)}"
    return f"diverged at step {run.end['diverged']}"


def _speeds(study: Study, entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> str:
    head = ["run", "tokens/s", "× BF16", "peak memory, compiled"]
    if study.measures_eager:
        head += ["peak memory, eager", "`plan` predicts", "eager / predicted"]
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    for entry in entries:
        run = runs.get(entry.name)
        if run is None or run.end is None or "diverged" in run.end:
            continue
        speed, memory = run.end["tokens_per_second"], run.end["peak_memory"]
        base = _speed_of_bf16(run, entries, runs)
        ratio = "" if base is None else f"{speed / base:.2f}"
        cells = [entry.name, f"{speed:,.0f}", ratio, _gib(memory)]
        if study.measures_eager:
            eager = run.end["eager_peak_memory"]
            config = RunConfig.from_json(run.settings["config"])
            predicted = plan_step(config.model, COMMAND_RECIPES[config.train.recipe]).peak
            cells += [_gib(eager), _gib(predicted), f"{eager / predicted:.3f}"]
        lines.append(_row(cells))
    return "\n".join(lines)


def _speed_of_bf16(run: RunFile, entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> float | None:
    """Return the mean speed of the BF16 runs with a run's code on its kind of GPU, or None if there is none."""
    found = [
        other.end["tokens_per_second"]
        for entry in entries
        if entry.recipe == BF16 and (other := runs.get(entry.name)) is not None and other.end
        if "diverged" not in other.end and all(other.settings[key] == run.settings[key] for key in ("code", "device"))
    ]
    return fmean(found) if found else None


def _sources(entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> str:
    """Return a list of what each run used: its machine, its versions, its code, its data."""
    lines = []
    for entry in entries:
        run = runs.get(entry.name)
        if run is None:
            continue
        told = run.settings
        tokens = told["data"]
        lines.append(
            f"- `{run.name}`: {told['device']}, torch {told['versions']['torch']}, {told['started'][:10]}, code "
            f"`{told['code'][:12]}`, {tokens['tokens']:,} tokens and {tokens['held_out_tokens']:,} held out "
            f"(`{tokens['sha256']['tokens.bin'][:12]}`)"
        )
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw_study(path: Path, study: Study, entries: Sequence[Entry], runs: Mapping[str, RunFile]) -> None:
    """Draw losses and gaps in running means, and in both the band of the BF16 runs in grey."""
    width = study.train.last
    means = {name: running_mean(run.losses, width) for name, run in runs.items()}
    seeds = [means[entry.name] for entry in entries if entry.recipe == BF16 and entry.name in means]
    shortest = min(map(len, seeds))  # an interrupted run has fewer steps
    steps = range(width, width + shortest)
    variants = list(dict.fromkeys(entry.variant for entry in entries if entry.variant))
    lines = {e.name: LINES[variants.index(e.variant) % len(LINES)] if e.variant else "-" for e in entries}
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2)
        if len(seeds) > 1:
            draw_band(left, right, steps, [mean[:shortest] for mean in seeds], f"{len(seeds)} seeds of BF16")
        for entry in entries:
            if entry.name in means and (entry.recipe != BF16 or entry.seed == 1):
                base = means.get(f"{study.name}-{BF16}-s{entry.seed}")
                _draw_run(left, right, entry, lines[entry.name], means[entry.name], base, width)
        left.set(title=f"loss, mean of {width} steps", xlabel="step", ylabel="nats a token")
        left.set_ylim(min(map(min, means.values())) - 0.1, max(seeds[0]))  # so that one that diverges leaves room
        left.legend(frameon=False, fontsize=7)
        right.set(title=f"gap to BF16 of the same seed, mean of {width} steps", xlabel="step", ylabel="nats a token")
        figure.savefig(path)


def _draw_run(
    left: Axes, right: Axes, entry: Entry, style: str, mean: Sequence[float], base: Sequence[float] | None, width: int
) -> None:
    line: Mapping[str, object] = {"color": COLOURS[entry.recipe], "linewidth": 0.9, "linestyle": style}
    draw: Callable[..., object] = left.plot
    draw(range(width, width + len(mean)), mean, label=entry.name, **line)
    if base is not None:
        gaps = [a - b for a, b in zip(mean, base, strict=False)]  # an interrupted run has fewer
        draw = right.plot
        draw(range(width, width + len(gaps)), gaps, **line)
