"""What is refused: each error is a ValueError or TypeError that names the argument, what it was and what to do."""

from typing import Any

import numpy as np
import pytest
import torch

import mezzotint as mz
from mezzotint import DType, QuantizedTensor, QuantizedTensorStorage, Quantizer, TensorProto, to_tensor_proto
from mezzotint.kernels._lib import Buffers
from mezzotint.tensor.flatten import class_by_name
from tests.quantizer_formats import E4M3, E5M2, FORMATS, Format, over_formats, same_bytes, sample, snapshot

FP8_QUANTIZERS = [
    pytest.param(mz.Float8CurrentScalingQuantizer, id="current"),
    pytest.param(mz.Float8RowwiseQuantizer, id="rowwise"),
    pytest.param(mz.Float8BlockQuantizer, id="block"),
    pytest.param(mz.MXFP8Quantizer, id="mxfp8"),
    pytest.param(lambda dtype: mz.Float8Quantizer(torch.ones(1), torch.zeros(1), dtype), id="delayed"),
]


@pytest.mark.parametrize("eps", [-1e-3, float("nan"), float("inf"), "x", None])
@pytest.mark.parametrize("make", [mz.Float8CurrentScalingQuantizer, mz.Float8RowwiseQuantizer, mz.Float8BlockQuantizer])
def test_amax_epsilon(make: Any, eps: Any) -> None:
    with pytest.raises(ValueError, match=rf"amax_epsilon is {eps!r}: give 0 or a positive number"):
        make(E4M3, amax_epsilon=eps)


# What is quantized


