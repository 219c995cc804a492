"""Bounds on the shape of the package, as `python -m dev.house` prints it."""

import pytest

from dev import house


def test_no_function_is_longer_than_a_hundred_lines() -> None:
    """Kernels are aside."""
    assert [f for f in house.functions() if f.lines > 100 and not f.is_kernel] == []


def test_few_lines_ask_whether_code_is_traced() -> None:
    """Each has its reason beside it; what differs otherwise is told to the compiler (`mezzotint/tracing.py`)."""
    found = house.tracing_lines()
    assert len(found) <= 5
    assert sum(found.values()) <= 12


def test_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    house.main()
    printed = capsys.readouterr().out
    for title in ("Packages", "Largest files", "Functions over 60 lines", "Lines that ask for tracing"):
        assert title in printed
