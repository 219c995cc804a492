"""Convergence: train a model of 125 M parameters on 100 M tokens in every recipe, run by run, over several days.

    python -m bench convergence --data DIR --minutes 25         trains the next runs that fit in the time
    python -m bench convergence --list                          which runs there are, and which are finished
    python -m bench convergence --write docs/convergence.md     the page and its figure, out of the runs' files

DIR is what `python -m dev.convergence.corpus` makes. A run is a file in dev/convergence/runs; one whose file has an end
is not run again. Checkpoints are under --scratch: a run that was interrupted goes on if its checkpoint still exists,
and begins anew if it does not.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from bench._convergence_runs import ENTRIES, RUNS, Entry, is_finished, predict_seconds, read_runs
from bench._convergence_train import Place, train_entry
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.data import read_text

SCRATCH = Path("runs") / "convergence"


def run_study(entries: Sequence[Entry], place: Place) -> list[str]:
    """Train, in their order, the runs that are not finished and fit in the time; return the
    names of those that finished now."""
    done = []
    for entry in entries:
        runs = read_runs(place.runs, (*ENTRIES, *entries))  # other runs say how long one takes
        if is_finished(runs, entry):
            continue
        needed, left = predict_seconds(runs, entry), place.deadline - time.monotonic()
        has_begun = (place.scratch / entry.name).exists() and entry.name in runs
        if needed > left and not has_begun:
            print(f"{entry.name} needs about {needed:.0f} s, and {max(left, 0):.0f} s are left: not begun", flush=True)
        elif left > 0 and train_entry(entry, place):
            done.append(entry.name)
    return done


def open_data(data: Path, **options: object) -> Place:
    """Return the place of the tokens in a folder, with what corpus.json says of them."""
    path = data / "corpus.json"
    if not path.exists():
        raise CommandError(f"{path} does not exist: unpack the data there with python -m dev.convergence.corpus unpack")
    about = json.loads(path.read_text(encoding="utf-8"))
    text = read_text(str(data / "tokens.bin"), str(data / "tokenizer.json"))
    said = {name: about[name] for name in ("sha256", "tokens", "held_out_tokens", "vocab")}
    return Place(text=text, data=said, held_out=about["held_out_tokens"], **options)  # type: ignore[arg-type]


def list_runs(entries: Sequence[Entry], folder: Path) -> None:
    """Print each run and how far it is."""
    runs = read_runs(folder, entries)
    for entry in entries:
        run = runs.get(entry.name)
        if run is None:
            state = "not run yet"
        elif run.end is None:
            state = f"interrupted after step {len(run.losses)}"
        elif "diverged" in run.end:
            state = f"diverged at step {run.end['diverged']}"
        else:
            state = f"finished: loss {run.end['final']:.4f}, held out {run.end['held_out']:.4f}"
        print(f"{entry.name:<28} {state}")


def main(argv: list[str] | None = None) -> int:
    """Train, list, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench convergence", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with tokens.bin, tokenizer.json and corpus.json: train")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins that takes longer than is left")
    parser.add_argument("--only", default="", help="names of runs, between commas")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs' files")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of checkpoints")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--list", action="store_true", help="print how far each run is")
    parser.add_argument("--write", type=Path, help="file of the page; its figure goes beside it")
    args = parser.parse_args(argv)
    names = {entry.name: entry for entry in ENTRIES}
    asked = [name for name in args.only.split(",") if name]
    for name in asked:
        if name not in names:
            parser.error(f"--only: there is no run {name!r}; give some of {', '.join(names)}")
    entries = [names[name] for name in asked] or list(ENTRIES)
    if not (args.data or args.list or args.write):
        parser.error("give --data to train, --list, or --write")
    try:
        if args.data:
            deadline = time.monotonic() + 60 * args.minutes
            place = open_data(args.data, runs=args.runs, scratch=args.scratch, deadline=deadline, device=args.device)
            run_study(entries, place)
    except CommandError as error:
        parser.error(str(error))
    if args.write:
        from bench._convergence_report import write_page  # imports matplotlib, which training does without

        write_page(args.write, args.runs)
    if args.list:
        list_runs(entries, args.runs)
    return 0
