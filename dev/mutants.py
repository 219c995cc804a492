"""This program checks whether the tests notice: it makes one-line mutations of the package,
and a test must fail on each.

    python -m dev.mutants                       each against the tests that its entry names: minutes
    python -m dev.mutants --only NAME           those whose name contains NAME
    python -m dev.mutants --suite               each against what `make test` runs of its package: an hour or more
    python -m dev.mutants --check               only whether each line is still where the list says

The list is `mutants.toml`. A mutation is a line, found by its text: in the file that is named or, if that file is
gone or does not have it any more, in the one file of the package that has it. The tree is copied, and each
mutation is made in the copy alone. The exit status is 1 if a mutation survives, or cannot be made. Remove tests
only if all mutations are still killed.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
FAST = ("-m", "not gpu and not slow")  # what `make test` runs
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")
COPIED = ("mezzotint", "tests", "bench", "docs", "examples", "dev", "pyproject.toml", "Makefile", *PAGES)
TIMEOUT = 900  # seconds; a mutation that never ends counts as noticed


@dataclass(frozen=True)
class Mutant:
    """A `Mutant` is a line of a file, what it becomes, and the tests that notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def package(self) -> str:
        """Return the folder under `mezzotint/`, or the name of a file that lies there by itself."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else Path(self.file).stem


def read_list(path: Path = LIST) -> tuple[list[Mutant], dict[str, list[str]]]:
    """Return the mutations, and for each package its tests."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in found["mutant"]], found["suites"]


def find_line(mutant: Mutant, root: Path = ROOT) -> tuple[Path, int]:
    """Return the file that has the line, and its index there; a line that is nowhere, or not once, raises an error."""
    named = root / mutant.file
    places = _places(named, mutant.old) if named.is_file() else []
    if not places:
        places = [place for file in sorted((root / "mezzotint").rglob("*.py")) for place in _places(file, mutant.old)]
    if len(places) != 1:
        raise LookupError(
            f"{mutant.name}: {mutant.file} has the line {mutant.old!r} {len(places)} times; give one that is there once"
        )
    return places[0]


def _places(file: Path, line: str) -> list[tuple[Path, int]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [(file, index) for index, found in enumerate(lines) if found.strip() == line]


@contextmanager
def mutated(mutant: Mutant, root: Path) -> Iterator[None]:
    """Make the mutation in the tree under `root`, and undo it afterwards."""
    file, index = find_line(mutant, root)
    before = file.read_text(encoding="utf-8")
    lines = before.splitlines(keepends=True)
    lines[index] = lines[index].replace(mutant.old, mutant.new)
    file.write_text("".join(lines), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def is_killed(mutant: Mutant, root: Path, selection: list[str]) -> bool:
    """Return whether a test fails; if no test runs there is no answer, and an error is raised."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selection]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with mutated(mutant, root):
        try:
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return True
    if done.returncode in (0, 1, 2):  # passed, failed, or not even collected
        return done.returncode != 0
    raise LookupError(f"{mutant.name}: {' '.join(selection)} runs no test: {done.stdout[-300:]}{done.stderr[-300:]}")


def run(mutants: list[Mutant], suites: dict[str, list[str]], whole: bool) -> int:
    """Try every mutation in turn, print a table of what became of them, and return the exit status."""
    console, rows = Console(), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, Progress(*columns, console=console) as progress:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tree / name)
        task = progress.add_task("mutants", total=len(mutants))
        for mutant in mutants:
            progress.update(task, description=mutant.name)
            selection = [*FAST, *(suites[mutant.package] if whole else shlex.split(mutant.tests))]
            try:
                outcome = "killed" if is_killed(mutant, tree, selection) else "survived"
            except LookupError as error:
                outcome = str(error)
            if outcome != "killed":
                progress.console.print(f"{mutant.name}: {outcome}", style="red", highlight=False, soft_wrap=True)
            rows.append((mutant, outcome))
            progress.advance(task)
    table = Table("mutation", "file", "tests", "outcome")
    for mutant, outcome in rows:
        tests = " ".join(suites[mutant.package]) if whole else mutant.tests
        style = "green" if outcome == "killed" else "red"
        table.add_row(mutant.name, mutant.file.removeprefix("mezzotint/"), tests, f"[{style}]{outcome}")
    console.print(table)
    killed = sum(outcome == "killed" for _, outcome in rows)
    console.print(f"{killed} of {len(rows)} killed")
    return 0 if killed == len(rows) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.mutants", description="Do the tests notice?")
    parser.add_argument("--only", default="", metavar="NAME", help="mutations whose name contains NAME")
    parser.add_argument("--suite", action="store_true", help="against `make test`'s tests of the package")
    parser.add_argument("--check", action="store_true", help="only look whether each line is there")
    given = parser.parse_args()
    mutants, suites = read_list()
    mutants = [mutant for mutant in mutants if given.only in mutant.name]
    if not mutants:
        parser.error(f"--only is {given.only!r}: no name contains it")
    if given.check:
        for mutant in mutants:
            find_line(mutant)
        return 0
    return run(mutants, suites, given.suite)


if __name__ == "__main__":
    sys.exit(main())
