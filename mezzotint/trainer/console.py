"""This module has what every command shares: errors for users, the console that output goes to, and sizes in words."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

HEAD_WIDTH = 8  # of the head of a column that has several words
FILE_WIDTH, NOTEBOOK_WIDTH = 120, 96  # columns where the output does not say how many it has
TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # the variables that say which rank a process is


class CommandError(Exception):
    """A `CommandError` says in one line what went wrong and what to do about it; the command then ends with the exit
    status `code`: 2 if it cannot run as asked, 1 if it ran and failed.

    On several ranks all of them raise it and rank 0 prints it, unless `is_own`: then only this rank
    has the error, and prints it.
    """

    def __init__(self, message: str, code: int = 2, *, is_own: bool = False) -> None:
        super().__init__(" ".join(message.split()))  # messages of other libraries have line breaks
        self.code, self.is_own = code, is_own


def is_one_of_many() -> bool:
    """Return whether torchrun, or anything that sets the same variables, started this process."""
    return os.environ.keys() >= TORCHRUN


def speaks() -> bool:
    """Return whether this process is rank 0 or the only one, which prints for all of them."""
    return not is_one_of_many() or os.environ["RANK"] == "0"


class Output:
    """This text file may be a pipe: what is written after its reader has gone is dropped,
    and `is_closed` becomes True."""

    def __init__(self, file: Any) -> None:
        self._file, self.is_closed = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._until_closed():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._until_closed():
            self._file.flush()

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.is_closed = True
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())  # Python flushes what is left when it exits


def is_closed(console: Console) -> bool:
    """Return whether nobody reads what this console prints any more, as in `mezzotint train | head -1`."""
    return getattr(console.file, "is_closed", False)


def make_console() -> Console:
    """Return a console for the current standard output; outside of a terminal it has as many columns as the variable
    COLUMNS says, or 120, or 96 in a notebook.

    A notebook claims to be a terminal but cannot move the cursor, so it gets plain text as a file does.
    """
    is_notebook = "JPY_PARENT_PID" in os.environ or "ipykernel" in sys.modules
    options: dict[str, Any] = {"file": sys.stdout, "quiet": not speaks(), "force_jupyter": False}
    console = Console(**options, force_terminal=False if is_notebook else None)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(**options, force_terminal=False, width=NOTEBOOK_WIDTH if is_notebook else FILE_WIDTH)


def make_table(title: str, columns: Mapping[str, JustifyMethod]) -> Table:
    """Return an empty table with these columns, left or right.

    It is made to fit a terminal of 80 columns: there are no lines between columns, a head takes several lines, and
    words on the left are folded where there is no room. Numbers, on the right, stay whole.
    """
    options: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", **options)
    for name, justify in columns.items():
        head = fill(name, HEAD_WIDTH, break_long_words=False, break_on_hyphens=False)
        table.add_column(head, justify=justify, overflow="fold", no_wrap=justify == "right")
    return table


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn an error about too little memory, on a GPU or on a CPU, into a one-line
    `CommandError` of this rank alone."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        found = _memory_problem(error)
        if found is None:
            raise
        advice = "lower --batch, --sequence or the model's sizes; `mezzotint plan` says what fits"
        raise CommandError(f"{found}: {advice}", 1, is_own=True) from None


def _memory_problem(error: Exception) -> str | None:
    """Return what an error says about memory, or None if it is about something else.

    The message is searched, because PyTorch has no exception class for a failed allocation on a CPU.
    """
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, by name: torch may not be imported here
        return "the GPU has too little memory"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
        return "this machine has too little memory"
    if "overflow" in str(error):
        return "a tensor would have 2^63 bytes or more"
    return None


def as_size(num_bytes: int) -> str:
    """Return a number of bytes in words: 1536 → "1.5 KiB"."""
    power, unit = size_unit(num_bytes)
    return f"{num_bytes / 2**power:,.1f} {unit}" if power else f"{num_bytes} B"


def size_unit(num_bytes: int) -> tuple[int, str]:
    """Return the unit for a number of bytes: 1536 → (10, "KiB"), of 2^10 bytes."""
    units = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
    return next(((power, unit) for power, unit in units if num_bytes >= 2**power), (0, "B"))


def as_count(number: int) -> str:
    """Return a number in words: 8030261248 → "8.03 B"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return str(number)