@over_formats()
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtype_of_the_tensor(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.zeros(32, 64).to(dtype)
    message = rf"tensor has dtype {dtype}: \w+ takes float32, float16 or bfloat16"
    for internal in (False, True):
        with pytest.raises(TypeError, match=message):
            fmt.quantizer(internal=internal).quantize(x)
    with pytest.raises(TypeError, match=message):
        fmt.make().make_empty((32, 64)).quantize_(x)


@over_formats()
@pytest.mark.parametrize(
    "value", [[[1.0]], np.ones((2, 2), np.float32), None, 1.0, "x"], ids=lambda v: type(v).__name__
)
def test_no_tensor(fmt: Format, value: Any) -> None:
    message = rf"tensor is {type(value).__name__}: give a torch.Tensor"
    for quantizer in (fmt.make(), fmt.quantizer(internal=True)):
        with pytest.raises(TypeError, match=message):
            quantizer.quantize(value)
        with pytest.raises(TypeError, match=message):
            quantizer.update_quantized(value, quantizer.make_empty((2, 2)))


@over_formats()
def test_no_usage(fmt: Format) -> None:
    message = r"rowwise_usage=False and columnwise_usage=False: nothing to make; ask for one with set_usage"
    for internal in (False, True):
        quantizer = fmt.quantizer(False, False, internal)
        with pytest.raises(ValueError, match=rf"{type(quantizer).__name__} has {message}"):
            quantizer.quantize(sample((32, 64)))
        with pytest.raises(ValueError, match=message):
            quantizer.make_empty((32, 64))


@over_formats()
def test_nominal_dtype(fmt: Format) -> None:
    message = r"dtype is torch.int8: a quantized tensor stands for float32, float16 or bfloat16"
    for quantizer in (fmt.make(), fmt.quantizer(internal=True)):
        with pytest.raises(TypeError, match=message):
            quantizer.quantize(sample((32, 64)), dtype=torch.int8)
        with pytest.raises(TypeError, match=message):
            quantizer.make_empty((32, 64), dtype=torch.int8)


# What is quantized into


@over_formats()
def test_target_of_another_class(fmt: Format) -> None:
    quantizer = fmt.make()
    other = "mxfp8" if fmt.storage is not mz.MXFP8TensorStorage else "nvfp4"
    for target in (torch.empty(32, 64), FORMATS[other].make().make_empty((32, 64)), None):
        message = (
            rf"dst is {type(target).__name__}: \w+ writes into [\w.]*{fmt.storage.__name__}; make one with make_empty"
        )
        with pytest.raises(TypeError, match=message):
            quantizer.update_quantized(sample((32, 64)), target)
    with pytest.raises(TypeError, match="writes into"):
        quantizer.quantize(sample((32, 64)), out=torch.empty(32, 64))


@over_formats()
def test_target_of_another_shape(fmt: Format) -> None:
    target = fmt.make().make_empty((32, 64))
    for shape in ((64, 32), (32, 65), (2, 16, 64)):
        message = (
            rf"dst has shape \(32, 64\), src {str(shape).replace('(', '[(]').replace(')', '[)]')}: they must be equal"
        )
        with pytest.raises(ValueError, match=message):
            target.quantize_(sample(shape))


@over_formats()
def test_target_on_another_device(fmt: Format) -> None:
    target = fmt.make().make_empty((32, 64), device="meta")
    with pytest.raises(ValueError, match=r"src is on cpu, dst on meta: move one of them with .to\(\)"):
        fmt.make().update_quantized(sample((32, 64)), target)


@pytest.mark.parametrize(
    ("target", "source", "named"),
    [
        ("float8_current_e5m2", "float8_current", "fp8_dtype"),
        ("float8_current", "float8_current_e5m2", "fp8_dtype"),
        ("mxfp8", "mxfp8_e5m2", "fp8_dtype"),
        ("mxfp8", "mxfp8_swizzled", "with_gemm_swizzled_scales"),
        ("mxfp8_swizzled", "mxfp8", "with_gemm_swizzled_scales"),
        ("float8_block_2d", "float8_block_1d", "is_2D_scaled"),
        ("nvfp4", "nvfp4_swizzled", "with_gemm_swizzled_scales"),
        ("nvfp4", "nvfp4_e4m3_256", "nvfp4_e4m3_max"),
        ("nvfp4", "nvfp4_row_scaled", "row_scaled_nvfp4"),
        ("nvfp4", "nvfp4_4over6_mae", "nvfp4_use_4over6"),
    ],
)
def test_target_that_would_be_misread(target: str, source: str, named: str) -> None:
    """Bytes of one form in a tensor that says another: numbers would be wrong in silence."""
    tensor = FORMATS[target].quantize(sample((32, 64)))
    before = snapshot(tensor)
    message = rf"dst has {named}=.*: quantize with the quantizer that dst was made with, or into a new tensor"
    with pytest.raises(ValueError, match=message):
        FORMATS[source].make().update_quantized(sample((32, 64), seed=1), tensor)
    assert same_bytes(tensor, before)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("mxfp8_2d", "mxfp8"),
        ("nvfp4_2d", "nvfp4"),
        ("nvfp4_rht", "nvfp4"),
        ("nvfp4_rht", "nvfp4_rht_no_signs"),
        ("hybrid", "hybrid_nvfp4_rht"),
    ],
)
def test_target_of_another_layout(target: str, source: str) -> None:
    """The same of what only the quantizer says: what would be derived or multiplied is something else."""
    tensor, other = (FORMATS[name].quantize(sample((32, 64), seed=1)) for name in (target, source))
    before = snapshot(tensor)
    with pytest.raises(ValueError, match=r"dst was made with .* mean something else than those of .*: quantize with"):
        FORMATS[source].make().update_quantized(sample((32, 64)), tensor)
    assert same_bytes(tensor, before)
    assert same_bytes(tensor.copy_(other), FORMATS[target].quantize(other.dequantize()))


@over_formats()
@pytest.mark.parametrize("flag", [True, 1.0, [0]])
def test_noop_flag_is_no_tensor(fmt: Format, flag: Any) -> None:
    target = fmt.make().make_empty((32, 64))
    with pytest.raises(TypeError, match=rf"noop_flag is {type(flag).__name__}: give a tensor of one element"):
        target.quantize_(sample((32, 64)), noop_flag=flag)


