"""The log of experiments, `dev/log`, has an index that names every entry, and nothing names the file that it was."""

import re
from pathlib import Path

LOG = Path(__file__).resolve().parents[2] / "dev/log"
INDEX = (LOG / "README.md").read_text(encoding="utf-8")
FILES = sorted(set(LOG.glob("*.md")) - {LOG / "README.md"})


def anchor(heading: str) -> str:
    """What a heading is called in an address: lower case, hyphens for spaces, nothing else but letters and digits."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_names_every_entry() -> None:
    headings = {
        f"{path.name}#{anchor(heading)}"
        for path in FILES
        for heading in re.findall(r"^###? (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(headings) > 30
    assert set(re.findall(r"\((\w+\.md#[^)]+)\)", INDEX)) == headings
    assert set(re.findall(r"\((\w+\.md)\)", INDEX)) == {path.name for path in FILES}


def test_entries_have_a_date_and_their_order() -> None:
    for path in FILES:
        entries = re.findall(r"^## (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert entries == sorted(entries), path.name
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in entries), path.name
