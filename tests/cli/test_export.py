"""`mezzotint export` and `mezzotint verify`: a run becomes a folder that others serve, and is compared with it."""

import json
from pathlib import Path

import pytest
import torch

import mezzotint as mz
from mezzotint.serving.shards import ShardReader
from tests.cli.tools import TINY, contents, fails, read, works, write_text
from tests.cli.tools import run as run_command

FORMAT = "--to=compressed-tensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in MXFP8, with checkpoints after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("trained")
    options = (*TINY, f"--data={write_text(folder)}", f"--out={folder / 'run'}", "--steps=4", "--checkpoint-every=2")
    assert _main("train", *options, "--recipe=mxfp8") == 0
    return folder / "run"


def _main(*arguments: str) -> int:
    from mezzotint.cli.main import main

    return main(list(arguments))


def test_a_run_and_its_export(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    before = contents(trained)
    out = tmp_path / "out"
    said = works(capsys, "export", trained, out, FORMAT)
    assert "compressed-tensors-mxfp8; 14 weights are quantized" in said
    assert "(weights quantized as MXFP8BlockScaling)" in works(capsys, "verify", trained, out)
    assert contents(trained) == before
    weight = ShardReader(trained / "checkpoints" / "step-00000004" / "model.safetensors").read(
        "layers.1.layernorm_mlp.fc1_weight"
    )
    codes = mz.MXFP8Quantizer(columnwise=False).quantize(weight)._rowwise_data
    reader = ShardReader(out)
    found = [reader.read(f"model.layers.1.mlp.{name}_proj.weight").view(torch.uint8) for name in ("gate", "up")]
    assert torch.equal(torch.cat(found), codes)
    config = read(out / "config.json")
    assert (config["model_type"], config["rope_theta"], config["dtype"]) == ("llama", 10000.0, "float32")


def test_an_older_checkpoint_is_another(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    out, older = tmp_path / "out", trained / "checkpoints" / "step-00000002"
    works(capsys, "export", older, out, FORMAT, "--dtype=bfloat16", "--shard-mb=1")
    assert read(out / "config.json")["dtype"] == "bfloat16"
    works(capsys, "verify", older, out)
    outcome = run_command(capsys, "verify", trained, out, "--json")
    report = json.loads(outcome.out)
    assert (outcome.code, report["is_equal"]) == (1, False)
    names = {each["name"] for each in report["differing"]}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert all(each["largest_error"] > 0 for each in report["differing"])
    table = run_command(capsys, "verify", trained, out)
    assert table.code == 1
    assert "tensors that differ" in table.out
    assert f"{report['tensors'] - len(names)} of {report['tensors']} tensors are equal" in table.out


def test_two_exports(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        works(capsys, "export", trained, out, FORMAT)
    assert contents(first) == contents(second)
    assert "(tensors as they are)" in works(capsys, "verify", first, second)
    data = bytearray((second / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (second / "model.safetensors").write_bytes(data)
    report = json.loads(run_command(capsys, "verify", first, second, "--json").out)
    assert [each["differing"] for each in report["differing"]] == [1]


def test_a_recipe_of_another_format(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = fails(capsys, "export", trained, out, "--to=hf-fp8")
    assert "MXFP8BlockScaling quantizes" in said
    assert "--recipe Float8BlockScaling" in said
    said = fails(capsys, "export", trained, out, "--to=hf-fp8", "--recipe=block")
    assert "give --requantize" in said
    said = works(capsys, "export", trained, out, "--to=hf-fp8", "--recipe=block", "--requantize")
    assert "10 of them in other blocks than were trained" in said
    assert "(weights quantized as the export says)" in works(capsys, "verify", trained, out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to=gguf",), "--to is 'gguf': give one of hf-fp8"),
        (("--to=mxfp4",), "give 'compressed-tensors-mxfp4'"),
        ((FORMAT, "--dtype=int8"), "--dtype is 'int8'"),
        ((FORMAT, "--recipe=bf16"), "quantizes nothing"),
        ((FORMAT, "--recipe=none"), "there is no recipe 'none'"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    assert said in fails(capsys, "export", trained, tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_there(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    assert "is no folder" in fails(capsys, "export", tmp_path / "none", tmp_path / "out", FORMAT)
    assert "has no config.json" in fails(capsys, "export", tmp_path, tmp_path / "out", FORMAT)
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint yet" in fails(capsys, "export", tmp_path, tmp_path / "out", FORMAT)
    works(capsys, "export", trained, tmp_path / "out", FORMAT)
    assert "give --overwrite" in fails(capsys, "export", trained, tmp_path / "out", FORMAT)
    works(capsys, "export", trained, tmp_path / "out", FORMAT, "--overwrite")
    (tmp_path / "out" / "model.safetensors").unlink()
    assert "has neither" in fails(capsys, "verify", trained, tmp_path / "out", code=1)
    assert "does not exist" in fails(capsys, "verify", trained, tmp_path / "none", code=1)


def test_a_damaged_checkpoint_is_not_exported(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "checkpoints" / "step-00000004"
    copy.mkdir(parents=True)
    for file in (trained / "checkpoints" / "step-00000004").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert "its SHA-256 is another" in fails(capsys, "export", copy, tmp_path / "out", FORMAT)
    assert not (tmp_path / "out").exists()
