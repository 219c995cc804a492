"""This module keeps the folders of runs: a new run takes a new one, and an old one is
overwritten only if that is asked for."""

import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mezzotint.files import remove, write_json
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.settings import RunConfig

RUNS = Path("runs")
CONFIG, RESULT, LOCK = "config.json", "result.json", "lock"
INSPECT = "inspect"  # measurements of what was quantized
MADE = (RESULT, "checkpoints", "tensorboard", INSPECT)  # what a run makes beside CONFIG


def new_folder(out: str | None, kind: str) -> Path:
    """Make the folder of a new run: `out`, which must be empty or missing, or the next number under `runs/`."""
    if out is None:
        RUNS.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = RUNS / f"{kind}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    folder = Path(str(out))
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{folder} cannot be made ({error.strerror}): give another --out") from None
    return folder


def check_free(folder: Path) -> None:
    """Raise a `CommandError` unless the folder is missing or empty."""
    if folder.is_file():
        raise CommandError(f"{folder} is a file: give another --out")
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / CONFIG).exists():
            raise CommandError(
                f"{folder} holds a run already: give --resume to go on with it, --overwrite to begin anew, or another "
                "--out"
            )
        raise CommandError(f"{folder} is not empty: give another --out")


def clear_run(folder: Path) -> None:
    """Remove what a run made, and nothing else; its configuration stays until the next one takes its place."""
    for name in MADE:
        remove(folder / name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep everybody else from training in this folder meanwhile.

    The lock goes with the process, however that ends; the file stays, since removing it would let
    two processes have the lock.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise CommandError(f"{folder / LOCK} cannot be written ({error.strerror}): give another --out") from None
    with open(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = file.read(100).strip() or "another process"
            raise CommandError(f"{who} trains in {folder}: wait for it, stop it, or give another --out") from None
        except OSError:
            pass  # this file system has no locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def write_run_config(folder: Path, config: RunConfig) -> None:
    write_json(folder / CONFIG, config.as_json())


def read_run_config(folder: Path) -> RunConfig:
    """Return the configuration of the run in a folder."""
    if not folder.is_dir():
        raise CommandError(f"{folder} does not exist: leave --resume out to begin a run there, or give another --out")
    path = folder / CONFIG
    if not path.exists():
        raise CommandError(f"{folder} holds no run ({CONFIG} is missing): give the --out of one, or leave --resume out")
    try:
        return RunConfig.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CommandError) as error:
        raise CommandError(f"{path} cannot be read ({error}): begin anew with another --out") from None


def newest_run(kind: str) -> str:
    """Return the name of the run with the largest number, or an example, to be shown in messages."""
    found = sorted(RUNS.glob(f"{kind}-*"))
    return str(found[-1]) if found else str(RUNS / f"{kind}-001")
