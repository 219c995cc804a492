"""Files and folders that are written completely or not at all, whatever else lies in their place.

What is written goes under another name first. These names are known beforehand, so somebody may have put a link there:
it is removed, and never followed.
"""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def write_durably(path: Path, data: bytes) -> None:
    """Write all of the data or nothing, even if the machine stops."""
    aside = path.with_name(f".{path.name}.writing")
    remove(aside)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
        file.write(data)
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to be read or written in place; NumPy is not needed."""
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # the memory stays while the view does
    return memoryview(array).cast("B")


def write_json(path: Path, value: Any) -> None:
    write_durably(path, (json.dumps(value, indent=1) + "\n").encode())


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if there is one. Of a link, only the link is removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A `FileEntry` describes a file as it was written."""

    bytes: int
    sha256: str


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return the entries of files that have been written."""
    return {name: FileEntry((folder / name).stat().st_size, hash_of(folder / name)) for name in names}


def check_files(folder: Path, files: Mapping[str, FileEntry], names: Iterable[str]) -> None:
    """Raise a ValueError, or an OSError, unless these files are as they were written, bit for bit."""
    for name in names:
        found = (folder / name).stat().st_size
        if found != files[name].bytes:
            raise ValueError(f"{name} has {found} bytes of {files[name].bytes}")
        if hash_of(folder / name) != files[name].sha256:
            raise ValueError(f"{name} is not as it was written: its SHA-256 is another")
