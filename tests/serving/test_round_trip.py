"""Train, export, verify, read again and go on: every format and architecture."""

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.serving.published import MANIFEST
from mezzotint.serving.schemes import SCHEMES
from mezzotint.serving.source import source_of_model
from mezzotint.serving.verify import open_second, verify_folders, verify_source
from tests.serving.models import DENSE, EXPERTS, make_model, tokens, train

FORMATS = [name for name, scheme in SCHEMES.items() if not scheme.is_for_experts]
# What trains in a format so that the copies which backward reads follow from the codes: then nothing is lost.
WHOLE: dict[str, recipe.Recipe] = {
    "hf-fp8": recipe.Float8BlockScaling(),
    "compressed-tensors-fp8-tensor": recipe.Float8CurrentScaling(),
    "compressed-tensors-mxfp8": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "compressed-tensors-mxfp4": recipe.MXFP4BlockScaling(),
    "compressed-tensors-nvfp4": recipe.NVFP4BlockScaling(),
    "modelopt-nvfp4": recipe.NVFP4BlockScaling(),
}


def assert_equal(checks: Any) -> None:
    found = list(checks)
    assert found
    assert [check for check in found if not check.is_equal] == []


def same_files(first: Path, second: Path) -> bool:
    names = [file.name for file in first.iterdir() if file.name not in (MANIFEST, "config.json")]
    return all(filecmp.cmp(first / name, second / name, shallow=False) for name in names)


