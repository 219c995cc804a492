"""The program: what it lists, one-line errors, and what it takes from outside."""

import ast
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import mezzotint
from mezzotint.cli.extra import EXTRA
from mezzotint.cli.main import main
from mezzotint.trainer.console import make_console
from mezzotint.trainer.progress import Reporter
from mezzotint.trainer.recipe_names import recipe_name, recipe_names
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.settings import TrainConfig
from tests.cli.tools import ROOT, fails, run_python, works

COMMANDS = ("train", "compare", "inspect", "export", "verify", "doctor", "plan", "bench")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    said = works(capsys, *arguments)
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("name", ["train", "compare", "export", "verify", "doctor", "plan"])
def test_help_of_a_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = works(capsys, name, "--help")
    assert "--help" in said
    # Where a model is named, its sizes are not those of the one that is trained by default.
    assert ("[default: 128]" in " ".join(said.replace("│", " ").split())) == (name in ("train", "compare"))


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
        (("train", "--data", ""), "--data is empty"),
        (("train", "--out", ""), "--out is empty"),
        (("train", "--model", ""), "--model is empty"),
        (("train", "--resume", "--out", ""), "--out is empty"),
        (("compare", "--out", ""), "--out is empty"),
        (("compare", "--model", ""), "--model is empty"),
        (("plan", ""), "--model is empty"),
        (("train", "--steps", str(2**63)), f"--steps is {2**63}: give less than 2^31"),
        (("train", "--batch", str(10**30)), "--batch is 1.0e+30: give less than 2^31"),
        (("train", "--hidden", "9" * 400), "--hidden is more than 1e300: give less"),
        (("train", "--threads", str(10**9)), "--threads is 1000000000: give less than 2^12"),
        (("train", "--lr", "inf"), "--lr is inf: give a finite number"),
        (("train", "--timeout", str(10**30)), "--timeout"),
        (("plan", "tiny", "--layers", str(2**63)), "give less than 2^20"),
        (("plan", "tiny", "--world", str(2**63)), "give less than 2^17"),
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
    def refuse(*given: object) -> None:
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
    assert recipe_names("ALL") == list(COMMAND_RECIPES)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "there is no recipe 'nonsense'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "there is no recipe 'nonsense'"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "RANK is 'one', which is no number"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "localhost"}, "WORLD_SIZE is 'two', which is no number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "RANK is '-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "RANK is 2 of WORLD_SIZE 2: start the ranks"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "LOCAL_RANK": "x"},
            "LOCAL_RANK is 'x', which is no number",
        ),
    ],
)
def test_variables_of_a_launcher(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    said: str,
) -> None:
    """What makes no world of processes silences nobody."""
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in fails(capsys, "train", "--recipe", "nonsense")


@pytest.fixture
def terabyte() -> Iterator[None]:
    """An address space of 1 TiB: some machines promise any amount of memory, and kill the process that uses it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("terabyte")
def test_memory_of_a_cpu_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = fails(capsys, "train", f"--hidden={2**20}", f"--ffn={2**20}", "--no-compile", f"--out={out}", code=1)
    assert "this machine has too little memory: lower --batch" in said
    assert not out.exists()
    huge = ("--batch", 2**30, "--sequence", 2**30, "--recipes=bf16")
    assert "a tensor would have 2^63 bytes or more" in fails(capsys, "plan", "tiny", *huge, code=1)


def test_memory_that_python_asks_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mezzotint.cli.plan.find_model", refuse)
    assert "this machine has too little memory" in fails(capsys, "plan", "tiny", code=1)


def closed_pipe() -> TextIO:
    """What writes where nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize("arguments", [("plan", "tiny", "--recipes=bf16", "--json"), ("--help",)])
def test_output_that_nobody_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Quiet, and nothing is left for Python to complain of at its end."""
    with closed_pipe() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(arguments) == 128 + signal.SIGPIPE
        pipe.flush()
    assert capsys.readouterr().err == ""


def test_a_program_that_a_notebook_starts_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter gives a program a terminal that cannot move the cursor, and sets a variable that says whose it is."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    for variables, has_bar in (({}, True), ({"JPY_PARENT_PID": "7"}, False), ({"TERM": "dumb"}, False)):
        with monkeypatch.context() as patched:
            patched.delenv("JPY_PARENT_PID", raising=False)
            for name, value in variables.items():
                patched.setenv(name, value)
            patched.setattr(sys, "stdout", Terminal())
            with Reporter(make_console(), "bf16", 2, 0) as reporter:
                reporter.advance()
                reporter.show(1, 2.5, None)
            said = sys.stdout.getvalue()
        assert ("\x1b[" in said) == has_bar
        assert ("bf16  step 1/2  loss 2.5000\n" in said) != has_bar


@pytest.mark.slow
def test_the_extra_is_needed_by_the_command_line_alone() -> None:
    """`import mezzotint` does not load it; without it a command says what to install."""
    names = [name for name in EXTRA if name != "numpy"]  # torch imports it where it is there
    code = f"""
import sys
import mezzotint
loaded = [name for name in (*{names}, "mezzotint.cli") if name in sys.modules]
assert not loaded, loaded
for name in {names}:
    kept = dict(sys.modules)
    sys.modules[name] = None
    from mezzotint.cli.main import main
    assert main(["compare"]) == 2
    for added in set(sys.modules) - set(kept):
        if added.startswith(("mezzotint.cli", "mezzotint.trainer", "torch.utils.tensorboard")):
            del sys.modules[added]
    del sys.modules[name]
"""
    made = run_python(code)
    assert made.returncode == 0, made.stderr
    wanted = [f"mezzotint: {name} is not installed: pip install 'mezzotint[cli]'" for name in names]
    assert made.stderr.splitlines() == wanted


def test_only_the_command_line_imports_the_extra() -> None:
    found = []
    for path in (ROOT / "mezzotint").rglob("*.py"):
        if path.relative_to(ROOT / "mezzotint").parts[0] in ("cli", "trainer"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            found += [f"{path}: {name}" for name in names if name.split(".")[0] in EXTRA]
    assert found == []
