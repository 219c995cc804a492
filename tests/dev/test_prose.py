"""Docstrings are sentences that can be read alone, as `python -m dev.prose` checks them."""

from pathlib import Path

import pytest

from dev import prose

# A file, and what is said of the names in it whose docstrings are fragments.
SAMPLES = {
    "a function without a verb": (
        'def gradient():\n    """The gradient of the weight."""\n',
        {"gradient": "does not begin with a verb"},
    ),
    "a function that needs the one before it": (
        'def of_x():\n    """Return dx."""\n\n\ndef of_dy():\n    """The same of dy."""\n',
        {"of_dy": "does not begin with a verb"},
    ),
    "a function whose verb is in lower case": (
        'def scale():\n    """return the scale."""\n',
        {"scale": "does not begin with a verb"},
    ),
    "a method": (
        'class Rows:\n    """A `Rows` holds rows."""\n\n    async def count(self):\n        """How many."""\n',
        {"count": "does not begin with a verb"},
    ),
    "a class that begins in the middle": (
        'class Rows:\n    """Of the tokens of this process, that many rows are here."""\n',
        {"Rows": "begins in the middle of a sentence"},
    ),
    "a class that needs the one before it": (
        'class Columns:\n    """The same is done here for columns."""\n',
        {"Columns": "begins in the middle of a sentence"},
    ),
    "a module without a verb": (
        '"""Constants, tolerances, thresholds."""\n',
        {"sample": "has no verb"},
    ),
    "a verb that comes after the first paragraph": (
        '"""Constants, tolerances, thresholds.\n\nThis module has them.\n"""\n',
        {"sample": "has no verb"},
    ),
    "sentences": (
        '"""This module has a class."""\n\n\nclass Rows:\n    """A `Rows` holds rows."""\n\n'
        '    def count(self):\n        """Return how many there are."""\n\n    def plain(self):\n        return 1\n',
        {},
    ),
}


def test_the_tree_has_no_fragments() -> None:
    assert list(map(str, prose.find_fragments(prose.python_files(prose.CHECKED)))) == []


@pytest.mark.parametrize(("code", "faults"), SAMPLES.values(), ids=SAMPLES)
def test_fragments_are_found(code: str, faults: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(code, encoding="utf-8")
    assert {found.name: found.why for found in prose.find_fragments([file])} == faults


def test_it_prints_where_a_fragment_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sample.py"
    file.write_text('def gradient():\n    """The gradient of the weight."""\n', encoding="utf-8")
    assert prose.main([str(file)]) == 1
    printed = capsys.readouterr()
    assert f"{file}:1: gradient: does not begin with a verb: The gradient of the weight." in printed.out
    assert "1 docstrings are no sentences" in printed.err
    assert prose.main([str(file), "--count"]) == 1
    assert capsys.readouterr().out.split() == ["1", str(tmp_path)]
