"""The program runs a command; an error is one line on standard error and an exit status.

The status is 0 if all went as asked, 1 if the command ran and failed, 2 if it cannot run as asked, and 128 +
n if signal n stopped it: 130 by Ctrl-C, 141 if nobody reads standard output any more (`| head -1`). On
several ranks, rank 0 prints.
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from mezzotint.cli.extra import what_to_install

try:
    from mezzotint.cli.app import UsageError, app
    from mezzotint.trainer.console import CommandError, Output, enough_memory, speaks
except ModuleNotFoundError as error:
    MISSING: str | None = what_to_install(error)
else:
    MISSING = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    if MISSING is not None:
        print(f"mezzotint: {MISSING}", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    output: Any = Output(sys.stdout)
    with redirect_stdout(output):
        code = _run(arguments)
        output.flush()
    return 128 + signal.SIGPIPE if output.is_closed and not code else code


def _run(arguments: list[str]) -> int:
    try:
        with enough_memory():
            code = app(arguments, prog_name="mezzotint", standalone_mode=False)
    except CommandError as error:
        return _fail(str(error), error.code, is_own=error.is_own)
    except OSError as error:
        return _fail(f"{error}: see to it, and try again", 1, is_own=True)
    except UsageError as error:
        where = getattr(getattr(error, "ctx", None), "command_path", "mezzotint")
        said = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        return _fail(f"{said}: see {where} --help", 2)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int, *, is_own: bool = False) -> int:
    if is_own or speaks():
        print(f"mezzotint: {message}", file=sys.stderr)
    return code
