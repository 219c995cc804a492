"""What every command shares: errors for users, where output goes, sizes in words."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

EXTRA = ("typer", "matplotlib", "safetensors", "tensorboard")  # what `pip install 'mezzotint[cli]'` adds
TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # variables that say who a process is among others


class CommandError(Exception):
    """What went wrong and what to do, in one line; the command ends with `code`. 2: as asked it cannot run. 1: it ran,
    and failed.

    Of many processes all raise it and the first one says it, unless it `is_own`: of this process alone.
    """

    def __init__(self, message: str, code: int = 2, *, is_own: bool = False) -> None:
        super().__init__(" ".join(message.split()))  # messages of others have line breaks
        self.code, self.is_own = code, is_own


def is_one_of_many() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return os.environ.keys() >= TORCHRUN


def speaks() -> bool:
    """Whether this is the first, or the only one, of the processes."""
    return not is_one_of_many() or os.environ["RANK"] == "0"


class Output:
    """A text file that may be a pipe: what is written when nobody reads it any more is lost, and `is_closed`."""

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
                os.dup2(nowhere.fileno(), self._file.fileno())  # Python writes what is left at its own end


def is_closed(console: Console) -> bool:
    """Whether nobody reads what it prints any more, as in `mezzotint train | head -1`."""
    return getattr(console.file, "is_closed", False)


def make_console() -> Console:
    """Of standard output as it is now; outside of a terminal tables get the room that they need.

    A notebook has a terminal's name and none of its movements: there it is text as in a file.
    """
    is_notebook = "JPY_PARENT_PID" in os.environ or "ipykernel" in sys.modules
    options: dict[str, Any] = {"file": sys.stdout, "quiet": not speaks(), "force_jupyter": False}
    console = Console(**options, force_terminal=False if is_notebook else None)
    return console if console.is_terminal else Console(**options, force_terminal=False, width=120)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Memory that is not there, on a GPU or on a CPU, is one line, of this process alone."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        found = _memory_problem(error)
        if found is None:
            raise
        advice = "lower --batch, --sequence or the model's sizes; `mezzotint plan` says what fits"
        raise CommandError(f"{found}: {advice}", 1, is_own=True) from None


def _memory_problem(error: Exception) -> str | None:
    """By what PyTorch says of allocations: it has no class of its own for those of a CPU."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported here
        return "the GPU has too little memory"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
        return "this machine has too little memory"
    if "overflow" in str(error):
        return "a tensor would have 2^63 bytes or more"
    return None


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
