"""What is read of a checkpoint runs nothing, and is of the dtype and shape that it is read into."""

import functools
import io
import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mezzotint.distributed.checkpoint import load, load_full_state, save
from mezzotint.distributed.reading import in_one_process, load_state, read_metadata


class Call:
    """Its pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def build_on_class(trace: Path) -> bytes:
    """Sets an attribute of a class that metadata may name."""
    return b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'planner_data'\nS'changed'\ndtb."


def dotted(trace: Path) -> bytes:
    """Protocol 4 takes attributes of what a name stands for."""
    name, function = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.__globals__"
    return b"\x80\x04\x8c" + bytes([len(name)]) + name + b"\x8c" + bytes([len(function)]) + function + b"\x93."


def unpickles(trace: Path) -> bytes:
    """torch.load of a file beside it, whatever that holds."""
    inner = io.BytesIO()
    torch.save(Call(os.mkdir, str(trace)), inner)
    return pickle.dumps(Call(functools.partial(torch.load, weights_only=False), Call(io.BytesIO, inner.getvalue())))


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "os": lambda trace: pickle.dumps(Call(os.mkdir, str(trace))),
    "eval": lambda trace: pickle.dumps(Call(eval, f"__import__('os').mkdir({str(trace)!r})")),
    "getattr": lambda trace: b"cbuiltins\ngetattr\n(cos\npath\nS'os'\ntR.",
    "operator": lambda trace: pickle.dumps(Call(operator.methodcaller("mkdir"), trace)),
    "inside": lambda trace: pickle.dumps(Metadata({"model.weight": Call(os.mkdir, str(trace))})),  # type: ignore[dict-item]
    "protocol 0": lambda trace: f"(S{str(trace)!r}\nios\nmkdir\n.".encode(),
    "torch.load": unpickles,
    "class": build_on_class,
    "dotted": dotted,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    save(tmp_path / "good", model, torch.optim.AdamW(model.parameters()), {"step": torch.tensor(3)})
    return tmp_path / "good"


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_runs_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    (folder / ".metadata").write_bytes(HOSTILE[name](trace))
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \(.*\): give the folder of another checkpoint"):
        load(folder, model)
    assert not trace.exists()
    assert Metadata.planner_data is None


def test_values_run_nothing(tmp_path: Path) -> None:
    """Those that are no tensors, and those that should be."""
    model, trace = nn.Linear(2, 2), tmp_path / "trace"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = Call(os.mkdir, str(trace))
    save(tmp_path / "value", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match="holds more than tensors and plain values") as raised:
        load(tmp_path / "value", model, optimizer)
    assert "weights_only" not in str(raised.value)
    save(tmp_path / "tensor", model)
    info = read_metadata(tmp_path / "tensor").storage_data[MetadataIndex("model.weight", (0, 0))]
    file = tmp_path / "tensor" / info.relative_path
    data, hostile = bytearray(file.read_bytes()), io.BytesIO()
    torch.save(Call(os.mkdir, str(trace)), hostile)
    assert len(hostile.getvalue()) <= info.length
    data[info.offset : info.offset + info.length] = hostile.getvalue().ljust(info.length, b"\0")
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot be loaded \(") as raised:
        load(tmp_path / "tensor", model)
    assert "weights_only" not in str(raised.value)
    assert not trace.exists()


def test_metadata_is_dcps(folder: Path) -> None:
    """What is read says what DCP's own reader says."""
    with (folder / ".metadata").open("rb") as file:
        wanted = pickle.load(file)
    found = read_metadata(folder)
    assert found.state_dict_metadata == wanted.state_dict_metadata
    assert found.storage_data == wanted.storage_data
    assert any(isinstance(entry, BytesStorageMetadata) for entry in found.state_dict_metadata.values())


def described(size: Any = (2, 2), dtype: Any = torch.float32, **info: Any) -> Metadata:
    """Metadata of one tensor in one file."""
    stored = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1000, **info}
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 2)))
    entry = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
    return Metadata(
        {"model.weight": entry}, storage_data={MetadataIndex("model.weight", (0, 0)): _StorageInfo(**stored)}
    )


WRONG = {
    "a list": [],
    "nothing": None,
    "no state": Metadata(None, storage_data={}),  # type: ignore[arg-type]
    "no files": Metadata({}),
    "a folder above": described(relative_path="../good/__0_0.distcp"),
    "another folder": described(relative_path="/etc/passwd"),
    "no file": described(relative_path="__7_0.distcp"),
    "past the end": described(offset=10**9),
    "negative": described(offset=-1),
    "too short": described(length=1),
    "a number for a name": described(relative_path=3),
    "transformed": described(transform_descriptors=["stream.zstd"]),
    "too large": described(torch.Size((2**40, 2))),
    "a size of text": described("ab"),
    "a dtype of text": described(dtype="float32"),
    "no data": Metadata(described().state_dict_metadata, storage_data={}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(WRONG[name]))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        load(folder, nn.Linear(2, 2, bias=False))


def test_metadata_that_is_cut(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for size in (0, 1, 10, len(data) // 2, len(data) - 1):
        (folder / ".metadata").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
            read_metadata(folder)


def test_other_dtypes_and_shapes(folder: Path) -> None:
    """Nothing is cast, and nothing left out, in silence."""
    for model, said in (
        (nn.Linear(2, 2, dtype=torch.bfloat16), r"its model\.(weight|bias) is torch\.float32 .*torch\.bfloat16"),
        (nn.Linear(2, 3), r"its model\.(weight|bias) is torch\.float32 .*to load it into torch\.float32 \(3"),
        (nn.Sequential(nn.Linear(2, 2)), r"it has no model\.0\."),
    ):
        with pytest.raises(ValueError, match=said):
            load(folder, model)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight is torch\.int8, the model's torch\.float32"):
        load_full_state(model, {"weight": torch.ones(2, 2, dtype=torch.int8), "bias": torch.ones(2)})


def test_values_and_tensors_are_not_mixed_up(tmp_path: Path) -> None:
    with in_one_process():
        dcp.save({"extra": {"step": 3}, "model": {"weight": 1.0}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"extra\.step is no tensor in this checkpoint"):
        load(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"its model\.weight is no tensor"):
        load_state(tmp_path, {"model": {"weight": torch.ones(2)}})
