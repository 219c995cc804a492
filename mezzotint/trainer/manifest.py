"""`checkpoint.json` says what a checkpoint is, and has a hash of each of its files; this module writes and reads it.

    {"kind": "one process", "step": 100, "config": {…}, "files": {"state.pt": {"bytes": 4096, "sha256": "5f1d…"}, …}}

It alone decides what is read, and how: a file that it does not name is ignored. It is written last.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mezzotint.files import FileEntry, write_json

ABOUT = "checkpoint.json"
ONE, SEVERAL = "one process", "several processes"


@dataclass(frozen=True, slots=True)
class About:
    """An `About` holds what a checkpoint says of itself."""

    kind: str  # ONE or SEVERAL: who wrote it
    step: int
    config: Mapping[str, Any]
    files: Mapping[str, FileEntry]


def write_about(folder: Path, about: About) -> None:
    write_json(folder / ABOUT, asdict(about))


def read_about(folder: Path) -> About:
    """Return what `write_about` wrote into this checkpoint's folder.

    Other content, or that of another step, raises a ValueError; a missing file raises an OSError.
    """
    try:
        return _about_of(json.loads((folder / ABOUT).read_text(encoding="utf-8")), folder)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{ABOUT}: {error}") from None


def _about_of(values: Any, folder: Path) -> About:
    _check(values, dict, "it")
    if "bytes" in values and "files" not in values:
        raise ValueError("it was written by an earlier version, and has no hashes of its files")
    if values.keys() != {"kind", "step", "config", "files"}:
        raise ValueError(f"it has {sorted(values)}, not kind, step, config and files")
    kind, step, config = values["kind"], _check(values["step"], int, "step"), _check(values["config"], dict, "config")
    if kind not in (ONE, SEVERAL):
        raise ValueError(f"kind is {kind!r}, neither {ONE!r} nor {SEVERAL!r}")
    if f"step-{step:08d}" != folder.name:
        raise ValueError(f"step is {step}, in a folder called {folder.name}")
    files = {}
    for name, entry in _check(values["files"], dict, "files").items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} in files is no name of a file here")
        if _check(entry, dict, name).keys() != {"bytes", "sha256"}:
            raise ValueError(f"{name} has {sorted(entry)}, not bytes and sha256")
        files[name] = FileEntry(_check(entry["bytes"], int, name), _check(entry["sha256"], str, name))
    return About(kind, step, config, files)


def _check(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:  # `type`, because True is an instance of int
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not {_WORDS[kind]}")
    return value


_WORDS = {dict: "an object", int: "a whole number", str: "text"}
