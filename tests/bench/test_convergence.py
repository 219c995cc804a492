"""The convergence study on a toy: two recipes, one of them interrupted; its files, its page, and the data's own way."""

import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from bench import _convergence_report, convergence
from bench._convergence_runs import ENTRIES, RUNS, Entry, Study, predict_seconds, read_run, read_runs
from bench._convergence_train import Place, hash_code, train_entry
from dev.convergence import packages, shards, tokens
from mezzotint.recipe import Rules, Schedule
from mezzotint.trainer.settings import TrainConfig
from mezzotint.trainer.sizes import ModelConfig

STEPS = 20
TOY = Study(
    name="toy",
    model=ModelConfig(hidden=32, ffn=64, heads=2, kv_heads=1, sequence=16, batch=2),
    train=TrainConfig(
        steps=STEPS, warmup=2, last=4, log_every=5, eval_every=10, hold_out=0.1, checkpoint_every=0, compile=False
    ),
    minutes=1,
)
BF16, CURRENT = (Entry(study=TOY, recipe=name) for name in ("bf16", "current"))
RULED = Entry(
    study=TOY,
    recipe="nvfp4",
    variant="x",
    schedule=Schedule([(0, Rules([("layers.0.*", None), ("*", "nvfp4")])), (STEPS // 2, None)]),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operators this small gain nothing from a second, and wait long for a busy one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of 64 words, as `corpus.py` would leave it."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    (np.arange(2001) ** 2 % 61).astype(np.uint16).tofile(folder / "tokens.bin")
    hashes = {name: tokens.hash_file(folder / name) for name in ("tokens.bin", "tokenizer.json")}
    about = {"sha256": hashes, "tokens": 1744, "held_out_tokens": 257, "vocab": 64}
    (folder / "corpus.json").write_text(json.dumps(about))
    return folder


def place_of(data: Path, folder: Path) -> Place:
    return convergence.open_data(data, runs=folder / "runs", scratch=folder / "scratch", device="cpu")


def test_runs_leave_files(data: Path, tmp_path: Path) -> None:
    place = place_of(data, tmp_path)
    assert convergence.run_study([BF16, CURRENT], place) == ["toy-bf16-s1", "toy-current-s1"]
    runs = read_runs(place.runs, [CURRENT, BF16])
    assert list(runs) == ["toy-current-s1", "toy-bf16-s1"]
    for run in runs.values():
        assert len(run.losses) == len(run.norms) == STEPS
        assert list(run.held_out) == [10, 20]
        assert run.end is not None
        assert run.end["final"] == pytest.approx(statistics.fmean(run.losses[-4:]), abs=2e-6)
        assert run.end["held_out"] == run.held_out[20]
        assert run.settings["code"] == hash_code()
        assert run.settings["data"]["held_out_tokens"] == 257
        assert run.settings["config"]["train"]["recipe"] == run.name.split("-")[1]
    assert runs["toy-bf16-s1"].losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert runs["toy-bf16-s1"].losses != runs["toy-current-s1"].losses
    assert convergence.run_study([BF16, CURRENT], place) == []  # finished
    mine, other = runs["toy-bf16-s1"].seconds, runs["toy-current-s1"].seconds
    assert predict_seconds(runs, replace(BF16, seed=2)) == 1.1 * mine
    assert predict_seconds(runs, RULED) == 1.1 * max(mine, other)
    runs["toy-bf16-s1"].losses = runs["toy-bf16-s1"].losses[:5]
    assert predict_seconds(runs, BF16) == 1.1 * mine * STEPS / 5


def test_a_variant_trains_by_its_schedule(data: Path, tmp_path: Path) -> None:
    """The file of the run holds the schedule, and its losses are not those of BF16."""
    place = place_of(data, tmp_path)
    assert convergence.run_study([BF16, RULED], place) == ["toy-bf16-s1", "toy-nvfp4-x-s1"]
    plain, ruled = read_runs(place.runs, [BF16, RULED]).values()
    assert ruled.settings["config"]["train"]["rules"] == RULED.schedule.as_toml()
    assert ruled.losses != plain.losses


def test_an_interrupted_run_goes_on(data: Path, tmp_path: Path) -> None:
    whole, cut = place_of(data, tmp_path / "whole"), place_of(data, tmp_path / "cut")
    assert train_entry(CURRENT, whole)
    assert not train_entry(CURRENT, replace(cut, deadline=-math.inf))
    path = cut.runs / "toy-current-s1.jsonl"
    assert len(read_run(path).losses) == 5
    assert convergence.run_study([CURRENT], cut) == ["toy-current-s1"]
    found, wanted = read_run(path), read_run(whole.runs / path.name)
    assert '"kind": "resumed", "step": 5' in path.read_text()
    assert (found.losses, found.held_out) == (wanted.losses, wanted.held_out)


def test_a_run_without_its_checkpoint_begins_anew(data: Path, tmp_path: Path) -> None:
    place = place_of(data, tmp_path)
    assert not train_entry(BF16, replace(place, deadline=-math.inf))
    assert train_entry(BF16, replace(place, scratch=tmp_path / "elsewhere"))
    assert len(read_run(place.runs / "toy-bf16-s1.jsonl").losses) == STEPS


def test_no_run_begins_that_does_not_fit(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = replace(place_of(data, tmp_path), deadline=-math.inf)
    assert convergence.run_study([BF16], place) == []
    assert "toy-bf16-s1 needs about 60 s, and 0 s are left: not begun" in capsys.readouterr().out
    assert not place.runs.exists()


def test_the_list_names_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convergence.main(["--list", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [entry.name for entry in ENTRIES]


def write_result(
    folder: Path, entry: Entry, final: float, held_out: float, speed: float = 1e6, code: str = "c"
) -> None:
    """A finished run whose losses fall to `final`."""
    settings = {"device": "H", "versions": {"torch": "2"}, "started": "2026-01-02T03", "code": code * 64}
    settings["data"] = {"tokens": 10**8, "held_out_tokens": 10**6, "sha256": {"tokens.bin": "d" * 64}}
    losses = [final * (1 + (STEPS - step) / 10) for step in range(STEPS)]
    end = {"final": final, "held_out": held_out, "tokens_per_second": speed, "peak_memory": 2**31, "seconds": 2.0}
    rows = [
        {"kind": "settings", "name": entry.name, **settings},
        {"kind": "steps", "step": STEPS, "seconds": 1.0, "losses": losses, "norms": losses},
        {"kind": "held_out", "step": STEPS // 2, "loss": 2 * held_out},
        {"kind": "held_out", "step": STEPS, "loss": held_out},
        {"kind": "end", **end},
    ]
    (folder / f"{entry.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_page_tells_chance_from_effect(tmp_path: Path) -> None:
    seeds = [replace(BF16, seed=seed) for seed in (1, 2, 3)]
    far = Entry(study=TOY, recipe="nvfp4")
    for entry, final, held_out in zip(seeds, (3.00, 3.04, 3.02), (3.10, 3.12, 3.15), strict=True):
        write_result(tmp_path, entry, final, held_out)
    write_result(tmp_path, CURRENT, 2.97, 3.13, speed=1.5e6)
    write_result(tmp_path, far, 3.10, 3.30, code="e")
    write_result(tmp_path, RULED, 3.05, 3.31)
    entries = [*seeds, CURRENT, far, RULED, Entry(study=TOY, recipe="mxfp8")]
    _convergence_report.write_page(tmp_path / "page.md", tmp_path, entries)
    page = (tmp_path / "page.md").read_text()
    for line in (
        "| toy-bf16-s2 | 3.0400 |  |  | 3.1200 |  |  |",
        "| toy-current-s1 | 2.9700 | -0.0300 | within chance | 3.1300 | +0.0300 | within chance |",
        "| toy-nvfp4-s1 | 3.1000 | +0.1000 | +2.5 bands | 3.3000 | +0.2000 | +4.0 bands |",
        "| toy-mxfp8-s1 | not run yet |  |  |  |  |  |",
        "Band of chance: 0.0400 (final), 0.0500 (held-out). A held-out loss is the mean of 640 tokens.",
        "Within chance in both losses: `toy-current-s1`.",
        "Outside of it in one or both: `toy-nvfp4-s1`, `toy-nvfp4-x-s1`.",
        "| run | gap, 4 steps to 10 | last 4 | held-out gap, step 10 | at the end |",
        "| toy-nvfp4-s1 | +0.2250 | +0.1250 | +0.4000 | +0.2000 |",
        "| toy-nvfp4-x-s1 | +0.1125 | +0.0625 | +0.4200 | +0.2100 |",
        "| toy-current-s1 | 1,500,000 | 1.50 | 2.00 GiB |",
        "| toy-nvfp4-s1 | 1,000,000 |  | 2.00 GiB |",  # no BF16 run has its code
        "- `toy-current-s1`: H, torch 2, 2026-01-02, code `cccccccccccc`, 100,000,000 tokens",
        "](page-toy.png)",
    ):
        assert line in page
    assert (tmp_path / "page-toy.png").read_bytes().startswith(b"\x89PNG")


VARIANTS = {"": "", ", first and last layer in BF16": "-ends-bf16", ", last tenth of the steps in BF16": "-last10-bf16"}


def test_the_page_of_recipes_has_the_gaps_of_the_runs() -> None:
    """Held-out gaps to BF16, by hand in docs/recipes.md."""
    runs = read_runs(RUNS)
    ends = {name: run.end["held_out"] for name, run in runs.items() if run.end is not None}
    text = (RUNS.parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(.*?) \| ([+-]0\.\d{4}) \| [\w. ]+ \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for recipe, variant, gap in rows:
        assert gap == f"{ends[f'125m-{recipe}{VARIANTS[variant]}-s1'] - ends['125m-bf16-s1']:+.4f}"


def test_text_of_files() -> None:
    lines = b"A line of text that people read.\n" * 10
    page = b"<head><title>no</title></head><p>" + lines + b"a &lt; b<script>no</script></p>"
    assert packages.as_text("a.rst", lines) == lines.decode()
    assert packages.as_text("a.html", page) == lines.decode() + "a < b\n"
    for bad in (b"short", lines + b"\xff", b"x" * 2000, b"0 1 2\n" * 100, lines + b"\0"):
        assert packages.as_text("a.txt", bad) is None


def test_shards_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PART", 1000)
    monkeypatch.setattr(shards, "SHARD", 3000)
    source, target, about = tmp_path / "source", tmp_path / "target", tmp_path / "corpus.json"
    source.mkdir()
    np.random.default_rng(0).integers(0, 2**16, 5000, dtype=np.uint16).tofile(source / "tokens.bin")
    (source / "tokenizer.json").write_text("{}")
    names = ("tokens.bin", "tokenizer.json")
    about.write_text(json.dumps({"sha256": {name: tokens.hash_file(source / name) for name in names}}))
    folders = shards.pack(source, tmp_path / "shards", 1)
    assert len(folders) == 5
    assert shards.unpack(folders[1:], target, about) == ["tokens-00-of-05"]
    assert shards.unpack(folders[:1], target, about) == []
    assert (target / "tokens.bin").read_bytes() == (source / "tokens.bin").read_bytes()
    assert sorted(path.name for path in target.iterdir()) == ["corpus.json", "tokenizer.json", "tokens.bin"]
    (target / "tokens.bin").write_bytes(b"00")
    with pytest.raises(ValueError, match="unpack all shards again"):
        shards.unpack([], target, about)


def test_tokens_of_held_out_files_are_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "VOCAB", 300)
    texts = {f"{99 - key:02x}00{key:02x}": f"file number {key} says hello\n" * 3 for key in (9, 2, 5)}
    tokenizer = tokens.train_tokenizer(texts)
    assert tokens.write_tokens(texts, tokenizer, tmp_path / "tokens.bin") == (
        sum(len(tokenizer.encode(texts[key]).ids) + 1 for key in ("5e0005", "5a0009")),
        len(tokenizer.encode(texts["610002"]).ids) + 1,
    )
    found = tokenizer.decode(np.fromfile(tmp_path / "tokens.bin", np.uint16).tolist(), skip_special_tokens=False)
    assert found == "".join(texts[key] + tokens.END for key in ("5e0005", "5a0009", "610002"))
