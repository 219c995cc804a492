"""What README.md and the pages beside it say holds: tables are those of the package, what they name is there."""

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
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
DEVELOPMENT = (ROOT / "docs/development.md").read_text(encoding="utf-8")
# Those whose files, tests, links and `make` verbs are looked up.
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")]
NAMED = ("comparison", "development", "numerics", "operations", "performance", "regions", "reliability")
PAGES += [ROOT / f"docs/{name}.md" for name in NAMED]
over_pages = pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
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


def test_a_screen_or_three() -> None:
    """The rest is in docs/."""
    assert len(README.splitlines()) <= 150


def test_gaps_are_those_of_the_losses() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    _, *rows = table(section("compare", page))
    base, *others = [float(row[1]) for row in rows]
    # Both were rounded from the same figures, each on its own: four digits may differ by one in the last.
    assert [float(row[2]) for row in rows[1:]] == pytest.approx([loss - base for loss in others], rel=0, abs=1.01e-4)


@pytest.mark.parametrize(("text", "count"), [(README, 8), (PERFORMANCE, 9)], ids=["README", "performance"])
def test_speeds_are_those_of_the_page(text: str, count: int) -> None:
    page = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    modes = [table(section(f"{mode}: times as fast as BF16", page)) for mode in ("eager", "compiled")]
    head, *rows = table(section("Speed", text))
    assert len(rows) == count
    for name, *cells in rows:
        candidate = name.split(",")[0].lower().replace("torchao ", "torchao-").replace("row-wise", "rowwise")
        for case, cell in zip(head[1:], cells, strict=True):
            found = [_ratio(mode, candidate, case.replace("×", "x")) for mode in modes]
            assert cell == (" / ".join(found) if all(found) else ""), f"{name}, {case}"


def test_memory_is_that_of_the_page() -> None:
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    head, row = table(section("Memory", PERFORMANCE))
    assert [head, row] == [found for found in table(page[page.index("Held between") :]) if found in (head, row)]


def _ratio(mode: list[list[str]], candidate: str, case: str) -> str:
    head, *rows = mode
    column = next(i for i, name in enumerate(head) if name in (case, f"16384x{case}"))
    return next(row[column] for row in rows if row[0] == candidate)


@over_pages
def test_names_are_there(page: Path) -> None:
    """Files, tests, links and `make` verbs."""
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"`((?:mezzotint|tests|docs|examples|bench|dev)/[\w./:]+)`", text)):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], name
    for link in re.findall(r"\]\(([^)]*)\)", text):
        path, _, heading = link.partition("#")
        if not link.startswith("https://"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= verbs
    for name in re.findall(r"make bench ARGS=\"?([a-z]+)", text):
        assert (ROOT / "bench" / f"{name}.py").is_file()


def anchors(page: Path) -> list[str]:
    """What the headings of a page are called in an address."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_measurement_is_on_the_page() -> None:
    _, *rows = table(section("How to measure", PERFORMANCE))
    files = {path.stem for path in (ROOT / "bench").glob("*.py") if not path.stem.startswith("_")}
    assert {row[0].strip("`") for row in rows} == files


def test_the_tree() -> None:
    """Every file and folder of the package, those that are imported first."""
    lines = section("The tree", DEVELOPMENT).split("mezzotint/\n")[1].split("bench/")[0].splitlines()
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
