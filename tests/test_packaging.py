"""What an install of the package is made of."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    (tmp_path / "mezzotint/py.typed").touch()
    return tmp_path


def build(project: Path, hook: str) -> zipfile.ZipFile:
    """The wheel that a hook of the build back end makes, as pip calls it."""
    out = project / "out"
    out.mkdir()
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return zipfile.ZipFile(out / run.stdout.splitlines()[-1])


def test_an_editable_install_is_a_plain_path(project: Path) -> None:
    """Type checkers and editors read the lines of a .pth file that are folders; they run no import hook."""
    with build(project, "build_editable") as wheel:
        paths = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert not [name for name in wheel.namelist() if name.endswith(".py")]
        lines = [line for name in paths for line in wheel.read(name).decode().split("\n") if line]
    assert [Path(line) for line in lines] == [project]
    assert (ROOT / "mezzotint/py.typed").exists()


def test_a_wheel_has_the_package_and_nothing_else(project: Path) -> None:
    with build(project, "build_wheel") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {"mezzotint/__init__.py", "mezzotint/kernels/__init__.py", "mezzotint/py.typed"}
