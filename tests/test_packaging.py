"""What an install of the package is made of."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

import mezzotint
from mezzotint.cli.extra import EXTRA
from tests.cli.tools import TINY
from tests.environments import install, link_packages, make_environment

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the build reads, with a package of the same outline: a build writes beside it."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("mezzotint", "mezzotint/kernels", "tests", "bench", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "mezzotint/__init__.py").write_text('__version__ = "1.2.3"')
    (tmp_path / "mezzotint/py.typed").touch()
    return tmp_path


def build(project: Path, hook: str) -> Path:
    """The file that a hook of the build back end makes, as pip calls it."""
    out = project / "out"
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out / run.stdout.splitlines()[-1]


def test_an_editable_install_is_a_plain_path(project: Path) -> None:
    """Type checkers and editors read the lines of a .pth file that are folders; they run no import hook."""
    with zipfile.ZipFile(build(project, "build_editable")) as wheel:
        paths = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert not [name for name in wheel.namelist() if name.endswith(".py")]
        lines = [line for name in paths for line in wheel.read(name).decode().split("\n") if line]
    assert [Path(line) for line in lines] == [project]
    assert (ROOT / "mezzotint/py.typed").exists()


def test_a_wheel_has_the_package_and_nothing_else(project: Path) -> None:
    path = build(project, "build_wheel")
    assert path.name == "mezzotint-1.2.3-py3-none-any.whl"  # the version is the package's own
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {"mezzotint/__init__.py", "mezzotint/kernels/__init__.py", "mezzotint/py.typed"}


def test_torch_is_all_that_the_library_needs() -> None:
    """Packages of the extra are imported by the command line, and by functions that say what to install."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [Requirement(text).name for text in described["dependencies"]] == ["torch"]
    assert {Requirement(text).name for text in described["optional-dependencies"]["cli"]} == set(EXTRA)


def test_the_changelog_begins_with_this_version() -> None:
    first = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    version, _, when = first.partition(", ")
    assert version == mezzotint.__version__
    assert when == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", when)


class Installed(NamedTuple):
    """An environment with torch and the wheels, and a folder with the packages of the extra."""

    python: Path
    extra: Path

    def run(
        self, *arguments: object, warnings: tuple[str, ...] = ("error",), has_extra: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter outside of the clone, with warnings that are errors."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        added = {"PYTHONPATH": str(self.extra)} if has_extra else {}
        filters = [option for each in warnings for option in ("-W", each)]
        return subprocess.run(
            [self.python, *filters, *map(str, arguments)],
            cwd=self.extra.parent,
            env={**kept, **added, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def copy_tree(folder: Path) -> Path:
    """What a clone has of the package, without what other builds have left there."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "mezzotint", folder / "mezzotint", ignore=ignore)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    shim = ROOT / "packages/transformer-engine-shim"
    shutil.copytree(shim, folder / "shim", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    with tarfile.open(build(tree, "build_sdist")) as sources:
        sources.extractall(folder, filter="data")
    wheel = build(folder / f"mezzotint-{mezzotint.__version__}", "build_wheel")
    assert contents(wheel) == contents(build(tree, "build_wheel"))  # those of the sdist and of the clone
    python = make_environment(folder / "env", ["torch"])
    install(python, wheel, build(tree / "shim", "build_wheel"))
    (folder / "extra").mkdir()
    link_packages(folder / "extra", EXTRA)
    return Installed(python, folder / "extra")


# torch says this itself, as soon as it is imported where NumPy is absent.
NO_NUMPY = ("error", "ignore:Failed to initialize NumPy:UserWarning")
ABSENT = "import importlib.util as u; print([name for name in {names} if u.find_spec(name) is not None])"
SHIM = """
import torch, transformer_engine, transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
torch.manual_seed(0)
layer, x = te.Linear(64, 64, device="cpu"), torch.randn(32, 64)
optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.05), []
for _ in range(6):
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=4)):
        loss = (layer(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(transformer_engine.__provided_by__)
"""


@pytest.mark.slow  # builds, installs, and imports torch in six processes
def test_an_installed_wheel_trains(installed: Installed, tmp_path: Path) -> None:
    """Beside torch alone, without a warning, with the bits of the clone; and with the extra on the command line."""
    assert installed.run("-c", ABSENT.format(names=EXTRA)).stdout == "[]\n"
    program = ROOT / "tests/train_installed.py"
    made = [tmp_path / name for name in ("wheel", "clone")]
    for folder in made:
        folder.mkdir()
    found = installed.run(program, made[0], warnings=NO_NUMPY)
    assert found.returncode == 0, found.stderr
    version, losses, *rest = re.fullmatch(r"(\S+) (\[.*\]) (\d+) (\w+)\n", found.stdout).groups()  # type: ignore[union-attr]
    assert (version, *rest) == (mezzotint.__version__, "7", "True")
    first, *_, last = [float.fromhex(loss) for loss in ast.literal_eval(losses)]
    assert last < first / 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, made[1]]
    same = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert same.stdout == found.stdout, same.stderr
    for name in ("inspect/figures.jsonl", "page.html", "served/model.safetensors"):
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes(), name

    assert installed.run("-c", SHIM, warnings=NO_NUMPY).stdout == f"mezzotint {mezzotint.__version__}\n"


@pytest.mark.slow
def test_the_command_line_of_an_installed_wheel(installed: Installed, tmp_path: Path) -> None:
    without = installed.run(installed.python.with_name("mezzotint"), "doctor")
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == "mezzotint: typer is not installed: pip install 'mezzotint[cli]'\n"
    options = [each for each in TINY if each != "--no-compile"]
    trained = installed.run(
        "-m", "mezzotint", "train", "--recipe=mxfp8", "--steps=3", "--no-compile", f"--out={tmp_path}/run", *options,
        has_extra=True,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert (trained.stderr, trained.stdout.splitlines()[-1]) == ("", f"run in {tmp_path}/run")
