"""`python -m dev.house` prints the size and the shape of the package, from its source.

It prints lines per package, files that share a concept's name, the largest files, long functions, and the lines that
ask whether code is traced. `tests/dev/test_house.py` holds the bounds.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).resolve().parents[1] / "mezzotint"
LONG_FUNCTION = 60  # lines from which a function is listed
LARGEST_FILES = 12
TRACING = re.compile(r"\bis_(dynamo_)?compiling\(|\bis_exporting\(")


@dataclass(frozen=True)
class Function:
    """A `Function` is a function or method of the package, and how many lines it has with its signature."""

    file: str
    name: str
    lines: int

    @property
    def is_kernel(self) -> bool:
        """Return whether it is in `kernels/triton`, where Triton inlines everything and a
        launch lists every argument."""
        return self.file.startswith("kernels/triton/")


def source_files() -> dict[str, str]:
    """Return the text of every file of the package, by its path in it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def functions() -> Iterator[Function]:
    """Yield every function of the package."""
    for file, text in source_files().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield Function(file, node.name, node.end_lineno - node.lineno + 1)


def tracing_lines() -> dict[str, int]:
    """Return how many lines of each file ask whether code is traced, for files that have some."""
    counts = {
        file: sum(bool(TRACING.search(line)) for line in text.splitlines()) for file, text in source_files().items()
    }
    return {file: count for file, count in counts.items() if count}


def lines_of_packages() -> dict[str, tuple[int, int]]:
    """Return files and lines of each folder at the root of the package; files at the root count as "."."""
    found: dict[str, list[int]] = defaultdict(list)
    for file, text in source_files().items():
        found[file.split("/")[0] if "/" in file else "."].append(len(text.splitlines()))
    return {package: (len(counts), sum(counts)) for package, counts in found.items()}


def files_of_concepts() -> dict[str, list[str]]:
    """Return the files that have the same name, which stands for one concept in several layers."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in source_files():
        if not file.endswith("__init__.py"):
            found[Path(file).stem].append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def print_table(console: Console, title: str, heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Print one table, with numbers aligned to the right."""
    table = Table(title=title, title_justify="left")
    for column, head in enumerate(heads):
        is_number = bool(rows) and all(isinstance(row[column], int) for row in rows)
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def main() -> None:
    """Print the tables."""
    console = Console()
    packages = lines_of_packages()
    total = tuple(map(sum, zip(*packages.values(), strict=True)))
    rows: list[tuple[object, ...]] = [(name, *counts) for name, counts in packages.items()]
    print_table(console, "Packages", ("package", "files", "lines"), [*rows, ("all", *total)])
    concepts = sorted(files_of_concepts().items())
    rows = [(name, len(files), ", ".join(files)) for name, files in concepts]
    print_table(console, "Concepts with several files", ("name", "files", "where"), rows)
    sizes = {file: len(text.splitlines()) for file, text in source_files().items()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST_FILES]
    print_table(console, "Largest files", ("file", "lines"), list(largest))
    long = sorted((f for f in functions() if f.lines > LONG_FUNCTION), key=lambda f: -f.lines)
    rows = [(f.name, f.lines, f.file) for f in long]
    print_table(console, f"Functions over {LONG_FUNCTION} lines", ("function", "lines", "file"), rows)
    print_table(console, "Lines that ask for tracing", ("file", "lines"), list(tracing_lines().items()))


if __name__ == "__main__":
    main()
