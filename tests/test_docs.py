"""Every block of Python on every page runs alone: in a namespace of its own, on the CPU and on a GPU.

A block that is fenced as ```python torchrun runs in each process of `torchrun`; here it runs in a world of one process.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KINDS = ("python", "python torchrun")
# What a block prints, by a page and a word of it.
SAYS = {
    ("README.md", "convert_report"): "2 of 2 weights converted",
    ("comparison.md", "convert_report"): "2 of 2 weights converted",
    ("operations.md", "fused_ops"): "ForwardLinearBiasActivation",
}


def find_blocks() -> Iterator[tuple[str, str, str]]:
    """Where it stands, its kind, its code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1].startswith("py"):
                yield f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1].strip(), match[2]


BLOCKS = list(find_blocks())
over_blocks = pytest.mark.parametrize(("place", "kind", "code"), BLOCKS, ids=[place for place, _, _ in BLOCKS])


@pytest.fixture
def world(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun gives to the first of one process."""
    if kind == "python":
        yield
        return
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    given = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in {"MASTER_ADDR": "127.0.0.1", **given}.items():
        monkeypatch.setenv(name, str(value))
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may write files."""
    monkeypatch.chdir(tmp_path)


def run(code: str, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # needs no C++ compiler
    # A gradient of a GPU tensor is computed in a thread that has no CUDA context yet, and cuBLAS warns of it.
    with torch.autograd.set_multithreading_enabled(False):
        try:
            exec(compile(code, place, "exec"), {"__name__": "__main__"})
        finally:
            torch.set_default_device(None)
    shown = capsys.readouterr().out
    assert all(said in shown for (page, word), said in SAYS.items() if word in code and page in place)


@pytest.mark.compile
@over_blocks
def test_a_block_runs_alone(
    place: str,
    kind: str,
    code: str,
    world: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(code, place, monkeypatch, capsys)


@pytest.mark.gpu
@pytest.mark.compile
@over_blocks
def test_a_block_runs_alone_on_a_gpu(
    place: str,
    kind: str,
    code: str,
    world: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(code, place, monkeypatch, capsys)


def test_blocks_are_found() -> None:
    assert len([place for place, _, _ in BLOCKS if place.startswith("README")]) >= 2
    assert all(any(page in place and word in code for place, _, code in BLOCKS) for page, word in SAYS)
    assert {kind for _, kind, _ in BLOCKS} == set(KINDS)