def check_round_trip(format: str, name: str, tmp_path: Path, before: int, after: int) -> None:
    """Train that many steps before and after the trip; losses after it are those of a model that made none."""
    used = WHOLE[format]
    first = mz.export(make_model(name), format, tmp_path / "first", recipe=used)
    model = mz.load_quantized(first.path, recipe=used)
    train(model, before, seed=1)
    trained = mz.export(model, format, tmp_path / "trained")
    assert set(trained.as_they_were) == set(trained.quantized) == set(first.quantized)
    assert not same_files(first.path, trained.path)
    assert_equal(verify_source(source_of_model(model, None), open_second(trained.path)))
    again = mz.load_quantized(trained.path, recipe=used)
    losses = train(again, after, seed=2)
    assert losses == train(model, after, seed=2)
    assert losses[-1] < losses[0]


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("format", WHOLE)
def test_losses_are_as_without_the_trip(format: str, name: str, tmp_path: Path) -> None:
    check_round_trip(format, name, tmp_path, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("format", WHOLE)
def test_twenty_steps(format: str, name: str, tmp_path: Path) -> None:
    check_round_trip(format, name, tmp_path, 20, 20)


def test_rows_lose_the_copy_of_columns(tmp_path: Path) -> None:
    """One scale for a row: the copy of columns, which is not published, is made of the codes. Forward is the same."""
    first = mz.export(make_model(), "compressed-tensors-fp8", tmp_path / "first")
    model = mz.load_quantized(first.path)
    train(model, 1, seed=1)
    trained = mz.export(model, "compressed-tensors-fp8", tmp_path / "trained")
    again = mz.load_quantized(trained.path)
    assert train(again, 1, seed=2) == train(model, 1, seed=2)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_untouched_comes_out_as_it_went_in(format: str, name: str, tmp_path: Path) -> None:
    model = make_model(name)
    first = mz.export(model, format, tmp_path / "first")
    assert_equal(verify_source(source_of_model(model, None), open_second(first.path)))
    quantized = mz.load_quantized(first.path)
    second = mz.export(quantized, format, tmp_path / "second", base=first.path if name in EXPERTS else None)
    assert same_files(first.path, second.path)
    plain = mz.load_quantized(first.path, high_precision=True)
    third = mz.export(plain, format, tmp_path / "third", base=first.path)
    assert same_files(first.path, third.path)
    assert third.quantized == first.quantized


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_train_on(name: str, tmp_path: Path) -> None:
    """Experts stay in high precision, and are quantized as the converted model multiplies them."""
    first = mz.export(make_model(name), "hf-fp8", tmp_path / "first")
    model = mz.load_quantized(first.path)
    before = train(model, 1, seed=1)
    trained = mz.export(model, "hf-fp8", tmp_path / "trained")
    assert_equal(verify_source(source_of_model(model, None), open_second(trained.path)))
    assert any("experts.1." in each for each in trained.quantized)
    assert before[0] > train(mz.load_quantized(trained.path), 1, seed=1)[0]


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    model = make_model("GptOss")
    first = mz.export(model, "mxfp4", tmp_path / "first")
    assert first.quantized == tuple(f"model.layers.0.mlp.experts.{each}" for each in ("gate_up_proj", "down_proj"))
    assert_equal(verify_source(source_of_model(model, None), open_second(first.path)))
    read = mz.load_quantized(first.path)
    assert train(read, 2, seed=1)[1] > 0
    untouched = mz.load_quantized(first.path)
    assert same_files(first.path, mz.export(untouched, "mxfp4", tmp_path / "second", base=first.path).path)


def test_a_converted_model_exports_what_it_multiplies(tmp_path: Path) -> None:
    """Masters in high precision, trained under a recipe: the codes are those of the last forward."""
    model = make_model(dtype=torch.float32)
    mz.convert(model, recipe.Float8BlockScaling(use_f32_scales=True), filter=lambda _, name: "proj" in name)
    train(model, 2, seed=1)
    report = mz.export(model, "hf-fp8", tmp_path / "out")
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    quantizer = mz.Float8BlockQuantizer(force_pow_2_scales=False, columnwise=False)
    folder = open_second(report.path)
    found = folder.tensors("model.layers.0.mlp.up_proj")
    wanted = quantizer.quantize(weight)
    assert torch.equal(found["weight"].view(torch.uint8), wanted._rowwise_data)
    assert torch.equal(found["weight_scale_inv"], wanted._rowwise_scale_inv[:1, :1])
    ids = tokens()
    read = mz.load_quantized(report.path, recipe=recipe.Float8BlockScaling(use_f32_scales=True))
    assert torch.equal(read(ids).logits, model(ids).logits)


def test_what_is_left_out_stays_plain(tmp_path: Path) -> None:
    model = mz.convert(make_model(), recipe.MXFP8BlockScaling(), filter=lambda _, name: name.endswith("up_proj"))
    report = mz.export(model, "compressed-tensors", tmp_path / "out")
    assert (report.format, report.quantized) == ("compressed-tensors-mxfp8", ("model.layers.0.mlp.up_proj",))
    ignored = open_second(report.path).config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored
    assert "lm_head" in ignored


def test_a_folder_is_exported_without_a_model(tmp_path: Path) -> None:
    """Weight by weight from disk, as from memory; several files; the tokenizer goes with them."""
    for name in ("Llama", "Mixtral"):
        model, plain = make_model(name), tmp_path / f"plain-{name}"
        model.save_pretrained(plain)
        (plain / "tokenizer.json").write_text("{}")
        from_disk = mz.export(plain, "hf-fp8", tmp_path / f"disk-{name}", max_shard_bytes=50_000)
        from_memory = mz.export(model, "hf-fp8", tmp_path / f"memory-{name}")
        assert (from_disk.path / "tokenizer.json").exists()
        assert len(list(from_disk.path.glob("*.safetensors"))) > 1
        assert_equal(verify_folders(open_second(from_disk.path), open_second(from_memory.path)))


def test_the_dtype_of_what_is_not_quantized(tmp_path: Path) -> None:
    model = make_model(dtype=torch.float32)
    report = mz.export(model, "hf-fp8", tmp_path / "out", dtype=torch.bfloat16)
    folder = open_second(report.path)
    assert folder.config["dtype"] == "bfloat16"
    assert folder.reader.spec("model.norm.weight").dtype == torch.bfloat16
    assert_equal(verify_source(source_of_model(model, None), folder))  # codes are of the FP32 weights