def test_noop_flag_of_many_elements() -> None:
    target = FORMATS["mxfp8"].make().make_empty((32, 64))
    with pytest.raises(ValueError, match=r"noop_flag has shape \(2,\): give one element"):
        target.quantize_(sample((32, 64)), noop_flag=torch.zeros(2))


@over_formats()
def test_no_quantizer(fmt: Format) -> None:
    for internal in (False, True):
        quantized = fmt.quantize(sample((32, 64)), internal=internal)
        quantized._quantizer = None
        with pytest.raises(ValueError, match=rf"{type(quantized).__name__} has no quantizer: update_quantizer"):
            quantized.quantize_(sample((32, 64)))
        with pytest.raises(ValueError, match="without a quantizer: update_quantizer"):
            to_tensor_proto(quantized)


# Usages


@over_formats(has_scales=True)
def test_a_product_needs_a_direction_that_is_not_held(fmt: Format) -> None:
    for columnwise in (False, True):
        wanted = "columnwise" if columnwise else "rowwise"
        for internal in (False, True):
            quantized = fmt.quantize(sample((32, 64)), columnwise, not columnwise, internal)
            with pytest.raises(
                ValueError, match=rf"{type(quantized).__name__}.* holds no {wanted} data.*{wanted}=True"
            ):
                quantized.gemm_operand(columnwise)


@over_formats(has_scales=True)
def test_nothing_is_held(fmt: Format) -> None:
    quantized = fmt.quantize(sample((32, 64)))
    quantized.update_usage(rowwise_usage=False, columnwise_usage=False)
    for ask in (quantized.dequantize, lambda: quantized + 1, lambda: quantized.update_usage(columnwise_usage=True)):
        with pytest.raises(ValueError, match=rf"{fmt.tensor.__name__}.* holds no (row|column)-?wise data"):
            ask()


@over_formats()
def test_a_direction_that_cannot_be_derived(fmt: Format) -> None:
    for columnwise in (False, True):
        wanted = "columnwise" if columnwise else "rowwise"
        if wanted in fmt.derives:
            continue
        quantized = fmt.quantize(sample((32, 64)), columnwise, not columnwise)
        spelled = "column-wise" if columnwise else "row-wise"
        message = rf"{fmt.tensor.__name__} holds no {spelled} data and .* ask the quantizer for it before quantizing"
        with pytest.raises(ValueError, match=message):
            quantized.update_usage(**{f"{wanted}_usage": True})
        with pytest.raises(ValueError, match=message):
            quantized.keep(rowwise=True, columnwise=True)


# Storages


