"""The tensors of each format, against formulas of their own: codes are decoded here, by hand."""

import pytest
import torch

from mezzotint import recipe
from mezzotint.serving.codes import codes_of, join_codes, tensor_of
from mezzotint.serving.schemes import SCHEMES, Scheme, find_scheme, scheme_of

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ROWS, COLS = 256, 384


def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.02


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even one in the low half; the sign is the highest bit of each."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def spread(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


def power(byte: torch.Tensor) -> torch.Tensor:
    return torch.exp2(byte.float() - 127)


# The value of a weight, from its published tensors.
DECODED = {
    "hf-fp8": lambda t: t["weight"].float() * spread(t["weight_scale_inv"], 128, 128),
    "compressed-tensors-fp8": lambda t: t["weight"].float() * t["weight_scale"],
    "compressed-tensors-fp8-tensor": lambda t: t["weight"].float() * t["weight_scale"],
    "compressed-tensors-mxfp8": lambda t: t["weight"].float() * spread(power(t["weight_scale"]), 1, 32),
    "compressed-tensors-mxfp4": lambda t: unpacked(t["weight_packed"]) * spread(power(t["weight_scale"]), 1, 32),
    "compressed-tensors-nvfp4": lambda t: (
        unpacked(t["weight_packed"]) * spread(t["weight_scale"].float() / t["weight_global_scale"], 1, 16)
    ),
    "modelopt-nvfp4": lambda t: unpacked(t["weight"]) * spread(t["weight_scale"].float() * t["weight_scale_2"], 1, 16),
    "mxfp4": lambda t: unpacked(t["blocks"]) * spread(power(t["scales"]), 1, 32),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_published_tensors_have_the_values(scheme: Scheme) -> None:
    quantized = scheme.default_quantizer().quantize(weight())
    tensors = scheme.publish(codes_of(quantized))
    decoded, ours = DECODED[scheme.name](tensors), quantized.dequantize()
    if "nvfp4" in scheme.name:  # the scale of a weight is rounded once more, and multiplied in another order
        assert torch.equal(decoded.bfloat16(), ours.bfloat16())
        torch.testing.assert_close(decoded, ours, rtol=4e-7, atol=0)
    else:
        assert torch.equal(decoded, ours)
    error = (ours - weight()).norm() / weight().norm()
    assert error < (0.13 if "fp4" in scheme.name else 0.04)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_what_is_published_is_read_again(scheme: Scheme) -> None:
    quantizer = scheme.default_quantizer()
    quantized = quantizer.quantize(weight())
    codes = codes_of(quantized)
    tensors = scheme.publish(codes)
    specs = scheme.specs(quantizer, (ROWS, COLS))
    assert {name: (spec.dtype, spec.shape) for name, spec in specs.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    amax = codes.buffers.get("_amax_rowwise")
    read = scheme.codes(tensors, quantizer, None if amax is None else float(amax))
    for name, buffer in codes.buffers.items():
        assert torch.equal(read.buffers[name], buffer), name
    made = tensor_of(read, quantizer, torch.float32)
    for name in quantized._ROWWISE:
        assert torch.equal(getattr(made, name), getattr(quantized, name)), name
    if quantizer.derives_columnwise():
        for name in quantized._COLUMNWISE:
            assert torch.equal(getattr(made, name), getattr(quantized, name)), name
    assert made.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_rows_are_taken_and_joined(scheme: Scheme) -> None:
    codes = codes_of(scheme.default_quantizer().quantize(weight()))
    rows = [torch.arange(128, 256), torch.arange(0, 128)]
    parts = [codes.take_rows(each) for each in rows]
    whole, part = DECODED[scheme.name](scheme.publish(codes)), DECODED[scheme.name](scheme.publish(parts[0]))
    assert torch.equal(part, whole[128:])
    joined = join_codes(parts, rows)
    assert all(torch.equal(joined.buffers[name], buffer) for name, buffer in codes.buffers.items())


def test_rows_of_a_tile_stay_together() -> None:
    codes = codes_of(SCHEMES["hf-fp8"].default_quantizer().quantize(weight()))
    for rows in (torch.arange(64), torch.arange(64, 192), torch.arange(256).flip(0), torch.arange(0, 256, 2)):
        with pytest.raises(ValueError, match="cut blocks of 128 rows"):
            codes.take_rows(rows)


def test_parts_with_scales_of_their_own_are_no_whole() -> None:
    quantizer = SCHEMES["compressed-tensors-nvfp4"].default_quantizer()
    parts = [codes_of(quantizer.quantize(weight() * factor)) for factor in (1, 2)]
    with pytest.raises(ValueError, match="scales of their own"):
        join_codes(parts, [torch.arange(256), torch.arange(256, 512)])


def test_scales_of_others_are_written_as_they_were() -> None:
    """A published scale that no amax gives: it comes back as long as the weight is what it was."""
    scheme = SCHEMES["compressed-tensors-nvfp4"]
    quantizer = scheme.default_quantizer()
    tensors = scheme.publish(codes_of(quantizer.quantize(weight())))
    lost = 0
    for step in range(64):
        bits = tensors["weight_global_scale"].view(torch.int32) + step
        theirs = {**tensors, "weight_global_scale": bits.view(torch.float32)}
        codes = scheme.codes(theirs, quantizer)
        lost += not torch.equal(scheme.publish(codes)["weight_global_scale"], theirs["weight_global_scale"])
        again = scheme.publish(codes, known=theirs)
        assert torch.equal(again["weight_global_scale"], theirs["weight_global_scale"])
        other = scheme.codes(tensors | {"weight_global_scale": tensors["weight_global_scale"] * 2}, quantizer)
        assert not torch.equal(scheme.publish(other, known=theirs)["weight_global_scale"], bits.view(torch.float32))
    assert lost  # without it


def test_blocks_of_others_have_no_square_tiles() -> None:
    """Scales of 16 elements that differ between the rows of a tile: columns are quantized anew, not transposed."""
    scheme = SCHEMES["compressed-tensors-nvfp4"]
    rows = recipe.NVFP4BlockScaling(disable_2d_quantization=True).quantizer(recipe.QuantizerRole("linear", "weight"))
    tiles = scheme.default_quantizer()
    tensors = scheme.publish(codes_of(rows.quantize(weight())))
    made = tensor_of(scheme.codes(tensors, tiles), tiles, torch.float32)
    wanted = tiles.with_usage(rowwise=False, columnwise=True).quantize(made.dequantize())
    assert torch.equal(made._columnwise_data, wanted._columnwise_data)
    assert torch.equal(made._rowwise_data, tensors["weight_packed"])


def test_zeros() -> None:
    for scheme in SCHEMES.values():
        quantizer = scheme.default_quantizer()
        quantized = quantizer.quantize(torch.zeros(ROWS, COLS))
        tensors = scheme.publish(codes_of(quantized))
        assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
        assert not DECODED[scheme.name](tensors).any()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_format_is_known_by_its_configuration(scheme: Scheme) -> None:
    assert scheme_of(scheme.config(["lm_head"])) is scheme
    assert "lm_head" in str(scheme.config(["lm_head"]))


@pytest.mark.parametrize(
    "config", [{}, {"quant_method": "gptq"}, {"quant_method": "compressed-tensors", "format": "int-quantized"}]
)
def test_other_configurations_are_refused(config: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="which is not read"):
        scheme_of(config)


def test_formats_by_name() -> None:
    assert find_scheme("compressed-tensors", recipe.NVFP4BlockScaling()).name == "compressed-tensors-nvfp4"
    for name in ("compressed-tensors", "gguf", "fp8"):
        with pytest.raises(ValueError, match=f"format is '{name}': give one of "):
            find_scheme(name)


def test_a_recipe_of_another_format() -> None:
    scheme = SCHEMES["hf-fp8"]
    with pytest.raises(ValueError, match="MXFP8BlockScaling quantizes weights otherwise than hf-fp8"):
        scheme.quantizer_of(recipe.MXFP8BlockScaling(), "")
    with pytest.raises(ValueError, match="keeps its scale from step to step"):
        SCHEMES["compressed-tensors-fp8-tensor"].quantizer_of(recipe.DelayedScaling(), "")
    with pytest.raises(ValueError, match="has no place"):
        scheme.quantizer_of(recipe.Float8BlockScaling(w_block_scaling_dim=1), "")
    with pytest.raises(ValueError, match="has no place"):
        SCHEMES["modelopt-nvfp4"].quantizer_of(recipe.NVFP4BlockScaling(nvfp4_4over6="weights"), "")
