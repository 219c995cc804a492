"""Every block of Python on every page runs, on the CPU and on a GPU.

On most pages a block is a program of its own and runs in a namespace of its own. A tutorial, a page of docs/tutorials,
is one program: its blocks run in their order and share their names, but for those whose title is a command, which are
files. What stands under the title "Output" is what the block before it prints.

A block under the title `torchrun …` runs in each process that torchrun starts; here it runs in a world of one process,
and those of tutorials also in one of two.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in TUTORIALS)]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([^"]+)"')
NUMBER = re.compile(r"-?\d+\.\d+|\d+(?=%| dB)")
# What a block prints, by a page and a word of it.
SAYS = {
    ("README.md", "convert_report"): "2 of 2 weights converted",
    ("comparison.md", "convert_report"): "2 of 2 weights converted",
    ("docs/operations.md", "fused_ops"): "ForwardLinearBiasActivation",
}


class Block(NamedTuple):
    """A block of Python: where it stands, its code, the command that runs it as a file, what it prints."""

    place: str
    code: str
    command: str
    output: str | None

    @property
    def is_for_torchrun(self) -> bool:
        return self.command.startswith("torchrun ")


def find_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    found: Block | None = None
    for match in FENCE.finditer(text):
        title = TITLE.search(match[1])
        if match[1].startswith("py"):
            assert TITLE.sub("", match[1]).strip() == "python", f"{page}: {match[1]} is not shown as code on the site"
            if found is not None:
                yield found
            place = f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            found = Block(place, match[2], title[1] if title else "", None)
        elif title is not None and title[1] == "Output":
            assert found is not None, "an output without a block"
            yield found._replace(output=match[2])
            found = None
    if found is not None:
        yield found


BLOCKS = [block for page in PAGES for block in find_blocks(page)]
over_blocks = pytest.mark.parametrize("block", BLOCKS, ids=[block.place for block in BLOCKS])
over_tutorials = pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])


@contextlib.contextmanager
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun gives to the first of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    given = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    with monkeypatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", **given}.items():
            patch.setenv(name, str(value))
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may write files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a block in a namespace, and return what it prints."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # needs no C++ compiler

    def run_block(block: Block, names: dict[str, Any]) -> str:
        capsys.readouterr()
        world = world_of_one(monkeypatch) if block.is_for_torchrun else contextlib.nullcontext()
        # A gradient of a GPU tensor is computed in a thread that has no CUDA context yet, and cuBLAS warns of it.
        with world, torch.autograd.set_multithreading_enabled(False):
            try:
                exec(compile(block.code, block.place, "exec"), names)
            finally:
                torch.set_default_device(None)
        return capsys.readouterr().out

    return run_block


def fresh_names() -> dict[str, Any]:
    return {"__name__": "__main__"}


def run_tutorial(page: Path, run: Any) -> Iterator[tuple[Block, str]]:
    shared = fresh_names()
    for block in find_blocks(page):
        yield block, run(block, fresh_names() if block.command else shared)


def assert_says(printed: str, shown: str) -> None:
    """Words and whole numbers are equal; decimals, shares and decibels may be off, as sums in another order are."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for got, told in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert float(got) == pytest.approx(float(told), rel=0.05, abs=1 if "." not in told else 0.1)


@pytest.mark.compile
@over_blocks
def test_a_block_runs_alone(block: Block, run: Any) -> None:
    printed = run(block, fresh_names())
    assert all(said in printed for (page, word), said in SAYS.items() if word in block.code and page in block.place)


@pytest.mark.gpu
@pytest.mark.compile
@over_blocks
def test_a_block_runs_alone_on_a_gpu(block: Block, run: Any) -> None:
    run(block, fresh_names())


@pytest.mark.compile
@over_tutorials
def test_a_tutorial_prints_what_it_shows(page: Path, run: Any) -> None:
    for block, printed in run_tutorial(page, run):
        if block.output is not None and not block.is_for_torchrun:
            assert_says(printed, block.output)


@pytest.mark.gpu
@pytest.mark.compile
@over_tutorials
def test_a_tutorial_runs_on_a_gpu(page: Path, run: Any) -> None:
    assert list(run_tutorial(page, run))


@pytest.mark.slow
def test_files_of_tutorials_by_torchrun(tmp_path: Path) -> None:
    """Two processes print what the page shows."""
    blocks = [block for page in TUTORIALS for block in find_blocks(page) if block.is_for_torchrun]
    assert blocks
    for block in blocks:
        _, *options, file = block.command.split()
        (tmp_path / file).write_text(block.code, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, file]
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert_says(done.stdout, block.output or "")


def test_outputs_are_compared() -> None:
    assert_says("step  3  loss 1.07\n", "step 3 loss 1.05\n")
    for wrong in ("step 3 loss 1.45", "step 4 loss 1.05", "step 3 gap 1.05", "step 3 loss 1.05 1.05"):
        with pytest.raises(AssertionError):
            assert_says(wrong, "step 3 loss 1.05")


def test_blocks_are_found() -> None:
    assert len([block for block in BLOCKS if block.place.startswith("README")]) >= 2
    assert all(any(page in block.place and word in block.code for block in BLOCKS) for page, word in SAYS)
    assert any(block.is_for_torchrun for block in BLOCKS)
    assert not [block for block in BLOCKS if block.output is not None]  # only tutorials are compared
    assert all(any(block.output for block in find_blocks(page)) for page in TUTORIALS)
