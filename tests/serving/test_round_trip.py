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
# What trains in a format so that backward reads nothing but what is published, or what follows from it.
WHOLE: dict[str, recipe.Recipe] = {
    "hf-fp8": recipe.Float8BlockScaling(),
    "compressed-tensors-fp8": recipe.Float8RowwiseScaling(use_power_2_scales=False, backward_override="dequantized"),
    "compressed-tensors-fp8-tensor": recipe.Float8CurrentScaling(),
    "compressed-tensors-mxfp8": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "compressed-tensors-mxfp4": recipe.MXFP4BlockScaling(),
    "compressed-tensors-nvfp4": recipe.NVFP4BlockScaling(),
    "modelopt-nvfp4": recipe.NVFP4BlockScaling(),
    "mxfp4": recipe.MXFP4BlockScaling(),
}


def assert_equal(checks: Any) -> None:
    found = list(checks)
    assert found
    assert [check for check in found if not check.is_equal] == []


def same_files(first: Path, second: Path) -> bool:
    names = [file.name for file in first.iterdir() if file.name not in (MANIFEST, "config.json")]
    return all(filecmp.cmp(first / name, second / name, shallow=False) for name in names)


def round_experts(model: Any, format: str) -> None:
    """Give experts, which are one parameter in high precision, the values of their codes: what a trip does to them."""
    quantizer = SCHEMES[format].quantizer_of(WHOLE[format], "").with_usage(columnwise=False)
    for name, experts in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for expert in experts.detach():
                weight = expert.t() if format == "mxfp4" else expert  # gpt-oss has them as (in, out)
                weight.copy_(quantizer.quantize(weight.contiguous()).dequantize())


def check_round_trip(format: str, name: str, tmp_path: Path, before: int, after: int) -> None:
    """Train that many steps before and after the trip; losses after it are those of a model that made none.

    Of experts the codes are published, and not the values that they were trained in. So the first loss is equal, and
    those after it equal the losses of a model whose experts were rounded where they are.
    """
    used = WHOLE[format]
    first = mz.export(make_model(name), format, tmp_path / "first", recipe=used)
    model = mz.load_quantized(first.path, recipe=used)
    train(model, before, seed=1)
    trained = mz.export(model, format, tmp_path / "trained")
    assert set(trained.quantized) == set(first.quantized)
    assert set(trained.as_they_were) == {each for each in trained.quantized if ".experts." not in each}
    assert not same_files(first.path, trained.path)
    assert_equal(verify_source(source_of_model(model, None), open_second(trained.path)))
    again = mz.load_quantized(trained.path, recipe=used)
    with torch.no_grad():
        first_loss = model(tokens(2), labels=tokens(2)).loss.item()
    round_experts(model, format)
    losses = train(again, after, seed=2)
    assert losses == train(model, after, seed=2)
    assert losses[0] == first_loss
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("format", "name"), [("hf-fp8", "Llama"), ("hf-fp8", "Mixtral"), ("mxfp4", "GptOss")])
def test_losses_are_as_without_the_trip(format: str, name: str, tmp_path: Path) -> None:
    check_round_trip(format, name, tmp_path, 2, 3)


# Each format with two of the dense architectures in turn: which weights there are does not change how they are written.
OF_DENSE = [(format, list(DENSE)[(i + k) % len(DENSE)]) for i, format in enumerate(FORMATS) for k in range(2)]
# Each architecture with experts, and each format, at least once: experts go another way than other weights, but one
# way in all formats. gpt-oss has a format of its own.
OF_EXPERTS = [
    ("hf-fp8", "Mixtral"),
    ("compressed-tensors-fp8-tensor", "Mixtral"),
    ("compressed-tensors-mxfp4", "Qwen2Moe"),
    ("compressed-tensors-mxfp8", "Qwen2Moe"),
    ("compressed-tensors-fp8", "Qwen3Moe"),
    ("compressed-tensors-nvfp4", "Qwen3Moe"),
    ("modelopt-nvfp4", "Mixtral"),
    ("mxfp4", "GptOss"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), [*OF_DENSE, *OF_EXPERTS])
def test_twenty_steps(format: str, name: str, tmp_path: Path) -> None:
    """Every format with every dense architecture; of those with experts every architecture, and every format."""
    check_round_trip(format, name, tmp_path, 20, 20)


def test_rows_lose_the_copy_of_columns(tmp_path: Path) -> None:
    """The copy of columns, which is not published, is made of the codes of rows: the first loss is the same, and the
    second is not, by a few thousandths."""
    used = recipe.Float8RowwiseScaling(use_power_2_scales=False)
    first = mz.export(make_model(), "compressed-tensors-fp8", tmp_path / "first", recipe=used)
    model = mz.load_quantized(first.path, recipe=used)
    train(model, 2, seed=1)
    trained = mz.export(model, "compressed-tensors-fp8", tmp_path / "trained")
    losses, wanted = train(mz.load_quantized(trained.path, recipe=used), 2, seed=2), train(model, 2, seed=2)
    assert losses[0] == wanted[0]
    assert 0 < abs(losses[1] - wanted[1]) < 0.005 * wanted[1]


@pytest.mark.parametrize("kind", [mz.Float8RowwiseQuantizer, mz.MXFP8Quantizer])
def test_scales_that_are_powers_of_two_lose_little_of_columns(kind: Any) -> None:
    """Both copies round an element to the same value, unless its code is subnormal in one of them."""
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 128, generator=make) * torch.exp2(-torch.randint(0, 20, (128, 128), generator=make))
    rows, columns = kind(columnwise=False), kind(rowwise=False)
    trained = columns.quantize(weight).dequantize()
    read = columns.quantize(rows.quantize(weight).dequantize()).dequantize()
    largest = torch.maximum(weight.abs().amax(1, keepdim=True), weight.abs().amax(0, keepdim=True))
    is_small = weight.abs() < largest / 2**13
    assert torch.equal(trained[~is_small], read[~is_small])
    assert 0 < ((trained - read).abs() / largest).max() < 2**-16


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


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    model = make_model("GptOss")
    first = mz.export(model, "mxfp4", tmp_path / "first")
    assert first.quantized == tuple(f"model.layers.0.mlp.experts.{each}" for each in ("gate_up_proj", "down_proj"))
    assert_equal(verify_source(source_of_model(model, None), open_second(first.path)))
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
