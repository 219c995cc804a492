"""This module is about notebooks: it makes the tables that `_repr_html_` of a report returns, and knows whether this
process runs the cells of one."""

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), note: str = "") -> str:
    """Return rows of plain text as a table, with a head and a paragraph below it if they are given."""
    made = f"<thead>{_row(head, 'th')}</thead>" if head else ""
    body = "".join(_row(row, "td") for row in rows)
    return f"<table>{made}<tbody>{body}</tbody></table>" + (f"<p>{escape(note)}</p>" if note else "")


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def find_display() -> Callable[..., Any] | None:
    """Return IPython's `display` if this process runs the cells of a notebook, else None.

    IPython in a terminal has no kernel, and a program that a cell starts (`!mezzotint train`) is another process, which
    cannot display anything in the cell. Nothing is imported to find out: a notebook has IPython loaded.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return ipython.display.display if hasattr(shell, "kernel") else None