@over_formats()
def test_undeclared_constructor_argument(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    message = r"got \['banana'\], which it does not declare; it takes \[.*'quantizer'"
    with pytest.raises(TypeError, match=rf"{fmt.storage.__name__} {message}"):
        fmt.storage(**tensor.get_metadata(), banana=torch.ones(1))
    with pytest.raises(TypeError, match=rf"{fmt.tensor.__name__} {message}"):
        fmt.tensor(tensor.shape, tensor.dtype, **tensor.get_metadata(), banana=torch.ones(1))


@over_formats()
def test_positional_constructor_arguments(fmt: Format) -> None:
    metadata = fmt.quantize(sample((32, 64))).get_metadata()
    assert same_bytes(fmt.storage(*metadata.values()), fmt.storage(**metadata))
    with pytest.raises(TypeError, match=rf"{fmt.storage.__name__} got {len(metadata) + 1} positional arguments"):
        fmt.storage(*metadata.values(), 1)
    with pytest.raises(TypeError, match=r"it takes each of .* once"):
        fmt.storage(*metadata.values(), quantizer=None)


class _Undeclared(mz.IdentityQuantizer):
    """Describes a buffer that its storage does not have."""

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        return {**super()._describe_buffers(shape), "banana": ((1,), torch.float32)}


def test_undeclared_buffer() -> None:
    quantizer = _Undeclared()
    message = (
        r"_Undeclared describes the buffer 'banana', which IdentityTensorStorage does not declare; it declares "
        r"\['_hp_data'\]: add it to _FLATTEN_TENSOR_BUFFERS"
    )
    for use in (
        lambda: quantizer.inner_tensor_specs((32, 64)),
        lambda: quantizer.alloc_tensors((32, 64)),
        lambda: quantizer.make_empty((32, 64)),
        lambda: quantizer.quantize(sample((32, 64))),
        lambda: TensorProto((32, 64), torch.float32, quantizer).inner_names(),
        lambda: TensorProto((32, 64), torch.float32, quantizer).create_tensor(),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_unknown_class_name() -> None:
    with pytest.raises(ValueError, match=r"no quantized class is called 'nowhere.Tensor': import the module"):
        class_by_name("nowhere.Tensor")


def test_formats_must_be_filled_in() -> None:
    class Empty(Quantizer):
        pass

    class EmptyStorage(QuantizedTensorStorage):
        _VALUES = (("_quantizer", "quantizer", None),)

    quantizer = Empty(rowwise=True, columnwise=True)
    for method, arguments in (("_describe_buffers", ((1, 1),)), ("_classes", ()), ("_in_place_op", ())):
        with pytest.raises(NotImplementedError, match="Empty does not"):
            getattr(quantizer, method)(*arguments)
    storage = EmptyStorage()
    for method, arguments in (("_logical_shape", ()), ("_dequantize", (torch.float32,)), ("gemm_operand", (False,))):
        with pytest.raises(NotImplementedError, match="EmptyStorage"):
            getattr(storage, method)(*arguments)


@over_formats()
def test_no_data_has_no_device(fmt: Format) -> None:
    storage = fmt.quantize(sample((32, 64)), internal=True)
    storage.clear()
    with pytest.raises(RuntimeError, match=rf"{fmt.storage.__name__} has no device: it holds no data"):
        _ = storage.device


# Views, copies, data


@over_formats(has_scales=True)
def test_view_of_another_last_dimension(fmt: Format) -> None:
    storage = fmt.quantize(sample((32, 64)), internal=True)
    message = rf"{fmt.storage.__name__} of shape \(32, 64\) cannot be viewed as \(64, 32\): .*dequantize\(\) first"
    if fmt.name != "hybrid_float8_identity":
        with pytest.raises(ValueError, match=message):
            storage.view(64, 32)
    tensor = fmt.quantize(sample((32, 64)))
    assert torch.equal(torch.as_tensor(tensor.view(64, 32)), tensor.dequantize().view(64, 32))


@over_formats()
@pytest.mark.parametrize("shape", [(31, 64), (3, -1, 64), (32, 64, 2)])
def test_view_of_another_size(fmt: Format, shape: tuple[int, ...]) -> None:
    for rowwise, columnwise in ((True, False), (False, True)):
        for internal in (False, True):
            quantized = fmt.quantize(sample((32, 64)), rowwise, columnwise, internal)
            with pytest.raises(ValueError, match=r"has another number of elements than \(32, 64\): they must be equal"):
                quantized.view(shape)


@over_formats()
def test_data_of_another_shape(fmt: Format) -> None:
    """Of a tensor that cannot make other buffers; others take it."""
    tensor = fmt.quantize(sample((32, 64)))
    tensor._quantizer = None
    for value in (fmt.quantize(sample((64, 64))), sample((64, 64))):
        with pytest.raises(ValueError, match=r"data has shape \(64, 64\), the tensor \(32, 64\): .*must be equal"):
            tensor.data = value


@over_formats()
def test_copy_from_another_form(fmt: Format) -> None:
    target = fmt.quantize(sample((64, 64)), internal=True)
    before = snapshot(target)
    other = "mxfp8" if fmt.storage is not mz.MXFP8TensorStorage else "nvfp4"
    sources = [FORMATS[other].quantize(sample((64, 64)), internal=True), fmt.quantize(sample((32, 64)), internal=True)]
    if fmt.has_scales:
        sources.append(fmt.quantize(sample((64, 64)), True, False, internal=True))
    for source in sources:
        message = r"copy_from_storage needs the same buffers and options: .* dequantize src and quantize_ instead"
        with pytest.raises(ValueError, match=message):
            target.copy_from_storage(source)
    assert same_bytes(target, before)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("float8_current", "float8_current_e5m2"),
        ("mxfp8", "mxfp8_swizzled"),
        ("nvfp4", "nvfp4_2d"),
        ("nvfp4", "nvfp4_rht"),
        ("nvfp4_rht", "nvfp4_rht_no_signs"),
        ("nvfp4", "nvfp4_e4m3_256"),
    ],
)
def test_copy_of_bytes_that_mean_something_else(target: str, source: str) -> None:
    storages = [FORMATS[name].quantize(sample((128, 64)), internal=True) for name in (target, source)]
    with pytest.raises(ValueError, match="copy_from_storage needs the same buffers and options"):
        storages[0].copy_from_storage(storages[1])


