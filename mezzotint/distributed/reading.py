"""Reading of what torch.distributed.checkpoint (DCP) wrote, which does not execute what somebody else put in its place.

DCP keeps what is where in `.metadata`, a pickle, and values that are no tensors (an optimizer's learning rate) as
pickles in its data files. A pickle may call any function. Here `.metadata` is unpickled into records, which execute
nothing, for the names of DCP's own metadata classes, and any other name is refused; records of the right form become
DCP's metadata. Values are read as `torch.load(weights_only=True)` reads them.

    metadata = read_metadata(folder)
    load_state(folder, state)               into the tensors of `state`, of the dtypes and shapes that were written
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo  # seen in torch 2.11 and 2.13
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from mezzotint.comm.groups import is_initialized

METADATA = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_CLASSES, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_CLASSES, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_CLASSES, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Record:
    """A record stands for an object of DCP's in a pickle: it has the name of its class and the state it would have."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, name: str) -> dict[str, Any]:
        """Return the state as fields; raise ValueError unless the record is of the class `name`."""
        state = {} if self.state is None else self.state
        if type(self).__name__ != name or not isinstance(state, dict):
            raise ValueError(f"a {type(self).__name__} where a {name} belongs")
        return state


class _Records(pickle.Unpickler):
    """This unpickler makes records of a few names, numbers, strings, lists and dictionaries: all of it is only data."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], type[_Record]] = {}  # for this pickle alone, which may change the classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return self._made.setdefault((module, name), type(name, (_Record,), {}))
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(folder: str | Path) -> Metadata:
    """Return what a checkpoint has, and where; raise ValueError if the file says anything else, or names others."""
    path = Path(folder) / METADATA
    try:
        with path.open("rb") as file:
            record = _Records(file).load()
        return _metadata_of(record, Path(folder))
    except Exception as error:  # random bytes can fail in any way
        raise ValueError(f"{path} cannot be read ({_said(error)}): give the folder of another checkpoint") from None


def _metadata_of(record: Any, folder: Path) -> Metadata:
    fields = _of(record, "Metadata")
    sizes: dict[str, int] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in _dict(fields["storage_data"]).items():
        index, info = _of(key, "MetadataIndex"), _of(value, "_StorageInfo")
        name, offset, length = _str(info["relative_path"]), _int(info["offset"]), _int(info["length"])
        if Path(name).name != name or info.get("transform_descriptors"):
            raise ValueError(f"{name!r} is no plain file of this folder")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size
        if offset + length > sizes[name]:
            raise ValueError(f"{name} has {sizes[name]} bytes of {offset + length}")
        where = index.get("offset")
        fqn = _str(index["fqn"])
        stored[MetadataIndex(fqn, None if where is None else _ints(where))] = _StorageInfo(name, offset, length)
    entries: dict[str, Any] = {}
    for name, value in _dict(fields["state_dict_metadata"]).items():
        is_tensor = type(value).__name__ == "TensorStorageMetadata"
        entries[_str(name)] = _tensor_of(name, value, stored) if is_tensor else _bytes_of(name, value, stored)
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def _tensor_of(name: str, record: Any, stored: Mapping[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    """Return a tensor's metadata; raise ValueError unless all of its data is in files, which proves its size."""
    fields = _of(record, "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    size, chunks, found = _ints(fields["size"]), [], 0
    for entry in fields["chunks"]:
        chunk = _of(entry, "ChunkStorageMetadata")
        offsets, sizes = _ints(chunk["offsets"]), _ints(chunk["sizes"])
        inside = all(begin + extent <= end for begin, extent, end in zip(offsets, sizes, size, strict=True))
        if not inside or stored[MetadataIndex(name, offsets)].length < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name} has a part that is not there")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        found += prod(sizes)
    if found < prod(size):
        raise ValueError(f"{name} has {found} elements of {prod(size)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _bytes_of(name: str, record: Any, stored: Mapping[MetadataIndex, _StorageInfo]) -> BytesStorageMetadata:
    _of(record, "BytesStorageMetadata")
    if MetadataIndex(name) not in stored:
        raise ValueError(f"{name} is not there")
    return BytesStorageMetadata()


def _of(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record):
        raise ValueError(f"{type(record).__name__} where a {name} belongs")
    return record.fields(name)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where a dictionary belongs")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} where a name belongs")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a size belongs")
    return value


def _ints(value: Any) -> tuple[int, ...]:
    return tuple([_int(size) for size in value])


# Values


class _Reader(FileSystemReader):
    """This reader uses metadata that was read already, not the files of single ranks, which DCP would look for next."""

    def __init__(self, folder: str | Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        return _plainly(lambda: super(_Reader, self).read_data(plan, planner))


class _Planner(DefaultLoadPlanner):
    """This planner reads tensors of the dtype and shape that they are read into, and plain values."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if stored is None:
                raise ValueError(f"it has no {name}")
            if isinstance(value, torch.Tensor) != isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"its {name} is {'no ' if isinstance(value, torch.Tensor) else 'a '}tensor")
            if isinstance(value, torch.Tensor) and isinstance(stored, TensorStorageMetadata):
                dtype, size = stored.properties.dtype, tuple(stored.size)
                if (dtype, size) != (value.dtype, tuple(value.shape)):
                    raise ValueError(
                        f"its {name} is {dtype} {size}, the one to load it into {value.dtype} {tuple(value.shape)}"
                    )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(_plainly(lambda: torch.load(value, weights_only=True)), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # it unpickles anything, so it gets what was written here


def _plainly(read: Callable[[], Any]) -> Any:
    """Return `read()` without torch's advice to read files that it refuses with `weights_only=False`."""
    try:
        return read()
    except pickle.UnpicklingError:
        raise ValueError("a data file holds more than tensors and plain values, or is damaged") from None


def load_state(
    folder: str | Path, state: dict[str, Any], metadata: Metadata | None = None, process_group: Any = None
) -> None:
    """Read what `state` names into its tensors. All ranks call it; what one of them cannot read is an error on all."""
    reader = _Reader(folder, read_metadata(folder) if metadata is None else metadata)
    with in_one_process():
        try:
            dcp.load(
                state,
                storage_reader=reader,
                planner=_Planner(),
                process_group=process_group,
                no_dist=not is_initialized(),
            )
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            who = f"rank {rank}: " if len(error.failures) > 1 or rank else ""
            raise ValueError(f"{folder} cannot be loaded ({who}{_said(cause)}): give another checkpoint") from None


def _said(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def in_one_process() -> Iterator[None]:
    """Silence DCP's warning that torch.distributed is not in use, which is no problem."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield
