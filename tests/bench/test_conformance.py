"""The conformance command: its table, its exit code, its page, and the dispatcher in front of it."""

from pathlib import Path

import pytest

from bench import __main__ as dispatcher
from bench import conformance
from bench.conformance import Row

GOOD = Row("mxfp8", "normal, 6 cases", "vectors", 1234, 0)
BAD = Row("nvfp4 dequantize", "256 scales", "float64", 99, 1)


def run(monkeypatch: pytest.MonkeyPatch, rows: list[Row], *argv: str) -> int:
    monkeypatch.setattr(conformance, "all_rows", lambda device: iter(rows))
    return dispatcher.main(["conformance", *argv])


def test_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [GOOD]) == 0
    assert "1,234" in capsys.readouterr().out
    assert run(monkeypatch, [GOOD, BAD]) == 1
    assert "1 rows with mismatches" in capsys.readouterr().out


def test_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    assert run(monkeypatch, [GOOD, BAD], "--write", str(page)) == 1
    text = page.read_text()
    assert f"python -m bench conformance --write {page}" in text
    assert "| mxfp8 | normal, 6 cases | vectors | 1,234 | 0 |" in text
    assert "| nvfp4 dequantize | 256 scales | float64 | 99 | 1 |" in text


def test_nothing_differs_on_the_cpu() -> None:
    rows = conformance.by_family(conformance.all_rows("cpu"))
    assert {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "cast", "float8_rowwise"} <= {row.family for row in rows}
    assert all(row.items > 0 for row in rows)
    assert not [row for row in rows if row.mismatches]


def test_a_wrong_cast_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = conformance.elements.cast_e2m1
    monkeypatch.setattr(conformance.elements, "cast_e2m1", lambda value: cast(value * 1.01))
    wrong = {row.format for row in conformance.pattern_rows("cpu") if row.mismatches}
    assert wrong == {"cast e2m1"}


def test_unknown_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        dispatcher.main(["nonsense"])
    assert stopped.value.code == 2
    assert "conformance" in capsys.readouterr().err


def test_no_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatcher.main([]) == 0
    assert "conformance" in capsys.readouterr().out
