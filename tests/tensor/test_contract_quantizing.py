"""What holds for every format: usages are what they say, and every way to quantize gives the same."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.tensor.quantizer import quantize, quantize_storage
from tests.quantizer_formats import FORMATS, USAGES, Format, assert_same_bytes, buffers, over_formats, sample, snapshot
from tests.tensor.contract import over_internal, over_usages

# Usages


@over_formats()
@over_internal
def test_usages_are_dropped(fmt: Format, internal: bool) -> None:
    for rowwise, columnwise in USAGES[:2]:
        quantized = fmt.quantize(sample((32, 64)), True, True, internal)
        quantized.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
        assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert_same_bytes(quantized, fmt.quantize(sample((32, 64)), rowwise, columnwise, internal))
        assert quantized._quantizer.get_usages() == quantized.get_usages()
        assert tuple(quantized.shape) == (32, 64)
        quantized.update_usage()
        assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}


@over_formats()
@over_internal
def test_usages_are_derived_or_refused(fmt: Format, internal: bool) -> None:
    for shape in ((160, 144), (40, 48), (5, 7), (2, 16, 64)) if fmt.derives else ((5, 7),):
        for rowwise, columnwise in USAGES[:2]:
            wanted = "columnwise" if rowwise else "rowwise"
            quantized = fmt.quantize(sample(shape), rowwise, columnwise, internal)
            held = snapshot(quantized)
            if wanted in fmt.derives:
                both = fmt.quantize(sample(shape), True, True, internal)
                quantized.update_usage(**{f"{wanted}_usage": True})
                assert_same_bytes(quantized, both)
                assert quantized.get_usages() == {"rowwise": True, "columnwise": True}
                assert quantized._quantizer.get_usages() == quantized.get_usages()
            else:
                with pytest.raises(ValueError, match=r"cannot be made from the other direction.*before quantizing"):
                    quantized.update_usage(**{f"{wanted}_usage": True})
                assert_same_bytes(quantized, held)


@over_formats()
@over_internal
def test_keep(fmt: Format, internal: bool) -> None:
    quantized = fmt.quantize(sample((5, 7)), True, True, internal)
    for rowwise, columnwise in USAGES:
        kept = quantized.keep(rowwise=rowwise, columnwise=columnwise)
        assert type(kept) is type(quantized)
        assert kept.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert all(getattr(quantized, name) is b for name, b in buffers(kept).items())
        assert tuple(kept.shape) == (5, 7)
        assert quantized.get_usages() == {"rowwise": True, "columnwise": True}


@over_formats()
def test_data_tensors(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    row, column = tensor.get_data_tensors()
    assert row is tensor.get_data_tensors(columnwise_data=False)
    assert column is tensor.get_data_tensors(rowwise_data=False)
    assert any(row is b for b in buffers(tensor).values())
    assert any(column is b for b in buffers(tensor).values())
    tensor.update_usage(columnwise_usage=False)
    assert tensor.get_data_tensors()[0] is row


@over_formats()
def test_gemm_operands(fmt: Format) -> None:
    for shape in ((32, 64), (2, 16, 64)):
        storage = fmt.quantize(sample(shape), internal=True)
        for columnwise in (False, True):
            operand = storage.gemm_operand(columnwise)
            assert operand.data.dim() == 2


# Quantizing


@over_formats()
def test_the_tensor_holds_a_copy_of_the_quantizer(fmt: Format) -> None:
    for internal in (False, True):
        quantizer = fmt.quantizer(internal=internal)
        for quantized in (quantizer.quantize(sample((32, 64))), quantizer.make_empty((32, 64))):
            assert quantized._quantizer is not quantizer
            quantizer.set_usage(columnwise=False)
            assert quantized._quantizer.columnwise_usage
            assert quantized.get_usages() == {"rowwise": True, "columnwise": True}
            quantizer.set_usage(columnwise=True)
            other = fmt.make()
            quantized.update_quantizer(other)
            assert quantized._quantizer is not other


@over_formats()
def test_quantizing_a_quantized_tensor(fmt: Format) -> None:
    source = FORMATS["mxfp8"].quantize(sample((32, 64)))
    expected = fmt.quantize(source.dequantize())
    for quantized in (source, FORMATS["mxfp8"].quantize(sample((32, 64)), internal=True)):
        assert_same_bytes(fmt.quantize(quantized), expected)
        target = fmt.make().make_empty((32, 64))
        torch.manual_seed(0)
        target.quantize_(quantized)
        assert_same_bytes(target, expected)


@pytest.mark.cover(2)
@over_formats()
@over_usages
@over_internal
def test_quantizing_in_place(fmt: Format, rowwise: bool, columnwise: bool, internal: bool) -> None:
    for shape in ((32, 64), (3, 5, 7), (0, 64)):
        x = sample(shape)
        expected = fmt.quantize(x, rowwise, columnwise, internal)
        quantizer = fmt.quantizer(rowwise, columnwise, internal)
        target = quantizer.make_empty(shape)
        pointers = {name: b.data_ptr() for name, b in buffers(target).items()}

        def write_by_quantize_(target: Any = target, x: Any = x, **flag: Any) -> Any:
            return target.quantize_(x, **flag)

        def write_by_update(target: Any = target, x: Any = x, quantizer: Any = quantizer, **flag: Any) -> Any:
            return quantizer.update_quantized(x, target, **flag)

        def write_by_out(target: Any = target, x: Any = x, quantizer: Any = quantizer) -> Any:
            return quantizer.quantize(x, out=target)

        for write in (write_by_quantize_, write_by_update, write_by_out):
            for buffer in buffers(target).values():
                buffer.fill_(3)
            torch.manual_seed(0)
            assert write() is target
            assert_same_bytes(target, expected)
        for write in (write_by_quantize_, write_by_update):
            for buffer in buffers(target).values():
                buffer.fill_(3)
            before = snapshot(target)
            write(noop_flag=torch.ones(1))
            assert_same_bytes(target, before)
            torch.manual_seed(0)
            write(noop_flag=torch.zeros(1))
            assert_same_bytes(target, expected)
        assert {name: b.data_ptr() for name, b in buffers(target).items()} == pointers


@over_formats()
def test_update_writes_what_the_target_holds(fmt: Format) -> None:
    """The target's usages decide, whatever the quantizer's are."""
    target = fmt.quantize(sample((32, 64), seed=1), True, False)
    torch.manual_seed(0)
    fmt.make().update_quantized(sample((32, 64)), target)
    assert_same_bytes(target, fmt.quantize(sample((32, 64)), True, False))


@over_formats()
def test_internal_gives_storages(fmt: Format) -> None:
    x = sample((32, 64)).requires_grad_()
    storage = fmt.quantize(x, internal=True)
    assert type(storage) is fmt.storage
    assert not isinstance(storage, torch.Tensor)
    assert_same_bytes(storage, fmt.quantize(x.detach()))
    assert type(fmt.quantizer(internal=True).make_empty((32, 64))) is fmt.storage
    torch.manual_seed(0)
    assert_same_bytes(quantize_storage(x.detach(), fmt.make()), storage)
    assert not any(b.requires_grad for b in buffers(storage).values())


@over_formats()
def test_ways_to_quantize_agree(fmt: Format) -> None:
    x = sample((32, 64))
    expected = fmt.quantize(x)
    for call in (
        lambda q: q(x),
        lambda q: q.quantize(x),
        lambda q: q.quantize_impl(x),
        lambda q: quantize(x, q),
        lambda q: q.multi_quantize([x])[0],
    ):
        torch.manual_seed(0)
        made = call(fmt.make())
        assert type(made) is fmt.tensor
        assert_same_bytes(made, expected)
    assert fmt.make().multi_quantize([]) == []
    assert [t.shape[0] for t in fmt.make().multi_quantize([x, x[:5]])] == [32, 5]
    assert fmt.make().quantize(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert fmt.quantizer(internal=True).quantize(x, dtype=torch.bfloat16).dtype == torch.bfloat16


@over_formats()
def test_gradients_are_the_identity(fmt: Format) -> None:
    x = sample((32, 64)).requires_grad_()
    weight = sample((32, 64), seed=1)
    quantized = fmt.quantize(x)
    assert quantized.requires_grad
    assert quantized.grad_fn is not None
    back = quantized.dequantize()
    assert back.requires_grad
    (back * weight).sum().backward()
    assert torch.equal(x.grad, weight)

    leaf = fmt.quantize(sample((32, 64))).requires_grad_()
    (leaf.dequantize() * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)
    leaf.grad = None
    (leaf * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)

    with torch.no_grad():
        assert not fmt.quantize(x).requires_grad
        assert not leaf.dequantize().requires_grad
    assert not fmt.make().quantize_impl(x).requires_grad


@over_formats()
def test_gradients_through_views(fmt: Format) -> None:
    x = sample((4, 8, 64)).requires_grad_()
    fmt.quantize(x).view(32, 64).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8, 64))
    x.grad = None
    fmt.quantize(x)[1:3].sum().backward()
    assert x.grad.sum() == 2 * 8 * 64


@over_formats()
def test_make_empty(fmt: Format) -> None:
    made = fmt.make().make_empty((32, 64), dtype=torch.bfloat16, requires_grad=True)
    assert (type(made), made.dtype, tuple(made.shape)) == (fmt.tensor, torch.bfloat16, (32, 64))
    assert made.requires_grad
    assert made.is_leaf
    assert fmt.make().make_empty([5, 7], device="meta").device.type == "meta"
    assert fmt.make().make_empty((5, 7)).dtype == torch.float32


@over_formats()
def test_shapes_of_codes_and_scales(fmt: Format) -> None:
    """The capability methods say what the buffers have."""
    for shape in ((256, 64), (40, 48), (5, 7), (2, 16, 64)):
        for columnwise in (False, True):
            quantizer = fmt.quantizer(not columnwise, columnwise)
            tensor = quantizer.quantize(sample(shape))
            data = tensor.get_data_tensors(not columnwise, columnwise)
            if columnwise:
                assert tuple(quantizer.get_columnwise_shape(shape)) == tuple(data.shape)
            if fmt.has_scales and not fmt.name.startswith("hybrid"):
                scales = [b for n, b in buffers(tensor).items() if n.endswith("scale_inv")]
                assert tuple(quantizer.get_scale_shape(shape, columnwise)) == tuple(scales[0].shape)
    if not fmt.has_scales:
        with pytest.raises(ValueError, match="has no scales"):
            fmt.make().get_scale_shape((32, 64), False)


def test_scale_shape_of_a_hybrid_is_that_of_its_parts() -> None:
    quantizer = FORMATS["hybrid"].make()
    assert quantizer.get_scale_shape((256, 64), False) == FORMATS["mxfp8"].make().get_scale_shape((256, 64), False)
    assert quantizer.get_scale_shape((256, 64), True) == FORMATS["nvfp4"].make().get_scale_shape((256, 64), True)


@over_formats()
def test_no_dimensions(fmt: Format) -> None:
    """A tensor without dimensions is as one with a single element, but for its shape."""
    x = torch.tensor(1.375, requires_grad=True)
    torch.manual_seed(0)
    quantized = fmt.make().quantize(x)
    torch.manual_seed(0)
    expected = fmt.make().quantize(x.detach().reshape(1))
    assert quantized.shape == quantized.dequantize().shape == ()
    assert torch.equal(quantized.dequantize(), expected.dequantize()[0])
    quantized.dequantize().backward()
    assert x.grad == 1.0
    target = fmt.make().make_empty(())
    torch.manual_seed(0)
    target.quantize_(x.detach())
    assert target.shape == ()
    assert torch.equal(target.dequantize(), expected.dequantize()[0])


@pytest.mark.parametrize("quantizer", ["float8_current", "float8_delayed"])
@pytest.mark.parametrize("columnwise", [False, True])
def test_no_dimensions_of_codes(quantizer: str, columnwise: bool) -> None:
    """The codes of FP8 with one scale have the shape of the tensor, also where that has no dimensions."""
    made = FORMATS[quantizer].make().with_usage(rowwise=not columnwise, columnwise=columnwise)
    empty = made.make_empty(())
    for tensor in (made.quantize(torch.tensor(1.375)), empty, mz.to_tensor_proto(empty).create_tensor()):
        codes = tensor._transpose if columnwise else tensor._data
        assert (codes.shape, tensor.shape, tensor._scale_inv.shape) == ((), (), (1,))
    quantized, expected = (made.quantize(x).detach().clone() for x in (torch.tensor(1.375), torch.tensor([1.375])))
    assert torch.equal(quantized.dequantize(), expected.dequantize()[0])
    quantized.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert quantized._data.shape == quantized._transpose.shape == ()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("float8_current", (5, 7), True),
        ("float8_block_2d", (256, 128), True),
        ("float8_block_2d", (256, 64), False),
        ("mxfp8", (2, 16, 64), True),
        ("mxfp8", (33, 64), False),
        ("mxfp8", (32, 48), False),
        ("nvfp4", (16, 16), True),
        ("nvfp4", (8, 16), False),
        ("nvfp4_row_scaled", (16, 16), False),
        ("identity", (5, 7), True),
        ("hybrid", (16, 64), False),
        ("hybrid", (32, 64), True),
        ("hybrid", (33, 64), False),
    ],
)
def test_is_quantizable(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert FORMATS[name].make().is_quantizable(sample(shape)) is expected


def test_capabilities() -> None:
    rowwise_only = {n for n, f in FORMATS.items() if f.make().supports_only_rowwise_all_gather()}
    assert rowwise_only == {"float8_current", "float8_current_e5m2", "float8_current_pow2", "float8_delayed"}
    with pytest.raises(NotImplementedError, match="export the dequantized model"):
        FORMATS["mxfp8"].make().onnx_quantize(sample((32, 64)))
    with pytest.raises(NotImplementedError, match="export the dequantized model"):
        FORMATS["mxfp8"].make().onnx_dequantize(sample((32, 64)))
