"""What every command shares: errors for users, where output goes, sizes in words."""

import os
import sys

from rich.console import Console

EXTRA = ("typer", "matplotlib", "safetensors", "tensorboard")  # what `pip install 'mezzotint[cli]'` adds


class CommandError(Exception):
    """What went wrong and what to do, in one line; the command ends with `code`. 2: as asked it cannot run. 1: it ran,
    and failed.

    Of many processes all raise it and the first one says it, unless it `is_own`: of this process alone.
    """

    def __init__(self, message: str, code: int = 2, *, is_own: bool = False) -> None:
        super().__init__(" ".join(message.split()))  # messages of others have line breaks
        self.code, self.is_own = code, is_own


def speaks() -> bool:
    """Whether this is the first, or the only one, of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    """Of standard output as it is now; outside of a terminal tables get the room that they need."""
    console = Console(file=sys.stdout, quiet=not speaks())
    return console if console.is_terminal else Console(file=sys.stdout, width=120, quiet=not speaks())


def as_size(num_bytes: int) -> str:
    """1536 → "1.5 KiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:,.1f} {unit}"
    return f"{num_bytes} B"


def as_count(number: int) -> str:
    """8030261248 → "8.03 B"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return str(number)
