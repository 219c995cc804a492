"""`mezzotint inspect` writes the page of a run whose tensors were inspected."""

from pathlib import Path

from mezzotint.inspect.page import write_page
from mezzotint.inspect.store import FIGURES
from mezzotint.trainer.console import CommandError, make_console
from mezzotint.trainer.runs import INSPECT


def find_figures(run: Path) -> Path:
    """Return the folder of the measurements of a run, or raise an error if it has none."""
    found = next((each for each in (run / INSPECT, run) if (each / FIGURES).is_file()), None)
    if found is None:
        raise CommandError(f"{run} has no {INSPECT}/{FIGURES}: give a run that was trained with --inspect 50")
    return found


def run_inspect(run: str, out: str | None) -> None:
    """Run the command that `app.py` describes; a folder that `mezzotint.inspect` wrote by
    hand is accepted as a run, too."""
    folder = Path(run)
    found = find_figures(folder)
    page = folder / "inspect.html" if out is None else Path(out)
    try:
        steps = write_page(found, page, str(folder))
    except ValueError as error:
        raise CommandError(str(error), 1) from None
    many = "step" if steps == 1 else "steps"
    make_console().print(f"page of {steps} inspected {many}: {page}", highlight=False, soft_wrap=True)
