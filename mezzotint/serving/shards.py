"""This module writes and reads the safetensors files of one checkpoint tensor by tensor, so
that memory holds one at a time.

A file is a length (8 bytes, little-endian), a JSON header of that many bytes, and the tensors' bytes:

    {"__metadata__": {"format": "pt"}, "name": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}, …}

Several files have an index, `model.safetensors.index.json`, that says which tensor is in which. Both are read as if a
stranger had written them: every size is compared with the file's before memory is allocated or a byte is interpreted.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch

from mezzotint.files import bytes_of, sync, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100 * 2**20  # bytes, the limit of the format's own library
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A `StoredSpec` is what is known of a tensor without its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A `StoredPlace` says in which file a tensor lies, and where."""

    spec: StoredSpec
    file: Path
    start: int  # byte in the file


class ShardReader:
    """A `ShardReader` has the tensors of a folder of safetensors files, or of one such file; `read`
    brings one of them into memory."""

    def __init__(self, path: Path) -> None:
        """Read the headers alone; a file that is missing, cut off or inconsistent raises a ValueError that names it."""
        self.path = path
        self.files = _files_of(path)
        self.places: dict[str, StoredPlace] = {}
        for file, expected in self.files.items():
            found = _read_header(file)
            if expected is not None and not expected <= found.keys():
                missing = ", ".join(sorted(expected - found.keys())[:3])
                raise ValueError(f"{file} has no {missing}, which {INDEX} says is in it: {_AGAIN}")
            for name in found if expected is None else expected:
                self.places[name] = found[name]

    def spec(self, name: str) -> StoredSpec:
        """Return the dtype and the shape of a tensor."""
        if name not in self.places:
            raise ValueError(f"{self.path} has no tensor {name}: {_AGAIN}")
        return self.places[name].spec

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own."""
        spec = self.spec(name)
        place = self.places[name]
        raw = torch.empty(spec.num_bytes, dtype=torch.uint8)
        with place.file.open("rb") as file:
            file.seek(place.start)
            if file.readinto(bytes_of(raw)) != spec.num_bytes:
                raise ValueError(f"{place.file} ends inside of {name}: {_AGAIN}")
        return raw.view(spec.dtype).view(spec.shape)


def _files_of(path: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, with the names that the index says are in each, or None for all of them."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a folder with {SINGLE} or {INDEX}")
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise ValueError(f"{path} has neither {SINGLE} nor {INDEX}: give the folder of a checkpoint")
        return {path / SINGLE: None}
    try:
        where = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in where.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path / INDEX} is no index of safetensors files: {_AGAIN}") from None
    files: dict[Path, set[str] | None] = {}
    for name, file in pairs:
        if Path(file).name != file or file in (".", ".."):
            raise ValueError(f"{path / INDEX} says that {name} is in {file!r}, outside of the folder: do not use it")
        found = files.setdefault(path / file, set())
        assert found is not None
        found.add(name)
    for each in files:
        if not each.is_file():
            raise ValueError(f"{each} is missing, which {INDEX} names: {_AGAIN}")
    return files


def _read_header(path: Path) -> dict[str, StoredPlace]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path} has no safetensors header in its {size} bytes: {_AGAIN}")
        try:
            header = json.loads(file.read(length))
            found = {name: _entry(path, each, 8 + length) for name, each in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged header ({error}): {_AGAIN}") from None
    end = 8 + length
    for name, place in sorted(found.items(), key=lambda item: item[1].start):
        if place.start != end:
            raise ValueError(f"{path} has {name} at byte {place.start}, not at {end} behind the last: {_AGAIN}")
        end += place.spec.num_bytes
    if end != size:
        raise ValueError(f"{path} has {size} bytes, and its tensors end at {end}: {_AGAIN}")
    return found


def _entry(path: Path, entry: Any, first: int) -> StoredPlace:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (*shape, start, stop)):
        raise ValueError(f"sizes {shape}, bytes {start} to {stop}")
    spec = StoredSpec(STORED_DTYPES[entry["dtype"]], shape)
    if stop - start != spec.num_bytes:
        raise ValueError(f"{stop - start} bytes for {entry['dtype']} of shape {list(shape)}")
    return StoredPlace(spec, path, first + start)


class ShardWriter:
    """A `ShardWriter` writes tensors of known dtypes and shapes into the files of a folder, in any order.

    The place of each is decided before the first is written. As in files of the format's own library, those with larger
    elements come first in a file, so that each begins at a multiple of its element's size.
    """

    def __init__(self, folder: Path, groups: Iterable[Mapping[str, StoredSpec]], max_bytes: int) -> None:
        """Lay the files out; the tensors of a group, such as codes with their scales, go into one file."""
        self.folder, self._open = folder, None
        self._places: dict[str, StoredPlace] = {}
        self._left: dict[Path, set[str]] = {}
        shards = _pack(groups, max_bytes)
        for number, specs in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._begin(folder / name, specs)

    _open: tuple[Path, BinaryIO] | None

    @property
    def file_names(self) -> list[str]:
        """Return the names of the files, without the index."""
        return [path.name for path in self._left]

    def _begin(self, path: Path, specs: Mapping[str, StoredSpec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ordered = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
        offset, starts = 0, {}
        for name in ordered:
            spec, starts[name] = specs[name], offset
            offset += spec.num_bytes
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [starts[name], offset]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        self._places |= {name: StoredPlace(specs[name], path, 8 + len(text) + starts[name]) for name in ordered}
        self._left[path] = set(ordered)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor into its place in its file."""
        place = self._places[name]
        found = StoredSpec(tensor.dtype, tuple(tensor.shape))
        if found != place.spec:
            raise ValueError(f"{name} is {found.dtype} {found.shape}, and was announced as {place.spec}")
        if self._open is None or self._open[0] != place.file:
            self._close()
            self._open = place.file, place.file.open("r+b")
        self._open[1].seek(place.start)
        self._open[1].write(bytes_of(tensor.detach().cpu().contiguous()))
        self._left[place.file].remove(name)

    def finish(self) -> None:
        """Flush everything to the disk, and write the index if there are several files."""
        self._close()
        missing = sorted(name for names in self._left.values() for name in names)
        assert not missing, f"tensors that were announced and not written: {missing[:3]}"
        for path in self._left:
            sync(path)
        if len(self._left) > 1:
            total = sum(place.spec.num_bytes for place in self._places.values())
            where = {name: self._places[name].file.name for name in sorted(self._places)}
            write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _pack(groups: Iterable[Mapping[str, StoredSpec]], max_bytes: int) -> list[dict[str, StoredSpec]]:
    """Return what each file holds: groups in their order, as many as fit, and at least one."""
    shards: list[dict[str, StoredSpec]] = [{}]
    held = 0
    for group in groups:
        size = sum(spec.num_bytes for spec in group.values())
        if shards[-1] and held + size > max_bytes:
            shards.append({})
            held = 0
        shards[-1] |= group
        held += size
    return shards


_AGAIN = "the checkpoint is damaged or incomplete, copy it again"
