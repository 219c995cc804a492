"""What quantized tensors and modules with quantized weights print: values as torch prints them, and the format."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzotint as mz
from mezzotint import TensorProto
from tests.quantizer_formats import E4M3, E5M2, FORMATS, Format, over_formats, sample
from tests.recipes import MODULES, RECIPES, make

over_internal = pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])


def test_a_tensor_prints_its_values_and_what_it_is() -> None:
    tensor = mz.MXFP8Quantizer(E5M2).quantize(torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.bfloat16))
    assert repr(tensor) == (
        "MXFP8Tensor([[ 1.0000, -2.0000],\n"
        "             [ 0.5000,  4.0000]], shape=(2, 2), dtype=torch.bfloat16, device='cpu', fp8_dtype=E5M2, "
        "usage=rowwise+columnwise)"
    )
    assert str(tensor) == repr(tensor)
    assert f"{tensor}" == repr(tensor)


@over_formats()
def test_values_are_printed_as_torch_prints_them(fmt: Format) -> None:
    """Those that the tensor stands for, summarised where they are many."""
    tensor = fmt.quantize(sample((64, 64)))
    plain = str(tensor.dequantize())
    numbers = plain[plain.index("[[") : plain.rindex("]]")].split()
    assert repr(tensor)[: repr(tensor).index("]]")].split("(", 1)[1].split() == numbers
    assert "...," in numbers


def test_gradients_and_parameters() -> None:
    quantizer = mz.MXFP8Quantizer(E4M3)
    x = torch.ones(32, 32, requires_grad=True)
    assert repr(quantizer.quantize(x)).endswith("grad_fn=<_QuantizeBackward>)")
    parameter = nn.Parameter(quantizer.quantize(x.detach()))
    assert repr(parameter).startswith("Parameter containing:\nMXFP8Tensor([[1., 1., 1.,")
    assert repr(parameter).endswith("usage=rowwise+columnwise, requires_grad=True)")


def test_options_that_are_off_are_left_out() -> None:
    def text(name: str) -> str:
        return repr(FORMATS[name].quantize(sample((16, 16)), True, False)).split("device='cpu', ")[1]

    assert text("nvfp4") == "fp4_dtype=E2M1, usage=rowwise)"
    assert text("nvfp4_row_scaled") == "fp4_dtype=E2M1, row_scaled_nvfp4=True, usage=rowwise)"
    assert text("float8_block_2d") == "fp8_dtype=E4M3, usage=rowwise)"
    assert text("float8_block_1d") == "fp8_dtype=E4M3, is_2D_scaled=False, usage=rowwise)"
    both = repr(FORMATS["hybrid"].quantize(sample((16, 16))))
    assert both.endswith("rowwise=MXFP8Quantizer, columnwise=NVFP4Quantizer, usage=rowwise+columnwise)")


def test_a_group_prints_its_members() -> None:
    made = mz.GroupedTensor.make_grouped_tensor_with_shapes(2, [(1, 2)] * 2, mz.IdentityQuantizer(), "cpu")
    made.quantize([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])])
    text = repr(made)
    assert text.startswith(
        "GroupedTensor([[[1., 2.]],\n\n               [[3., 4.]]], num_tensors=2, shapes=[(1, 2), (1, 2)]"
    )
    assert "device='cpu'" in text


@over_formats()
@over_internal
def test_values_that_are_not_there_are_not_read(fmt: Format, internal: bool) -> None:
    """The compiler logs what it traces."""
    with FakeTensorMode():
        fake = fmt.quantizer(internal=internal).quantize(torch.empty(32, 64))
        text = repr(fake)
    assert text.startswith(f"{type(fake).__name__}({'' if internal else '..., '}shape=(32, 64), dtype=torch.float32")
    assert "device='cpu'" in text
    assert "usage=rowwise+columnwise" in text
    meta = TensorProto((32, 64), torch.float32, fmt.quantizer(internal=internal), device=torch.device("meta"))
    assert repr(meta.create_tensor()) == text.replace("'cpu'", "'meta'")


def test_freed_memory_is_not_read() -> None:
    """FSDP2 frees what it has gathered."""
    tensor = mz.MXFP8Quantizer(E4M3).quantize(torch.ones(32, 32))
    for _, buffer in tensor._buffers():
        buffer.untyped_storage().resize_(0)
    assert repr(tensor).startswith("MXFP8Tensor(..., shape=(32, 32)")


def test_a_storage_without_data() -> None:
    storage = mz.MXFP8Quantizer(E4M3)._with_internal(True).quantize(torch.ones(32, 32))
    storage.clear()
    assert repr(storage) == "MXFP8TensorStorage(dtype=torch.float32, no data)"


def test_no_values_without_rows() -> None:
    assert repr(mz.MXFP8Quantizer(E4M3).quantize(torch.ones(0, 32))).startswith("MXFP8Tensor([], shape=(0, 32)")


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_how_their_weights_are_quantized(name: str) -> None:
    assert "quantized" not in repr(make(name))
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        module = make(name)
    assert repr(module).endswith(", quantized_weights=MXFP8Tensor(E4M3))")
    if name != "layernorm_mlp":
        assert "in_features=64, out_features=48" in repr(module)


def test_other_modules_and_formats() -> None:
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"]):
        grouped = make("grouped_linear", single_grouped_weight=True)
        op = mz.ops.Linear(64, 48, device="cpu")
    assert "quantized_weights=GroupedTensor(MXFP8Quantizer)" in repr(grouped)
    assert repr(op).count("quantized_weights=MXFP8Tensor(E4M3)") == 2  # and the operation in it
    with mz.quantized_model_init(recipe=RECIPES["custom"]):
        assert "quantized_weights=HybridQuantizedTensor(NVFP4Quantizer, MXFP8Quantizer)" in repr(make("linear"))
