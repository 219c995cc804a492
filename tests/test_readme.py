"""What README.md says holds: its code runs, its tables are those of the package, what it names is there."""

import ast
import re
from pathlib import Path

import pytest
import torch

import mezzotint as mz
from bench._peers import quiet_import
from mezzotint import hw, recipe
from tests.test_layers import ROW_OF

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS: dict[str, hw.CC | None] = {
    "CPU": None,
    "Ampere (8.0)": (8, 0),
    "Ada (8.9)": (8, 9),
    "Hopper (9.0)": (9, 0),
    "Blackwell (10.0)": (10, 0),
    "Blackwell (12.0)": (12, 0),
}
FORMATS = {
    "FP8 per tensor, current and delayed": "float8",
    "FP8 per row": "float8_rowwise",
    "FP8 1x128 and 128x128": "float8_block",
    "MXFP8": "mxfp8",
    "MXFP6": "mxfp6",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}


def section(name: str, text: str = README) -> str:
    """What stands under a heading, to the next of its kind."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {name!r}"
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of a text's first table, the heading first."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    width = len(cells[0])
    return [row for row in cells if len(row) == width and not set("".join(row)) <= set("-: ")]


def test_formats_and_hardware() -> None:
    head, *rows = table(section("Formats and hardware"))
    assert head == ["format", *COLUMNS]
    assert [row[0] for row in rows] == list(FORMATS)
    for name, *cells in rows:
        for cell, cc in zip(cells, COLUMNS.values(), strict=True):
            found = {row.how for row in hw.report(cc) if row.format == FORMATS[name] and row.operation != "quantize"}
            assert found == {cell}, f"{name} at {cc}"


def test_losses_are_those_of_the_page() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    head, *rows = table(section("Look at it"))
    assert [head, *rows] == table(section("compare", page))
    base, *others = [float(row[1]) for row in rows]
    # Both were rounded from the same figures, each on its own: four digits may differ by one in the last.
    assert [float(row[2]) for row in rows[1:]] == pytest.approx([loss - base for loss in others], rel=0, abs=1.01e-4)


def test_speeds_are_those_of_the_page() -> None:
    page = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    modes = [table(section(f"{mode}: times as fast as BF16", page)) for mode in ("eager", "compiled")]
    head, *rows = table(section("Speed"))
    for name, *cells in rows:
        candidate = name.split(",")[0].lower().replace("torchao ", "torchao-").replace("row-wise", "rowwise")
        for case, cell in zip(head[1:], cells, strict=True):
            found = [_ratio(mode, candidate, case.replace("×", "x")) for mode in modes]
            assert cell == (" / ".join(found) if all(found) else ""), f"{name}, {case}"


def _ratio(mode: list[list[str]], candidate: str, case: str) -> str:
    head, *rows = mode
    column = next(i for i, name in enumerate(head) if name in (case, f"16384x{case}"))
    return next(row[column] for row in rows if row[0] == candidate)


def test_names_are_there() -> None:
    """Files, tests and `make` verbs."""
    files = set(re.findall(r"`((?:tests|docs|examples|bench|dev)/[\w./:]+)`", README))
    assert len(files) > 15
    for name in files:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], name
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / image).exists(), image
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= verbs
    for name in re.findall(r"make bench ARGS=([a-z]+)", README):
        assert (ROOT / "bench" / f"{name}.py").is_file()


def test_the_tree() -> None:
    """Every file and folder of the package, those that are imported first."""
    lines = section("The tree").split("mezzotint/\n")[1].split("bench/")[0].splitlines()
    listed = [line.split()[0].removesuffix("/").removesuffix(".py") for line in lines if re.match(r"  \w", line)]
    package = [
        path for path in (ROOT / "mezzotint").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    assert sorted(listed) == sorted(path.stem for path in package if not path.stem.startswith("__"))
    rows = [ROW_OF[name] for name in listed]
    assert rows == sorted(rows)


def test_checkpoints_of_torchao_load_either_way() -> None:
    assert quiet_import()
    from torchao.float8 import convert_to_float8_training

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

    ours, theirs = model(), convert_to_float8_training(model())
    mz.convert(ours, recipe.Float8RowwiseScaling())
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours[0].weight, theirs[0].weight)
    theirs.load_state_dict(ours.state_dict())
