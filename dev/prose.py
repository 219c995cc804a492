"""This program checks that docstrings are sentences which can be read alone.

    python -m dev.prose              every docstring that is none: file, line, name, why, how it begins
    python -m dev.prose mezzotint/ops bench/peers.py
    python -m dev.prose --count      how many there are in each folder

The docstring of a function begins with a verb that says what it does ("Return", "Write", "Raise"). That of a module or
a class has a verb in its first paragraph, and does not begin in the middle of a sentence ("Of the tokens …", "The same
of dy."). The verbs that are known are in `prose.txt`; add one that is missing.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("mezzotint", "bench", "dev", "examples", "packages")
VERBS = frozenset(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split())
AUXILIARIES = frozenset(
    re.findall(r"\w+", "is are was were has have had does do can cannot may must will would should")
)
# A sentence that can be read alone does not begin with these.
OPENERS = frozenset(
    re.findall(
        r"\w+",
        "Of Those As That Which Whose With Without And Or But By From To For In On At Its Their Them Also Where "
        "Whether What How Why Than Then Not None",
    )
)

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fragment:
    """A `Fragment` is a docstring that is no sentence."""

    file: str
    line: int
    name: str
    why: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.why}: {self.text}"


def find_fragments(paths: Iterable[Path]) -> Iterator[Fragment]:
    """Yield the docstrings of these files that are no sentences."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for node in ast.walk(tree):
            if not isinstance(node, Node):
                continue
            text = ast.get_docstring(node)
            why = None if text is None else fault_of(text, isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            if text is not None and why is not None:
                line = getattr(node, "lineno", 1)
                yield Fragment(shown, line, getattr(node, "name", path.stem), why, text.split("\n")[0][:90])


def fault_of(text: str, is_function: bool) -> str | None:
    """Return what is wrong with a docstring, or None."""
    words = re.findall(r"[A-Za-z_']+", text.split("\n\n")[0])
    first = text.split()[0].strip(".,:;") if text.split() else ""
    if is_function:
        return None if first.lower() in VERBS and first[0].isupper() else "does not begin with a verb"
    if first in OPENERS or text.startswith("The same"):
        return "begins in the middle of a sentence"
    return None if any(is_verb(word.lower()) for word in words) else "has no verb"


def is_verb(word: str) -> bool:
    """Return whether a word is a known verb, or its form of the third person."""
    stems = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return word in AUXILIARIES or any(stem in VERBS for stem in stems)


def python_files(paths: Iterable[str]) -> list[Path]:
    """Return the Python files that are named, and those in the folders that are."""
    found: list[Path] = []
    for given in paths:
        path = ROOT / given
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the fragments, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m dev.prose", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=CHECKED, help="files and folders")
    parser.add_argument("--count", action="store_true", help="only how many there are in each folder")
    args = parser.parse_args(argv)
    found = list(find_fragments(python_files(args.paths)))
    if args.count:
        for folder, count in Counter(str(Path(each.file).parent) for each in found).most_common():
            print(f"{count:5}  {folder}")
    else:
        print("\n".join(map(str, found)))
    print(f"{len(found)} docstrings are no sentences", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
