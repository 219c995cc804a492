"""What is wrong with a checkpoint, or with what is asked for, is one line; and nothing is half-written."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mezzotint as mz
from mezzotint.serving import verify
from mezzotint.serving.export import export_source
from mezzotint.serving.published import MANIFEST, MODEL_CONFIG
from mezzotint.serving.shards import INDEX, SINGLE
from mezzotint.serving.source import source_of_model
from mezzotint.serving.verify import open_second, verify_folders, verify_source
from tests.serving.models import make_model

NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mz.export(make_model(), "hf-fp8", tmp_path_factory.mktemp("exported") / "out").path


def copied(exported: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def flip(folder: Path, name: str, element: int, bit: int) -> None:
    place = open_second(folder).reader.places[name]
    data = bytearray(place.file.read_bytes())
    data[place.start + element] ^= 1 << bit
    place.file.write_bytes(data)


def refused(folder: Path, said: str) -> None:
    """By what reads it, before any weight is replaced."""
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=said) as caught:
        mz.load_quantized(folder, model)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tensor", ["weight", "weight_scale_inv"])
def test_a_flipped_bit(tensor: str, exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    flip(folder, f"{NAME}.{tensor}", 130 if tensor == "weight" else 2, 3)
    refused(folder, "its SHA-256 is another")
    (found,) = [check for check in verify_folders(open_second(exported), open_second(folder)) if not check.is_equal]
    (again,) = [
        check for check in verify_source(source_of_model(make_model(), None), open_second(folder)) if not check.is_equal
    ]
    assert (found.name, found.differing) == (again.name, again.differing) == (f"{NAME}.{tensor}", 1)
    assert found.first == ((1, 2) if tensor == "weight" else (0, 0))
    good, bad = (load_file(each / SINGLE) for each in (exported, folder))
    values = [each[f"{NAME}.weight"].float() * each[f"{NAME}.weight_scale_inv"].item() for each in (good, bad)]
    if tensor == "weight":
        assert again.largest_error == (values[0] - values[1]).abs().max().item() > 0


def test_a_flipped_bit_of_what_is_not_quantized(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    flip(folder, "model.norm.weight", 5, 0)
    checks = verify_source(source_of_model(make_model(), None), open_second(folder))
    (found,) = [check for check in checks if not check.is_equal]
    assert (found.name, found.first) == ("model.norm.weight", (2,))


def test_every_piece_is_compared(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(exported, tmp_path)
    for element in (129, 5000, 16383):
        flip(folder, f"{NAME}.weight", element, 0)
    for size in (2**22, 1000, 7):
        monkeypatch.setattr(verify, "PIECE", size)
        (found,) = [each for each in verify_folders(open_second(exported), open_second(folder)) if not each.is_equal]
        assert (found.differing, found.first) == (3, (1, 1))


def test_a_truncated_file(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1])
    refused(folder, "copy it again")


def test_a_missing_shard(tmp_path: Path) -> None:
    path = mz.export(make_model(), "hf-fp8", tmp_path / "out", max_shard_bytes=30_000).path
    next(iter(sorted(path.glob("model-*")))).unlink()
    refused(path, "is missing, which model.safetensors.index.json names")


def test_an_index_that_leaves_the_folder(tmp_path: Path) -> None:
    path = mz.export(make_model(), "hf-fp8", tmp_path / "out", max_shard_bytes=30_000).path
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../out/model.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    refused(path, "outside of the folder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {**t, f"{NAME}.weight": t[f"{NAME}.weight"][:64].clone()}, "does not fit the model"),
        (lambda t: {**t, f"{NAME}.weight_scale_inv": torch.ones(2, 1)}, "does not fit the model"),
        (lambda t: {**t, f"{NAME}.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, "does not fit the model"),
        (lambda t: {**t, f"{NAME}.weight": t[f"{NAME}.weight"].view(torch.uint8)}, "does not fit the model"),
        (lambda t: {**t, "model.norm.weight": torch.ones(64)}, "does not fit the model"),
        (lambda t: {name: value for name, value in t.items() if name != "model.norm.weight"}, "has no model.norm"),
        (lambda t: {**t, "more.weight": torch.ones(2)}, "has more.weight, for which the model has no place"),
    ],
)
def test_other_tensors_than_the_model_has(change: Any, said: str, exported: Path, tmp_path: Path) -> None:
    """A checkpoint of another program, so without hashes."""
    folder = copied(exported, tmp_path)
    (folder / MANIFEST).unlink()
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE)
    refused(folder, said)
    differing = [check for check in verify_folders(open_second(exported), open_second(folder)) if not check.is_equal]
    assert len(differing) == 1


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (MODEL_CONFIG, "", "is no JSON"),
        (MODEL_CONFIG, "[]", "holds no object"),
        (
            MODEL_CONFIG,
            '{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}',
            "gptq, which is not read",
        ),
        (MODEL_CONFIG, '{"model_type": "llama", "quantization_config": 3}', "no object"),
        (
            MODEL_CONFIG,
            '{"model_type": "bert", "quantization_config": {"quant_method": "fp8"}}',
            "model_type is 'bert'",
        ),
        (MANIFEST, "{}", "not as it was written"),
        (MANIFEST, '{"files": {}, "format": "hf-fp8", "quantizer": {"dtype": 3, "_plan": 4}}', "has _plan|has dtype"),
        (MANIFEST, '{"files": {"../x": {"bytes": 1, "sha256": ""}}, "format": "hf-fp8", "quantizer": {}}', "remove it"),
        (MANIFEST, '{"files": {}, "format": "mxfp4", "quantizer": {}}', "another format"),
    ],
)
def test_files_that_say_something_else(file: str, text: str, said: str, exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    (folder / file).write_text(text)
    refused(folder, said)


def test_no_pickle_is_read(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    refused(folder, "has neither model.safetensors nor")


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    source = source_of_model(make_model(), None)
    count = len(source.weights)

    def stop(done: int, total: int) -> None:
        assert total == count
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_source(source, "hf-fp8", tmp_path / "out", None, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_where_that_is_asked_for(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    (folder / "mine").write_text("mine")
    with pytest.raises(ValueError, match="exists already: give overwrite=True"):
        mz.export(make_model(), "hf-fp8", folder)
    assert (folder / "mine").exists()
    mz.export(make_model(), "compressed-tensors-fp8", folder, overwrite=True)
    assert not (folder / "mine").exists()
    assert open_second(folder).scheme is not None
    assert [each.name for each in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"format": "gguf"}, "format is 'gguf'"),
        ({"format": "mxfp4"}, "give 'compressed-tensors-mxfp4'"),
        ({"format": "hf-fp8", "dtype": torch.int8}, "dtype is torch.int8"),
        ({"format": "hf-fp8", "recipe": mz.recipe.MXFP8BlockScaling()}, "otherwise than hf-fp8"),
    ],
)
def test_what_cannot_be_written(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        mz.export(make_model(), path=tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_weights_that_fit(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 136, "head_dim": 36}
    with pytest.raises(ValueError, match="quantizes no weight of this model"):
        mz.export(make_model(**sizes), "compressed-tensors-mxfp8", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_quantized_weights_of_another_format(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a Float8BlockwiseQTensor that compressed-tensors-fp8 cannot hold"):
        mz.export(mz.load_quantized(exported), "compressed-tensors-fp8", tmp_path / "out")
    with pytest.raises(ValueError, match="is quantized already"):
        mz.export(exported, "hf-fp8", tmp_path / "out")
    make_model().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is not quantized: load it with transformers"):
        mz.load_quantized(tmp_path / "plain")


def test_scales_in_less_than_fp32(tmp_path: Path) -> None:
    """As other programs write them: read exactly, and written as they were; of a weight that changed, in FP32."""
    path = mz.export(make_model(), "compressed-tensors-fp8", tmp_path / "out").path
    (path / MANIFEST).unlink()
    tensors = load_file(path / SINGLE)
    narrow = {name: each.bfloat16() if name.endswith("scale") else each for name, each in tensors.items()}
    narrow[f"{NAME}.input_scale"] = torch.ones(1)  # how a server quantizes activations: not read
    save_file(narrow, path / SINGLE)
    model = mz.load_quantized(path)
    again = load_file(mz.export(model, "compressed-tensors-fp8", tmp_path / "again").path / SINGLE)
    assert again.keys() == tensors.keys()
    for name, tensor in again.items():
        assert tensor.dtype == narrow[name].dtype
        assert torch.equal(tensor.view(torch.uint8), narrow[name].view(torch.uint8)), name
    with torch.no_grad():
        model.get_submodule(NAME).weight.mul_(1.5)
    changed = load_file(mz.export(model, "compressed-tensors-fp8", tmp_path / "changed").path / SINGLE)
    assert changed[f"{NAME}.weight_scale"].dtype == torch.float32


def test_what_had_the_name_is_there_again(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder, where the new one cannot have its name."""
    folder, rename = copied(exported, tmp_path), Path.rename

    def stop(self: Path, target: Path) -> Path:
        if self.name == ".copy.writing":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(OSError, match="no"):
        mz.export(make_model(), "hf-fp8", folder, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["copy"]
    assert (folder / SINGLE).read_bytes() == (exported / SINGLE).read_bytes()


def test_names_that_are_not_the_architectures(tmp_path: Path) -> None:
    model = make_model()
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter.weight is no name of llama: .* adapters merged"):
        mz.export(model, "hf-fp8", tmp_path / "out")
