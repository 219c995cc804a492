"""`mezzotint doctor`: right on this machine, and not silent where something is wrong."""

import json

import pytest
import torch

from mezzotint import hw
from mezzotint.cli import doctor as module
from mezzotint.formats import FORMATS
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.recipes import COMMAND_RECIPES
from tests.cli.tools import run, works

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow  # each compiles by Inductor
@pytest.mark.compile
def test_every_recipe_is_right_here(capsys: Capture) -> None:
    """Eager and compiled, by the compiler that users have."""
    report = json.loads(works(capsys, "doctor", "--json", "--device=cpu"))
    assert report["is_good"]
    assert report["device"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    assert {"python", "triton", "CUDA of torch", "driver"} <= report["versions"].keys()
    checks = report["checks"]
    assert [(check["recipe"], check["mode"]) for check in checks] == [
        (name, mode) for name in COMMAND_RECIPES for mode in ("eager", "compiled")
    ]
    for check in checks:
        assert check["same_bits"] is (True if check["mode"] == "compiled" else None)
        for product, error in check["errors"].items():
            # A bound that is far above what is seen would see nothing.
            assert check["bounds"][product] / 4 < error <= check["bounds"][product]
    assert "Blackwell" in report["untried"]
    rows = [hw.Row(**row) for row in report["formats"]]
    assert rows == hw.report(None)


def test_tables(capsys: Capture) -> None:
    said = works(capsys, "doctor", "--no-compile", "--device=cpu")
    for word in (*COMMAND_RECIPES, *FORMATS, "reference", torch.__version__, "Blackwell", "Not run on hardware"):
        assert word in said
    assert "compiled" not in said.split("one Linear")[1].split("Not run")[0]
    assert said.splitlines()[-1].startswith("`mezzotint compare` trains a small model")


def test_wrong_numbers_are_found(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._run

    def run_off(recipe: object, device: torch.device, mode: str) -> object:
        made, wanted = real(recipe, device, mode)  # type: ignore[arg-type]
        if recipe is COMMAND_RECIPES["mxfp8"]:
            made["wgrad"] = made["wgrad"] * 1.2
        if recipe is COMMAND_RECIPES["block"]:
            made["fprop"] = made["fprop"] * float("nan")
        return made, wanted

    monkeypatch.setattr(module, "_run", run_off)
    outcome = run(capsys, "doctor", "--no-compile", "--device=cpu", "--json")
    assert outcome.code == 1
    report = json.loads(outcome.out)
    assert [check["recipe"] for check in report["checks"] if not check["is_good"]] == ["block", "mxfp8"]
    outcome = run(capsys, "doctor", "--no-compile", "--device=cpu")
    assert outcome.code == 1
    assert outcome.out.count("WRONG") == 2
    assert "mxfp8, eager: wgrad is off by 0." in outcome.out
    assert "block, eager: fprop is off by nan, the bound is 0.0884" in outcome.out
    assert "Do not train in block, mxfp8 here: the numbers are wrong." in outcome.out


def test_what_raises_is_told(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: object, device: torch.device, mode: str) -> object:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(module, "_run", fail)
    outcome = run(capsys, "doctor", "--no-compile", "--device=cpu", "--json")
    assert outcome.code == 1
    report = json.loads(outcome.out)
    assert {check["problem"] for check in report["checks"]} == {"RuntimeError: no such kernel"}
    assert report["next"][0] == "Mend this first: RuntimeError: no such kernel."


def test_bits_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._run

    def run_off(recipe: object, device: torch.device, mode: str) -> object:
        made, wanted = real(recipe, device, "eager")  # type: ignore[arg-type]
        if mode == "compiled":
            made["fprop"] = made["fprop"] * 1.01
        return made, wanted

    monkeypatch.setattr(module, "_run", run_off)
    eager, compiled = module.run_checks("mxfp8", torch.device("cpu"), True)
    assert eager.is_good
    assert not compiled.is_good
    assert compiled.same_bits is False


def test_a_missing_compiler_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> None:
        raise CommandError("install g++")

    monkeypatch.setattr(module, "check_compiler", missing)
    _, compiled = module.run_checks("bf16", torch.device("cpu"), True)
    assert compiled.problem == "install g++"
    assert not compiled.is_good


@pytest.mark.gpu
@pytest.mark.compile
def test_every_recipe_is_right_on_the_gpu(capsys: Capture) -> None:
    report = json.loads(works(capsys, "doctor", "--json", "--device=cuda"))
    assert report["is_good"]
    assert report["device"] == torch.cuda.get_device_name()