def test_copy_between_hybrids_of_other_formats() -> None:
    def make(dtype: DType) -> Any:
        parts = {"rowwise_quantizer": mz.MXFP8Quantizer(dtype), "columnwise_quantizer": mz.MXFP8Quantizer(E4M3)}
        return mz.HybridQuantizer(**parts)

    first, second = make(E4M3).quantize(sample((32, 64))), make(E5M2).quantize(sample((32, 64)))
    with pytest.raises(ValueError, match="copy_from_storage needs the same buffers and options"):
        first.copy_from_storage(second)
    first.copy_(second)
    assert same_bytes(first, make(E4M3).quantize(second.dequantize()))


@over_formats()
def test_other_memory_formats(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    with pytest.raises(ValueError, match=r"memory_format=torch.channels_last: .*dequantize\(\) first"):
        tensor.contiguous(memory_format=torch.channels_last)


# Quantizers


@pytest.mark.parametrize("make", FP8_QUANTIZERS)
@pytest.mark.parametrize(
    "dtype", [DType.kFloat4E2M1, DType.kByte, 99, torch.float32, torch.uint8, "e4m3", None], ids=str
)
def test_fp8_dtype(make: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"fp8_dtype is .*: give DType.kFloat8E4M3 or DType.kFloat8E5M2"):
        make(dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mz.Float8BlockQuantizer(E4M3, block_scaling_dim=3), r"block_scaling_dim is 3: give one of 1, 2"),
        (lambda: mz.MXFP8Quantizer(E4M3, scale_rule="up"), r"scale_rule is 'up': give one of '\w+', '\w+'"),
        (lambda: mz.NVFP4Quantizer(E4M3), r"fp4_dtype is .*: give one of .*kFloat4E2M1"),
        (lambda: mz.NVFP4Quantizer(nvfp4_e4m3_max=100), r"nvfp4_e4m3_max is 100: give one of 448, 256"),
        (
            lambda: mz.NVFP4Quantizer(nvfp4_4over6_err_mode="L1"),
            r"nvfp4_4over6_err_mode is 'L1': give one of 'MAE', 'MSE'",
        ),
        (lambda: mz.IdentityQuantizer(dtype=torch.int32), r"dtype is torch.int32: give one of None, torch.float32"),
        (
            lambda: mz.HybridQuantizer(
                rowwise_quantizer=mz.IdentityQuantizer(),
                columnwise_quantizer=mz.IdentityQuantizer(),
                columnwise_source="mine",
            ),
            r"columnwise_source is 'mine': give one of 'original', 'rowwise_dequantized'",
        ),
    ],
    ids=["block_scaling_dim", "scale_rule", "fp4_dtype", "e4m3_max", "err_mode", "identity_dtype", "source"],
)
def test_choices(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("with_rht", "with_2d_quantization"),
        ("row_scaled_nvfp4", "with_rht"),
        ("row_scaled_nvfp4", "with_2d_quantization"),
        ("row_scaled_nvfp4", "stochastic_rounding"),
        ("row_scaled_nvfp4", "with_amax_reduction"),
        ("nvfp4_use_4over6", "with_rht"),
        ("nvfp4_use_4over6", "stochastic_rounding"),
    ],
)
def test_nvfp4_options_that_do_not_go_together(first: str, second: str) -> None:
    with pytest.raises(ValueError, match=rf"{first}=True and {second}=True do not go together: turn one of them off"):
        mz.NVFP4Quantizer(**{first: True, second: True}, with_post_rht_amax=True)


