"""Files and folders that are whole or not there, whatever else lies in their place.

What is written goes under another name first. Names are known beforehand, so somebody may have put a link there: it is
removed, and never followed.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any


def write_durably(path: Path, data: bytes) -> None:
    """All of it or nothing, also when the machine stops."""
    aside = path.with_name(f".{path.name}.writing")
    remove(aside)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
        file.write(data)
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_durably(path, (json.dumps(value, indent=1) + "\n").encode())


def sync(path: Path) -> None:
    """To the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """A file, a folder with all that is in it, or nothing; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_of(path: Path) -> str:
    """SHA-256, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
