"""The program: what it lists, one-line errors, and what it takes from outside."""

import ast
import re
from pathlib import Path

import pytest

import mezzotint
from mezzotint.cli.console import EXTRA
from mezzotint.cli.recipe_names import recipe_name, recipe_names
from mezzotint.cli.recipes import RECIPES
from mezzotint.cli.settings import TrainConfig
from tests.cli.tools import ROOT, fails, run_python, works

COMMANDS = ("train", "compare", "doctor", "plan", "bench")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    said = works(capsys, *arguments)
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("name", ["train", "compare", "doctor", "plan"])
def test_help_of_a_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = works(capsys, name, "--help")
    assert "--help" in said
    # Where a model is named, its sizes are not those of the one that is trained by default.
    assert ("(128)" in said) == (name in ("train", "compare"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frobnicate",), "frobnicate"),
        (("train", "--frobnicate"), "frobnicate"),
        (("train", "--steps", "many"), "--steps"),
        (("train", "--steps", "0"), "--steps is 0: give 1 or more"),
        (("train", "--lr", "nan"), "--lr is nan"),
        (("train", "--seed", str(2**64)), "give less than 2^64"),
        (("train", "--recipe", "fp16"), "give one of bf16, delayed"),
        (("train", "--heads", "3"), "give a multiple of heads=3"),
        (("train", "--kv-heads", "3"), "give a divisor of heads=4"),
        (("train", "--hidden", "60", "--heads", "4"), "even"),
        (("train", "--model", "gpt5"), "there is no model 'gpt5'"),
        (("train", "--device", "tpu"), "give auto, cpu or cuda"),
        (("train", "--resume"), "--resume --out runs/train-001"),
        (("train", "--resume", "--overwrite"), "give one of them"),
        (("compare", "--recipes", "bf16,fp16"), "'fp16'"),
        (("compare", "--recipes", ","), "no recipe"),
        (("plan",), "mezzotint plan --help"),
        (("plan", "llama3-8b", "--recipes", "fp16"), "'fp16'"),
        (("plan", "llama3-8b", "--params-dtype", "int8"), "float32 or bfloat16"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_the_system_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(13, "Permission denied", "runs")

    monkeypatch.setattr("mezzotint.cli.plan.find_model", refuse)
    assert "Permission denied: 'runs'" in fails(capsys, "plan", "tiny", code=1)


LIGHT = """
import runpy, sys
sys.argv = {argv!r}
sys.orig_argv = [sys.executable, *{asked!r}]
try:
    {start}
except SystemExit as end:
    print("code", end.code or 0)
heavy = [name for name in ("torch", "numpy", "matplotlib", "tensorboard", "safetensors") if name in sys.modules]
assert not heavy, heavy
"""
AS_MODULE = "runpy._run_module_as_main('mezzotint')"
AS_SCRIPT = "from mezzotint.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--help",), "doctor", 0),
        (("train", "--help"), "--accumulate", 0),
        (("--version",), "mezzotint ", 0),
        (("trian",), "No such command 'trian'", 2),
        (("train", "--stesp=3"), "No such option", 2),
    ],
)
def test_what_computes_nothing_imports_no_torch(
    as_module: bool, arguments: tuple[str, ...], said: str, code: int
) -> None:
    argv = ["-m" if as_module else "/somewhere/bin/mezzotint", *arguments]
    asked = ["-m", "mezzotint", *arguments] if as_module else argv
    made = run_python(LIGHT.format(argv=argv, asked=asked, start=AS_MODULE if as_module else AS_SCRIPT))
    assert made.returncode == 0, made.stderr
    assert said in made.stdout + made.stderr
    assert f"code {code}" in made.stdout


def test_the_command_line_has_the_public_names_when_it_needs_them() -> None:
    """Where `import mezzotint` is light, its names come on demand; and a command registers what importing does."""
    code = """
import sys
sys.argv = ["mezzotint"]
import mezzotint
assert "torch" not in sys.modules
assert not hasattr(mezzotint, "_nothing")
assert not hasattr(mezzotint, "nothing")
assert mezzotint.Linear.__name__ == "Linear"
from mezzotint import MXFP8Quantizer, recipe
import torch
from mezzotint.tensor.quantizer import rebuild_quantizer
assert rebuild_quantizer in torch.serialization.get_safe_globals()
"""
    made = run_python(code)
    assert made.returncode == 0, made.stderr


def test_importing_the_package_gives_all_of_it() -> None:
    names: dict[str, object] = {}
    exec("from mezzotint import *", names)
    assert set(mezzotint.__all__) <= set(names)
    assert set(mezzotint.__all__) <= set(dir(mezzotint))
    assert mezzotint.__version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"^mezzotint \S+\ntorch \d", works(capsys, "--version"))


@pytest.mark.parametrize("asked", ["MXFP8", "Mxfp8", "MXFP8BlockScaling", "mxfp8blockscaling"])
def test_recipes_in_any_case(asked: str) -> None:
    assert recipe_name(asked) == TrainConfig(recipe=asked).recipe == "mxfp8"
    assert recipe_names(f"BF16,{asked},mxfp8") == ["bf16", "mxfp8"]
    assert recipe_names("ALL") == list(RECIPES)


def test_the_extra_is_needed_by_the_command_line_alone() -> None:
    """`import mezzotint` does not load it; without it a command says what to install."""
    code = f"""
import sys
import mezzotint
loaded = [name for name in (*{EXTRA}, "mezzotint.cli") if name in sys.modules]
assert not loaded, loaded
for name in {EXTRA}:
    kept = dict(sys.modules)
    sys.modules[name] = None
    from mezzotint.cli.main import main
    assert main(["compare"]) == 2
    for added in set(sys.modules) - set(kept):
        if added.startswith("mezzotint.cli") or added.startswith("torch.utils.tensorboard"):
            del sys.modules[added]
    del sys.modules[name]
"""
    made = run_python(code)
    assert made.returncode == 0, made.stderr
    wanted = [f"mezzotint: {name} is not installed: pip install 'mezzotint[cli]'" for name in EXTRA]
    assert made.stderr.splitlines() == wanted


def test_only_the_command_line_imports_the_extra() -> None:
    found = []
    for path in (ROOT / "mezzotint").rglob("*.py"):
        if "cli" in path.relative_to(ROOT / "mezzotint").parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            found += [f"{path}: {name}" for name in names if name.split(".")[0] in EXTRA]
    assert found == []
