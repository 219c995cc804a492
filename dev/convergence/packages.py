"""This module fetches packages of Debian and PyPI by name and version, and reads the text in them.

A package is an archive, and so may be what is in it: the sources of Linux are a tarball in a package. Text is what
decodes as UTF-8 and has lines as people write them; from HTML, only what a reader sees is taken.
"""

import bz2
import gzip
import hashlib
import html
import io
import lzma
import re
import subprocess
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MANIFEST = Path(__file__).with_name("corpus.toml")
# fmt: off
SUFFIXES = frozenset((
    ".py", ".pyi", ".pyx", ".pxd", ".rst", ".txt", ".md", ".c", ".h", ".cc", ".cpp", ".hpp", ".cxx", ".S", ".pl", ".pm",
    ".pod", ".t", ".sh", ".el", ".lisp", ".erl", ".hs", ".rs", ".go", ".java", ".js", ".ts", ".sql", ".texi", ".tex",
    ".html", ".htm", ".sgml", ".xml", ".yaml", ".yml", ".toml", ".cfg", ".f", ".f90", ".r", ".R", ".m", ".tcl", ".n",
    ".1", ".2", ".3", ".4", ".5", ".6", ".7", ".8",
))
# fmt: on
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
SMALLEST, LARGEST = 200, 2**18  # bytes of a file; larger ones are tables and generated
LONGEST_LINE = 160  # largest mean of a file's lines; longer ones are minified, or data
DIGITS = 0.2  # the fraction of characters that may be digits; more is a table
SCRIPTS = re.compile(r"<(script|style|head|nav)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
TAGS = re.compile(r"<[^<>]*>")
GAPS = re.compile(r"\n\s*\n\s*\n+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A `Package` is a file of Debian or PyPI; at most `megabytes` of its text are taken."""

    source: str
    name: str
    version: str
    file: str
    sha256: str
    megabytes: float


def read_manifest(path: Path = MANIFEST) -> list[Package]:
    """Return the packages that a manifest lists."""
    manifest = tomllib.loads(path.read_text(encoding="utf-8"))
    usual = {"megabytes": manifest["megabytes"]}
    return [Package(source=row.pop("from"), **usual | row) for row in manifest["package"]]


def fetch_package(package: Package, folder: Path) -> Path:
    """Download a package unless it is in the folder already, and check that it is the one that the manifest names."""
    path = folder / package.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if package.source == "debian":
            asked = f"{package.name}={package.version}"
            subprocess.run(["apt-get", "-q", "download", asked], cwd=folder, check=True, capture_output=True)
        else:
            # `pip download` would build each source distribution for its metadata. A process that has imported pip
            # cannot import setuptools any more, which Inductor needs.
            from pip._internal.models.index import PyPI

            with urllib.request.urlopen(f"{PyPI.simple_url}/{package.name}/", timeout=60) as answer:
                links = re.findall(r'href="([^"#]+)', answer.read().decode())
            link = next(link for link in links if link.endswith(f"/{package.file}"))
            with urllib.request.urlopen(link, timeout=600) as answer:
                path.write_bytes(answer.read())
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"{path} has the hash {found}, and corpus.toml says {package.sha256}: remove it, and fetch again"
        )
    return path


def read_texts(package: Package, path: Path) -> dict[str, str]:
    """Return texts of a package by the hashes of their files, in the order of the hashes, up to the package's limit."""
    found = {hashlib.sha256(data).hexdigest(): (name, data) for name, data in _members(path.name, path.read_bytes())}
    texts, room = {}, package.megabytes * 10**6
    for key in sorted(found):
        text = as_text(*found[key])
        if text is not None:
            room -= len(text)
            if room < 0:
                break
            texts[key] = text
    return texts


def _members(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive by name, uncompressed; for a Debian package, those of the tarballs in it too."""
    if name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if _is_wanted(entry.filename, entry.file_size):
                    yield entry.filename, archive.read(entry)
        return
    is_debian = name.endswith(".deb")
    if is_debian:
        command = ["dpkg-deb", "--fsys-tarfile", "/dev/stdin"]
        data = subprocess.run(command, input=data, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
        for member in archive:
            is_archive = is_debian and member.name.endswith(ARCHIVES)
            if member.isfile() and (is_archive or _is_wanted(member.name, member.size)):
                file = archive.extractfile(member)
                content = b"" if file is None else file.read()
                if is_archive:
                    yield from _members(member.name, content)
                else:
                    yield _uncompressed(member.name, content)


def _is_wanted(name: str, size: int) -> bool:
    """Return whether a file may be text, by its name and size."""
    plain = name.removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2")
    return Path(plain).suffix in SUFFIXES and size <= LARGEST


def _uncompressed(name: str, data: bytes) -> tuple[str, bytes]:
    for suffix, open_ in ((".gz", gzip.decompress), (".xz", lzma.decompress), (".bz2", bz2.decompress)):
        if name.endswith(suffix):
            return name.removesuffix(suffix), open_(data)
    return name, data


def as_text(name: str, data: bytes) -> str | None:
    """Return what a file says to its reader, or None if it is no text, or a table."""
    if not SMALLEST <= len(data) <= LARGEST:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if Path(name).suffix in (".html", ".htm"):
        text = html.unescape(TAGS.sub("", SCRIPTS.sub("", text)))
        text = GAPS.sub("\n\n", text).strip() + "\n"
    lines = text.count("\n") + 1
    digits = sum(text.count(digit) for digit in "0123456789")
    if len(text) < SMALLEST or len(text) > LONGEST_LINE * lines or digits > DIGITS * len(text) or "\0" in text:
        return None
    return text
