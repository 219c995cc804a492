"""This module packs a data set into small compressed files, for machines that take only so much at once."""

import json
import lzma
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dev.convergence.tokens import hash_file

PART = 2**24  # tokens that are compressed together
SHARD = 53 * 2**20  # bytes of a shard at most: with this tree beside it, it is less than 64 MiB
# These filters tell xz that the numbers are two bytes each.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 2**26, "lc": 2, "lp": 1, "pb": 1}]


def pack(data: Path, shards: Path, processes: int = 2) -> list[Path]:
    """Compress the tokens in `data` into folders `0`, `1`, … of at most SHARD bytes; the first has the tokenizer."""
    tokens = (data / "tokens.bin").read_bytes()
    pieces = [tokens[start : start + 2 * PART] for start in range(0, len(tokens), 2 * PART)]
    with ProcessPoolExecutor(processes) as pool:
        packed = list(pool.map(_compress, pieces))
    shutil.rmtree(shards, ignore_errors=True)
    files = {"tokenizer.json.xz": lzma.compress((data / "tokenizer.json").read_bytes())}
    files |= {f"tokens-{number:02d}-of-{len(packed):02d}.xz": piece for number, piece in enumerate(packed)}
    folders, room = [], -1
    for name, content in files.items():
        if len(content) > room:
            folders.append(shards / str(len(folders)))
            folders[-1].mkdir(parents=True)
            room = SHARD
        (folders[-1] / name).write_bytes(content)
        room -= len(content)
    return folders


def _compress(piece: bytes) -> bytes:
    return lzma.compress(piece, format=lzma.FORMAT_XZ, filters=FILTERS)


def unpack(shards: Sequence[Path], data: Path, corpus: Path) -> list[str]:
    """Unpack shards into `data`, and return the pieces that are still missing; when none is, the hashes are checked."""
    data.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        for path in sorted(shard.glob("*.xz")):
            (data / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    found = sorted(data.glob("tokens-*-of-*"))
    if found:
        count = int(found[0].name[-2:])
        wanted = [f"tokens-{number:02d}-of-{count:02d}" for number in range(count)]
        missing = [name for name in wanted if not (data / name).exists()]
        if missing:
            return missing
        with (data / "tokens.bin").open("wb") as file:
            for name in wanted:
                file.write((data / name).read_bytes())
                (data / name).unlink()
    check(data, corpus)
    shutil.copy(corpus, data)
    return []


def check(data: Path, corpus: Path) -> None:
    """Raise a ValueError if the files in `data` are not those that `corpus` describes."""
    about = json.loads(corpus.read_text(encoding="utf-8"))
    for name, wanted in about["sha256"].items():
        found = hash_file(data / name)
        if found != wanted:
            raise ValueError(f"{data / name} has the hash {found}, and {corpus} says {wanted}: unpack all shards again")
