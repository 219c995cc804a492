"""`mezzotint bench` runs what `make bench` runs. The measurements are beside the package in a clone, not in a wheel."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mezzotint.trainer.console import CommandError

ROOT = Path(__file__).resolve().parents[2]


def bench(
    arguments: Annotated[list[str] | None, typer.Argument(help="name and options; without any: what there is")] = None,
) -> None:
    """Run a measurement of bench/, as `python -m bench` does."""
    if not (ROOT / "bench" / "__main__.py").is_file():
        raise CommandError("bench/ is not here: it is part of a clone of the repository, not of an installed wheel")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *(arguments or ())]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    raise typer.Exit(code)
