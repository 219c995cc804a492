"""What only some formats have: tensors around data, stochastic rounding, delayed scaling."""

import torch

import mezzotint as mz
from tests.quantizer_formats import E4M3, E5M2, FORMATS, Format, assert_same_bytes, over_formats, same_bytes, sample
from tests.tensor.contract import over_internal

# Tensors around data that exists


@over_formats("float8_current", "float8_delayed", "float8_current_e5m2")
@over_internal
def test_float8_from_data(fmt: Format, internal: bool) -> None:
    source = fmt.quantize(sample((2, 16, 64)))
    quantizer = fmt.make()
    for usage in (True, False):
        quantizer.set_usage(rowwise=usage, columnwise=True)
        made = quantizer.create_tensor_from_data(source._data, torch.bfloat16, not internal, internal)
        assert type(made) is (fmt.storage if internal else fmt.tensor)
        assert made.get_usages() == {"rowwise": True, "columnwise": False}
        assert made._data.data_ptr() == source._data.data_ptr()
        assert made.dtype == torch.bfloat16
        assert tuple(made.shape) == (2, 16, 64)
        assert internal or made.requires_grad
    if fmt.name == "float8_delayed":
        assert torch.equal(made.dequantize(dtype=torch.float32), source.dequantize())
    else:
        assert torch.equal(made._scale_inv, torch.ones(1))
    typed = source._data.view(torch.float8_e4m3fn)
    assert quantizer.create_tensor_from_data(typed)._data.dtype == torch.uint8


def test_mxfp8_from_data() -> None:
    source = FORMATS["mxfp8_e5m2"].quantize(sample((32, 64)))
    made = mz.MXFP8Quantizer(E5M2).create_tensor_from_data(
        source._rowwise_data, source._rowwise_scale_inv, torch.float32, E5M2
    )
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(made.dequantize(), source.dequantize())


def test_nvfp4_shapes_of_packed_bytes() -> None:
    assert mz.NVFP4Quantizer.convert_shape_for_fp4((3, 32)) == (3, 16)
    assert mz.NVFP4Quantizer.convert_shape_for_fp4([3, 33]) == (3, 17)


def test_float8_transpose() -> None:
    tensor = FORMATS["float8_current"].quantize(sample((32, 64)))
    assert not tensor._transpose_invalid
    tensor.remove_caches()
    assert tensor._transpose_invalid
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}


def test_hybrid_parts() -> None:
    tensor = FORMATS["hybrid"].quantize(sample((32, 64)))
    assert_same_bytes(tensor.rowwise_storage, FORMATS["mxfp8"].quantize(sample((32, 64)), True, False))
    assert_same_bytes(tensor.columnwise_storage, FORMATS["nvfp4"].quantize(sample((32, 64)), False, True))
    chained = FORMATS["hybrid_chained"].quantize(sample((32, 64)))
    between = FORMATS["mxfp8"].quantize(sample((32, 64)), True, False).dequantize()
    assert_same_bytes(chained.columnwise_storage, FORMATS["nvfp4"].quantize(between, False, True))
    assert not same_bytes(chained.columnwise_storage, tensor.columnwise_storage)
    tensor.update_usage(rowwise_usage=False)
    assert tensor.rowwise_storage is None
    assert tensor.columnwise_storage is not None


def test_sources_of_a_hybrid_matter_without_the_rowwise_copy() -> None:
    """The column-wise copy of a chained hybrid goes through the row-wise format even where that copy is not kept."""
    chained = FORMATS["hybrid_chained"]
    both, alone = chained.quantize(sample((32, 64))), chained.quantize(sample((32, 64)), False, True)
    assert_same_bytes(both.columnwise_storage, alone.columnwise_storage)


# Randomness


@over_formats(is_random=True)
def test_stochastic_rounding_follows_the_generator(fmt: Format) -> None:
    x = sample((64, 64))
    assert_same_bytes(fmt.quantize(x, seed=3), fmt.quantize(x, seed=3))
    assert not same_bytes(fmt.quantize(x, seed=3), fmt.quantize(x, seed=4))
    torch.manual_seed(3)
    quantizer = fmt.make()
    first, second = quantizer.quantize(x), quantizer.quantize(x)
    assert not same_bytes(first, second)


# Delayed scaling


def test_delayed_amax_is_the_running_maximum() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    for largest, expected in ((2.0, 2.0), (5.0, 5.0), (3.0, 5.0)):
        quantizer.quantize(torch.tensor([[largest, -1.0]]))
        assert quantizer.amax.item() == expected
    target = quantizer.make_empty((1, 2))
    quantizer.update_quantized(torch.tensor([[-7.0, 1.0]]), target)
    assert quantizer.amax.item() == 7.0
    quantizer.update_quantized(torch.tensor([[-9.0, 1.0]]), target, noop_flag=torch.ones(1))
    assert quantizer.amax.item() == 7.0
    target.quantize_(torch.tensor([[11.0, 1.0]]))  # the tensor's copy writes to the same amax
    assert quantizer.amax.item() == 11.0
    quantizer.copy().quantize(torch.tensor([[13.0, 1.0]]))
    assert quantizer.amax.item() == 13.0
    quantizer.with_usage(columnwise=False).quantize(torch.tensor([[17.0, 1.0]]))
    assert quantizer.amax.item() == 17.0


def test_delayed_scale_is_taken_at_the_cast() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    x = sample((32, 64))
    tensor = quantizer.quantize(x)
    expected = tensor.dequantize()
    quantizer.scale.fill_(2.0)
    assert torch.equal(tensor.dequantize(), expected)
    assert tensor._scale_inv.item() == 1 / 16
    tensor.quantize_(x)
    assert tensor._scale_inv.item() == 0.5
    other = quantizer.quantize(x)
    quantizer.scale.fill_(4.0)
    assert other._scale_inv.item() == 0.5


def test_delayed_calibration() -> None:
    quantizer = FORMATS["float8_delayed"].make()
    quantizer.calibrate(torch.tensor([[1.0, -6.0]]))
    assert quantizer.amax.item() == 6.0
    assert quantizer.scale.item() == 16.0
    for fmt in FORMATS.values():
        fmt.make().calibrate(sample((32, 64)))  # the others take it and need nothing


def test_delayed_quantizers_are_themselves_only() -> None:
    scale, amax = torch.ones(1), torch.zeros(1)
    first, second = (mz.Float8Quantizer(scale, amax, E4M3) for _ in range(2))
    assert first != second
    assert first == first
    assert len({first, second}) == 2
    assert first.copy() != first
    assert first.copy().scale is scale
    assert "Float8Quantizer" in repr(first)
    assert not first._is_value()
