"""The comparison with the peers runs, and its floors are what they are said to be; no time is looked at."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import _candidates, _profile, peers
from bench._by_hand import LinearByHand
from bench._candidates import BY_DEFAULT, CANDIDATES, Candidate, called
from bench._floors import least_bytes
from bench._peers_cases import Case, linear_cases

pytestmark = pytest.mark.compile


def run(tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert peers.main(["--small", "--json", str(path), *arguments]) == code
    return json.loads(path.read_text())


def test_linear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figure = tmp_path / "out.md", tmp_path / "out.png"
    asked = ("--parts", "a,c", "--shapes", "32x64x96", "--recipes", "torchao-rowwise,current")
    report = run(tmp_path, *asked, "--markdown", str(page), "--figure", str(figure))
    names = ["bf16", "torchao-rowwise", "current", "bf16-again"]
    rows = {(row["mode"], row["candidate"]): row for row in report["rows"]}
    assert list(rows) == [(mode, name) for mode in ("eager", "compiled") for name in names]
    for (mode, name), row in rows.items():
        assert row["case"] == "32x64x96"
        assert row["ratio"] == rows[mode, "bf16"]["ms"] / row["ms"]
        assert row["tflops"] == pytest.approx(6 * 32 * 64 * 96 / row["ms"] / 1e9)
        assert row.get("graphs") == (1 if mode == "compiled" and name != "bf16-again" else None)
        assert row.get("products") == (3 if name in ("bf16", "current") else None)
    current = rows["eager", "current"]
    assert current["floor_ms"] > current["gemm_ms"]
    assert current["of_floor"] == current["ms"] / current["floor_ms"]
    assert rows["eager", "bf16"]["floor_ms"] == rows["eager", "bf16"]["gemm_ms"]
    assert report["quantize"]["rows"]
    assert "these times say that everything runs" in capsys.readouterr().out
    assert f"| current | {rows['compiled', 'current']['ratio']:.2f} |" in page.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_by_hand_is_a_linear_in_fp8() -> None:
    """Close to BF16's output and gradients, and left out unless it is asked for."""
    assert not [name for name in BY_DEFAULT if name.startswith("by-hand")]
    torch.manual_seed(0)
    x, dy = torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16()
    for dynamic in (True, False):
        linear = LinearByHand(32, 48, "cpu", dynamic)
        leaf = x.clone().requires_grad_()
        y = linear(leaf)
        y.backward(dy)
        weight = linear.weight.detach().float()
        wanted = x.float() @ weight.t(), dy.float() @ weight, dy.float().t() @ x.float()
        for got, want in zip((y, leaf.grad, linear.weight.grad), wanted, strict=True):
            assert got is not None
            assert (got.float() - want).norm() < 0.08 * want.norm()


@pytest.mark.slow
def test_layers_and_experts(tmp_path: Path) -> None:
    report = run(tmp_path, "--parts", "b,d", "--recipes", "delayed", "--modes", "eager")
    rows = {(row["case"], row["candidate"]): row for row in report["rows"]}
    assert list(rows) == [
        *(
            (case, name)
            for case in ("1 layer", "1 layer, converted", "4 micro-batches")
            for name in ("bf16", "delayed", "bf16-again")
        ),
        *(
            (f"8 experts, {case}", name)
            for case in ("balanced", "ragged")
            for name in ("bf16", "bf16-loop", "delayed", "bf16-again")
        ),
    ]
    for case in ("1 layer", "4 micro-batches"):
        assert rows[case, "delayed"]["products"] == 4 * 3  # qkv, projection, gate and up, down
    # One call for all experts, each way.
    assert rows["8 experts, ragged", "delayed"]["products"] == 3
    base = rows["8 experts, ragged", "bf16"], rows["8 experts, ragged", "bf16-loop"]
    assert max(row["ratio"] for row in base) == 1.0


@pytest.mark.slow
def test_micro_batches_compile_to_two_graphs() -> None:
    """One quantizes the weights, one uses them."""
    (case,) = linear_cases([(32, 32, 32)], "cpu")
    bench = peers.Bench("cpu", "aot_eager", 1, math.inf)
    chosen = [CANDIDATES["bf16"], CANDIDATES["current"]]
    (rows,) = bench.measure(dataclasses.replace(case, micro_batches=4), ["compiled"], chosen)
    assert [row.get("graphs") for row in rows] == [1, 2, None]
    assert rows[1]["products"] == 3  # those of one micro-batch, whose time counts four times


