"""The answer to `importlib.metadata.version("transformer-engine")`, which programs ask for before they import it."""

import sys
from collections.abc import Iterable
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any

DISTRIBUTION = "transformer-engine"
LOCAL = "+mezzotint"  # the local part of the alias's and the shim's version; no Transformer Engine build has it


class AliasDistribution(metadata.Distribution):
    """This distribution has no files: it has a name, a version, and who provides it."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = f"{self._version}{LOCAL}"
        return f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\nSummary: Provided by Mezzotint\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


class AliasFinder:
    """This finder finds that distribution, and no module."""

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: metadata.DistributionFinder.Context) -> Iterable[metadata.Distribution]:
        asked = (context.name or "").lower().replace("_", "-").replace(".", "-")
        return [AliasDistribution(self.version)] if asked == DISTRIBUTION else []


def is_ours(distribution: metadata.Distribution) -> bool:
    """Return whether a distribution is the alias or the shim, and not Transformer Engine itself."""
    return distribution.version.endswith(LOCAL)


def announce(version: str) -> None:
    """Let `importlib.metadata` find the distribution, unless the shim is installed, which has files of its own."""
    if any(isinstance(each, AliasFinder) for each in sys.meta_path):
        return
    if not any(is_ours(each) for each in metadata.distributions(name=DISTRIBUTION)):
        sys.meta_path.insert(0, AliasFinder(version))
