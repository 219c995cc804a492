"""This module shows how a run proceeds: as a bar in a terminal and in a notebook, else as a line every so many steps.

`Bar` is the one place that decides whether there is a bar.
"""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mezzotint.notebook import find_display
from mezzotint.trainer.console import NOTEBOOK_WIDTH, make_console

SECONDS = 0.25  # between two drawings in a notebook: each is a message to the browser


class Bar:
    """A `Bar` shows how many of `total` steps are done, how long the rest will take and `said`, a few words.

    In a terminal it is drawn in place, and disappears at the end. In a notebook it is an output of the cell, which is
    replaced as the bar moves, and stays. Elsewhere nothing can be drawn twice, so there is none: `is_shown` is False.
    """

    def __init__(self, console: Console, label: str, total: int | None = None, done: int = 0) -> None:
        self._display = None if console.quiet else find_display()
        self._cell: Any = None
        self._drawn = 0.0
        self.is_shown = self._display is not None or console.is_interactive
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=self._display is not None or not console.is_interactive,
        )
        self._task = self._progress.add_task(label, total=total, completed=done, said="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        if self._display is not None:
            self._cell = self._display(self, display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._draw()

    def update(self, **changes: Any) -> None:
        """Change what is shown: `completed`, `total`, `said`, or `advance`, a number of further steps."""
        self._progress.update(self._task, **changes)
        if time.monotonic() - self._drawn >= SECONDS:
            self._draw()

    def _draw(self) -> None:
        """Replace the output of the notebook's cell, if there is one."""
        if self._cell is not None:
            self._drawn = time.monotonic()
            self._cell.update(self)

    def _printed(self) -> Console:
        """Return a console that has recorded the bar as a terminal of `NOTEBOOK_WIDTH` columns would show it."""
        console = Console(
            file=io.StringIO(),
            record=True,
            width=NOTEBOOK_WIDTH,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
        )
        console.print(self._progress.get_renderable())
        return console

    def __repr__(self) -> str:
        return self._printed().export_text().strip()

    def _repr_html_(self) -> str:
        """Return the bar for a notebook."""
        page = '<pre style="margin: 0; font-family: monospace">{code}</pre>'
        return self._printed().export_html(inline_styles=True, code_format=page)


class Reporter:
    """A `Reporter` shows the steps of one run: `show` prints what is known of a step, and
    `advance` says that one is done."""

    def __init__(self, console: Console, label: str, steps: int, start: int) -> None:
        self.console, self.label, self.steps = console, label, steps
        self._bar = Bar(console, label, steps, start)
        self._waits = False

    def __enter__(self) -> "Reporter":
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def advance(self) -> None:
        self._bar.update(advance=1, **({"said": ""} if self._waits else {}))
        self._waits = False

    def say(self, said: str) -> None:
        """Show what the next step waits for, until that step is done."""
        self._bar.update(said=said)
        self._waits = True
        if not self._bar.is_shown:
            self.note(said)

    def note(self, said: str) -> None:
        """Print a line of its own, which in a terminal appears above the bar."""
        self.console.print(f"{self.label}  {said}", highlight=False, soft_wrap=True)

    def show(self, step: int, loss: float, speed: float | None) -> None:
        """Show a step's loss and `speed` in tokens a second, which is None while all steps so far compiled."""
        said = f"loss {loss:.4f}" + ("" if speed is None else f"  {speed:,.0f} tokens/s")
        self._bar.update(said=said)
        if not self._bar.is_shown:
            self.note(f"step {step}/{self.steps}  {said}")


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is called with how much of how much is done, and shows it where a bar can be shown."""
    with Bar(make_console(), what, total) as bar:
        yield lambda done, total: bar.update(completed=done, total=total)