def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU launches no kernels, but the code of graphs takes time, of two graphs, forward and backward, and what is
    around it takes more."""
    asked = ("--parts", "a", "--shapes", "32x32x32", "--recipes", "", "--profile", "--backend", "inductor")
    rows = {(row["mode"], row["candidate"]): row for row in run(tmp_path, *asked)["rows"]}
    assert "launches" not in rows["eager", "bf16"]
    assert "code_ms" not in rows["eager", "bf16"]
    assert 0.0 < rows["compiled", "bf16"]["code_ms"] < rows["compiled", "bf16"]["host_ms"] < 1e3
    assert "code_ms" not in rows["compiled", "bf16-again"]
    shown = capsys.readouterr().out
    assert "code ms" in shown
    assert "floor ms" in shown
    run(tmp_path, *asked[:6], "--modes", "eager")
    assert "code ms" not in capsys.readouterr().out


@pytest.mark.gpu
def test_kernels() -> None:
    x = torch.ones(1 << 20, device="cuda")
    found = _profile.kernels(lambda: x.mul_(2).add_(1), 0.02)
    assert found.launches == pytest.approx(2.0)
    assert 0.0 < found.ms < 1.0
    assert found.idle_ms > 0.0


def test_a_budget_leaves_the_rest_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(tmp_path, "--parts", "a", "--budget", "0", "--recipes", "mxfp8")["rows"]
    assert rows
    assert all(row["left_out"] == "the budget is spent" and "ms" not in row for row in rows)
    assert "mxfp8: the budget is spent (64x64x96 eager, 64x64x96 compiled, 32x32x32 eager" in capsys.readouterr().out


def test_who_fails_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Candidate.build

    def build(self: Candidate, models: Any) -> Any:
        if self.name == "block":
            raise RuntimeError("no such kernel")
        return made(self, models)

    monkeypatch.setattr(_candidates, "quiet_import", lambda: False)
    monkeypatch.setattr(Candidate, "build", build)
    asked = ("--parts", "a", "--modes", "eager", "--shapes", "32x32x32", "--recipes", "block,torchao-rowwise,current")
    rows = {row["candidate"]: row for row in run(tmp_path, *asked, code=1)["rows"]}
    assert rows["torchao-rowwise"]["left_out"] == "torchao is not installed"
    assert rows["block"]["error"] == "RuntimeError: no such kernel"
    assert rows["current"]["ratio"] > 0
    assert "block: RuntimeError: no such kernel (32x32x32 eager)" in capsys.readouterr().out


def test_what_was_measured_apart_is_shown_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--parts", "a", "--recipes", "current", "--modes", "eager", "--one-thread", "--shapes")
    paths = []
    for shape in ("32x32x32", "32x32x64"):
        run(tmp_path, *asked, shape)
        paths.append(str((tmp_path / "out.json").rename(tmp_path / f"{shape}.json")))
    capsys.readouterr()
    assert peers.main(["--load", ",".join(paths)]) == 0
    shown = capsys.readouterr().out
    assert "32x32x32" in shown
    assert "32x32x64" in shown
    assert "backward in one thread" in shown
    assert torch._C._is_multithreading_enabled()  # as before
    again = json.loads(Path(paths[0]).read_text())
    again["date"], again["rows"] = "2001-02-03", [row | {"ms": 12345.678} for row in again["rows"]]
    again["rows"][0]["candidate"] = "bf16-loop"
    (tmp_path / "again.json").write_text(json.dumps(again))
    report = peers.load([*paths, str(tmp_path / "again.json")])
    assert [row["candidate"] for row in report["rows"] if row["ms"] == 12345.678] == ["bf16-loop"]
    assert report["date"].startswith("2001-02-03 and ")
    changed = json.loads(Path(paths[1]).read_text()) | {"torch": "1.0"}
    Path(paths[1]).write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match=r"torch is 1\.0 in .*32x32x64"):
        peers.main(["--load", ",".join(paths)])


@pytest.mark.parametrize(
    ("name", "each"), [("delayed", 4), ("current", 6), ("rowwise", 6), ("block", 4), ("mxfp8", 4), ("nvfp4", 5)]
)
def test_least_bytes(name: str, each: int) -> None:
    """Bytes an element of x, weight and gradient, beside scales, of which NVFP4 has most: one byte for 16 elements."""
    m, k, n = 512, 1024, 2048
    elements = m * k + n * k + m * n
    scales = least_bytes(name, m, k, n) - each * elements
    assert 0 < scales <= elements * 2 / 16 + 64
    assert least_bytes("bf16", m, k, n) == 0


def test_compiled_candidates_share_no_code() -> None:
    linears = [torch.nn.Linear(4, 4) for _ in range(2)]
    codes = [called(linear, "compiled", "eager").__wrapped__.__code__ for linear in linears]
    assert codes[0] is not codes[1]  # though they are equal


def test_names() -> None:
    assert list(CANDIDATES)[:2] == ["bf16", "bf16-loop"]
    with pytest.raises(SystemExit, match=r"--recipes: there is no 'fp3'; give some of bf16"):
        peers.main(["--small", "--recipes", "fp3"])
    with pytest.raises(SystemExit, match=r"--shapes: '16x16' is no size"):
        peers.main(["--small", "--shapes", "16x16"])


class Event:
    """In the place of a CUDA event."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 1.0
        self.at = Event.clock

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of CUDA, and what is made of the answers; the models stay on the CPU."""
    memory = iter(range(0, 1000, 10))
    for name, answer in {
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(memory),
        "max_memory_allocated": lambda: 1000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    (case,) = linear_cases([(32, 32, 32)], "cpu")
    made = case.inputs("cpu")
    monkeypatch.setattr(Case, "inputs", lambda self, device: made)
    bench = peers.Bench("cuda", "aot_eager", 3, math.inf)
    (rows,) = bench.measure(case, ["eager"], [CANDIDATES["bf16"], CANDIDATES["current"]])
    assert [row["ms"] for row in rows] == [1.0] * 3
    assert [(row["held"], row["peak"]) for row in rows[:2]] == [(10, 1000), (10, 980)]
    assert rows[1]["floor_ms"] == 1.0 + rows[1]["least_bytes"] / (2 * made[0][0].nbytes)
