"""Reports as tables of a notebook: what `_repr_html_` of a report returns is made here."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), note: str = "") -> str:
    """Return rows of plain text as a table, with a head and a paragraph below it if they are given."""
    made = f"<thead>{_row(head, 'th')}</thead>" if head else ""
    body = "".join(_row(row, "td") for row in rows)
    return f"<table>{made}<tbody>{body}</tbody></table>" + (f"<p>{escape(note)}</p>" if note else "")


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
