"""This module shows how a run proceeds: as a bar in a terminal, else as a line every so many steps."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """A `Reporter` shows the steps of one run: `show` prints what is known of a step, and
    `advance` says that one is done."""

    def __init__(self, console: Console, label: str, steps: int, start: int) -> None:
        self.console, self.label, self.steps = console, label, steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task(label, total=steps, completed=start, said="")

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def say(self, said: str) -> None:
        """Show a word on what the next steps wait for."""
        self._bar.update(self._task, said=said)
        if not self.console.is_interactive:
            self.console.print(f"{self.label}  {said}", highlight=False, soft_wrap=True)

    def note(self, said: str) -> None:
        """Print a line of its own, which in a terminal appears above the bar."""
        self.console.print(f"{self.label}  {said}", highlight=False, soft_wrap=True)

    def show(self, step: int, loss: float, speed: float | None) -> None:
        """Show a step's loss and `speed` in tokens a second, which is None while all steps so far compiled."""
        said = f"loss {loss:.4f}" + ("" if speed is None else f"  {speed:,.0f} tokens/s")
        self._bar.update(self._task, said=said)
        if not self.console.is_interactive:
            self.console.print(f"{self.label}  step {step}/{self.steps}  {said}", highlight=False, soft_wrap=True)
