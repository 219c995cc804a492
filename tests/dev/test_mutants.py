"""`dev.mutants`: the list is of lines that are there, and a mutation is made, told and undone."""

from dataclasses import replace
from pathlib import Path

import pytest

from dev.mutants import ROOT, Mutant, find_line, is_killed, mutated, read_list

MUTANTS, SUITES = read_list()
HALF = Mutant("half", "mezzotint/sums.py", "return a + b", "return a - b", "tests")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one function, and its test."""
    for folder in ("mezzotint", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mezzotint" / "__init__.py").touch()  # before one that is installed
    (tmp_path / "mezzotint" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from mezzotint.sums import add\n\n\ndef test_add():\n    assert add(2, 0) == 2\n"
    )
    return tmp_path


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_line_is_there(mutant: Mutant) -> None:
    """A line that was changed on purpose needs another entry in `dev/mutants.toml`, or the same with its new text."""
    file, _ = find_line(mutant)
    assert file == ROOT / mutant.file
    assert mutant.new != mutant.old
    for path in [*SUITES[mutant.package], *[word for word in mutant.tests.split() if word.startswith("tests/")]]:
        assert (ROOT / path).exists(), path


def test_names_are_unique_and_many() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_a_line_that_has_moved_is_found(tree: Path) -> None:
    (tree / "mezzotint" / "sums.py").rename(tree / "mezzotint" / "moved.py")
    assert find_line(HALF, tree) == (tree / "mezzotint" / "moved.py", 1)


def test_a_line_must_be_there_once(tree: Path) -> None:
    with pytest.raises(LookupError, match=r"half: mezzotint/sums\.py has the line 'return b' 0 times"):
        find_line(replace(HALF, old="return b"), tree)
    (tree / "mezzotint" / "sums.py").write_text("return a + b\n" * 2)
    with pytest.raises(LookupError, match=r"2 times; give one that is there once"):
        find_line(HALF, tree)


def test_a_mutation_is_undone(tree: Path) -> None:
    file = tree / "mezzotint" / "sums.py"
    with mutated(HALF, tree):
        assert file.read_text() == "def add(a, b):\n    return a - b\n"
    assert file.read_text() == "def add(a, b):\n    return a + b\n"


def test_killed_survived_and_no_test(tree: Path) -> None:
    assert not is_killed(HALF, tree, ["tests"])
    assert is_killed(replace(HALF, new="return a - b - 1"), tree, ["tests"])
    with pytest.raises(LookupError, match=r"tests -k nothing runs no test"):
        is_killed(HALF, tree, ["tests", "-k", "nothing"])
