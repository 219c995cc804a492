"""The API reference has every public name, and the check notices one that is missing."""

import shutil
from pathlib import Path

from dev.reference import PAGES, find_faults


def test_every_public_name_is_there() -> None:
    assert find_faults() == []


def test_a_missing_name_is_noticed(tmp_path: Path) -> None:
    pages = shutil.copytree(PAGES, tmp_path / "api")
    page = pages / "modules.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("::: mezzotint.Linear\n", "") + "\n::: mezzotint.RMSNorm\n", encoding="utf-8")
    assert find_faults(pages) == [
        "mezzotint.RMSNorm: is shown 2 times",
        "mezzotint.Linear: is on no page of docs/api",
    ]