def test_nvfp4_transform_needs_its_amax() -> None:
    with pytest.raises(ValueError, match=r"with_rht=True needs with_post_rht_amax=True: .*after the transform"):
        mz.NVFP4Quantizer(with_rht=True)


@pytest.mark.parametrize("part", [None, "mxfp8", mz.MXFP8Quantizer])
def test_parts_of_a_hybrid(part: Any) -> None:
    with pytest.raises(TypeError, match=rf"rowwise_quantizer is {type(part).__name__}: give a Quantizer"):
        mz.HybridQuantizer(rowwise_quantizer=part, columnwise_quantizer=mz.IdentityQuantizer())
    with pytest.raises(TypeError, match=rf"columnwise_quantizer is {type(part).__name__}: give a Quantizer"):
        mz.HybridQuantizer(rowwise_quantizer=mz.IdentityQuantizer(), columnwise_quantizer=part)


@pytest.mark.parametrize("name", ["scale", "amax"])
def test_delayed_scaling_tensors(name: str) -> None:
    def make(value: Any) -> Any:
        return mz.Float8Quantizer(**{"scale": torch.ones(1), "amax": torch.zeros(1), name: value}, fp8_dtype=E4M3)

    with pytest.raises(TypeError, match=rf"{name} is float: give an FP32 tensor of one element"):
        make(1.0)
    with pytest.raises(ValueError, match=rf"{name} is torch.bfloat16 of shape \(1,\): give an FP32 tensor of one"):
        make(torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"{name} is torch.float32 of shape \(2,\): give an FP32 tensor of one"):
        make(torch.ones(2))
    assert make(torch.ones(())).quantize(sample((32, 64))).shape == (32, 64)


@over_formats("float8_current", "float8_delayed")
def test_data_that_is_no_fp8(fmt: Format) -> None:
    with pytest.raises(ValueError, match=r"data has dtype torch.float32: give FP8 codes"):
        fmt.make().create_tensor_from_data(sample((32, 64)))


# Prototypes


def test_proto_without_a_quantizer_has_no_usages() -> None:
    with pytest.raises(ValueError, match=r"this TensorProto has no quantizer, so it has no usages: give quantizer="):
        TensorProto((3, 4), torch.float32).update_usage(rowwise_usage=True)


@over_formats()
def test_proto_with_the_wrong_number_of_buffers(fmt: Format) -> None:
    proto = TensorProto((32, 64), torch.float32, fmt.make())
    expected = len(proto.inner_names())
    message = rf"inner_tensors has {expected + 1} tensors, this proto has {expected}: \("
    with pytest.raises(ValueError, match=message):
        proto.assemble([*proto.create_inner_tensors(), torch.ones(1)])


@pytest.mark.parametrize("value", [None, 1.0, [torch.ones(1)]], ids=lambda v: type(v).__name__)
def test_proto_of_no_tensor(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"tensor is {type(value).__name__}: give a torch.Tensor"):
        to_tensor_proto(value)


def test_saving_without_objects() -> None:
    class Context:
        saved_tensors = ()

    with pytest.raises(AttributeError, match=r"ctx has no tensor_objects: set it to what prepare_for_saving gave"):
        mz.restore_from_func_ctx(Context())


def test_base_classes_are_no_formats() -> None:
    assert issubclass(QuantizedTensor, QuantizedTensorStorage)
    for fmt in FORMATS.values():
        assert issubclass(fmt.tensor, fmt.storage)
        assert issubclass(fmt.tensor, QuantizedTensor)
        assert issubclass(fmt.tensor, torch.Tensor)
        assert not issubclass(fmt.storage, torch.Tensor)
