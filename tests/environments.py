"""Python environments that hold chosen packages and nothing else; what is installed here is linked, not downloaded."""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def with_requirements(names: Iterable[str]) -> dict[str, Distribution]:
    """The packages, and all that they ask for, by their names; what is not installed here is left out."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        try:
            package = distribution(waiting.pop())
        except PackageNotFoundError:  # a package of another platform's
            continue
        if package.name in found:
            continue
        found[package.name] = package
        asked = [Requirement(text) for text in package.requires or ()]
        waiting += [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link_packages(folder: Path, names: Iterable[str]) -> None:
    """Put links to the packages, and to all that they ask for, into a folder that Python imports from."""
    for package in with_requirements(names).values():
        for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))


def make_environment(folder: Path, names: Iterable[str]) -> Path:
    """The interpreter of a new virtual environment, without pip, that has these packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    link_packages(next(folder.glob("lib/python*/site-packages")), names)
    return folder / "bin" / "python"


def install(python: Path, *wheels: Path) -> None:
    """Install wheels; what they ask for must be there, since nothing is looked up elsewhere."""
    command = [sys.executable, "-m", "pip", "--isolated", "--python", python, "install", "--quiet", "--no-index"]
    # On PYTHONPATH, a clone that was built in has metadata, by which pip would take the wheel for installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run([*command, *wheels], env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
