"""Safetensors files against the format's own library, and files that somebody has damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mezzotint.serving.shards import INDEX, SINGLE, STORED_DTYPES, ShardReader, ShardWriter, StoredSpec


def values() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, of sizes that leave others unaligned."""
    made = {}
    for number, (name, dtype) in enumerate(STORED_DTYPES.items()):
        raw = torch.randint(0, 2, (number + 1, 3, dtype.itemsize), dtype=torch.uint8)
        made[name] = raw.view(-1).view(dtype).view(number + 1, 3)
    made["scalar"], made["nothing"] = torch.tensor(3.5), torch.empty(0, 4)
    return made


def spec(tensor: torch.Tensor) -> StoredSpec:
    return StoredSpec(tensor.dtype, tuple(tensor.shape))


def write(folder: Path, tensors: dict[str, torch.Tensor], max_bytes: int = 10**9) -> list[str]:
    with ShardWriter(folder, [{name: spec(each)} for name, each in tensors.items()], max_bytes) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
        writer.finish()
        return writer.file_names


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_their_library_reads_ours(tmp_path: Path) -> None:
    tensors = values()
    assert write(tmp_path, tensors) == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_we_read_theirs(tmp_path: Path) -> None:
    tensors = values()
    save_file(tensors, tmp_path / SINGLE)
    for path in (tmp_path, tmp_path / SINGLE):
        reader = ShardReader(path)
        assert reader.places.keys() == tensors.keys()
        assert all(same_bits(reader.read(name), tensors[name]) for name in tensors)


def test_the_bytes_are_theirs(tmp_path: Path) -> None:
    """The same order in the file, the same header."""
    tensors = {"b": torch.ones(3), "a": torch.zeros(2), "c": torch.ones(5, dtype=torch.uint8)}
    (tmp_path / "ours").mkdir()
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    assert (tmp_path / "ours" / SINGLE).read_bytes() == (tmp_path / SINGLE).read_bytes()


def test_several_files_have_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    names = write(tmp_path, tensors, max_bytes=80)
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"]["t2"] == names[1]
    reader = ShardReader(tmp_path)
    assert all(torch.equal(reader.read(name), tensors[name]) for name in tensors)
    for name in names:
        assert set(load_file(tmp_path / name)) == {key for key, file in index["weight_map"].items() if file == name}


def test_a_tensor_larger_than_a_file_has_one_alone(tmp_path: Path) -> None:
    assert len(write(tmp_path, {"a": torch.ones(2), "b": torch.ones(100), "c": torch.ones(2)}, max_bytes=16)) == 3


def header(path: Path, change: Any) -> None:
    """Change the header of a file, whose length may change with it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    values = json.loads(data[8 : 8 + length])
    change(values)
    text = json.dumps(values).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["a"].update(shape=[4]), "16 bytes|12 bytes"),
        (lambda h: h["a"].update(shape=[-3]), "sizes"),
        (lambda h: h["a"].update(shape=[1.5]), "sizes"),
        (lambda h: h["a"].update(dtype="F7"), "damaged header"),
        (lambda h: h["a"].update(data_offsets=[8, 20]), "behind the last"),
        (lambda h: h["a"].update(data_offsets=[0, 2**62], shape=[2**60]), "behind the last|tensors end"),
        (lambda h: h.pop("a"), "behind the last"),
        (lambda h: h.pop("b"), "tensors end"),
        (lambda h: h.update(a=3), "damaged header"),
        (lambda h: h["a"].pop("shape"), "damaged header"),
    ],
)
def test_headers_that_lie(change: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    header(tmp_path / SINGLE, change)
    with pytest.raises(ValueError, match=said) as caught:
        ShardReader(tmp_path)
    assert str(tmp_path / SINGLE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_files_that_are_cut_off(size: int, tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(3)})
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:size])
    with pytest.raises(ValueError, match="copy it again"):
        ShardReader(tmp_path)


def test_a_header_of_any_length_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="no safetensors header"):
        ShardReader(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "."])
def test_an_index_stays_in_its_folder(file: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="outside of the folder"):
        ShardReader(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": ["a"]}', "{" * 100_000])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match="is no index"):
        ShardReader(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.ones(10) for i in range(4)}
    names = write(tmp_path, tensors, max_bytes=80)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"{names[1]} is missing"):
        ShardReader(tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, {f"t{i}": torch.ones(10) for i in range(4)}, max_bytes=80)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["more"] = index["weight_map"]["t0"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has no more"):
        ShardReader(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        ShardReader(tmp_path / "none")
    with pytest.raises(ValueError, match="has neither"):
        ShardReader(tmp_path)


def test_what_was_announced_is_what_is_written(tmp_path: Path) -> None:
    with (
        ShardWriter(tmp_path, [{"a": StoredSpec(torch.float32, (3,))}], 100) as writer,
        pytest.raises(ValueError, match="announced"),
    ):
        writer.write("a", torch.ones(4))
