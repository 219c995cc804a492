"""A quantized tensor out of a file: its buffers fit its shape, or it is refused before a kernel reads it."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import mezzotint as mz
from mezzotint.distributed.checkpoint import full_state, load_full_state
from mezzotint.tensor.storage import rebuild_quantized_tensor
from tests.quantizer_formats import Format, over_formats

Arguments = list[Any]  # of rebuild_quantized_tensor: name, shape, dtype, buffers, values, …


class Pickled:
    """Its pickle is that of a tensor, changed."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return rebuild_quantized_tensor, tuple(self.arguments)


def arguments_of(tensor: Any) -> Arguments:
    arguments = list(tensor.__reduce_ex__(2)[1])
    arguments[3], arguments[4] = dict(arguments[3]), dict(arguments[4])
    return arguments


def load(arguments: Arguments) -> Any:
    file = io.BytesIO()
    torch.save(Pickled(arguments), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def refuses(arguments: Arguments) -> None:
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"damaged|must be one of|valid DType|shapes is"):
        load(arguments)


@pytest.mark.cover(1)
@over_formats()
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_each_buffer_fits(fmt: Format, internal: bool) -> None:
    """One row less, one dimension less, another dtype, and none: of each buffer that is held."""
    tensor = fmt.quantize(torch.randn(48, 160), internal=internal)
    arguments = arguments_of(tensor)
    assert type(load(arguments)) is type(tensor)
    held = {name: buffer for name, buffer in arguments[3].items() if buffer is not None}
    assert held
    for name, buffer in held.items():
        wider = torch.int16 if buffer.dtype != torch.int16 else torch.int32
        for changed in (buffer[:-1], buffer.flatten()[:-1], buffer.to(wider), buffer[None], buffer.sum()):
            other = [*arguments]
            other[3] = {**arguments[3], name: changed}
            refuses(other)
    for shape in ((48, 161), (47, 160), (48 * 160,), (2**40, 160), (48, -160), (48.0, 160), "text", None):
        refuses([arguments[0], shape, *arguments[2:]])
    for dtype in (torch.int32, torch.float64, "float32"):
        refuses([*arguments[:2], dtype, *arguments[3:]])


@over_formats()
def test_scales_are_there(fmt: Format) -> None:
    arguments = arguments_of(fmt.quantize(torch.randn(32, 64)))
    for name in [name for name, buffer in arguments[3].items() if buffer is not None and "scale" in name]:
        refuses([*arguments[:3], {**arguments[3], name: None}, *arguments[4:]])


def test_values_fit_too() -> None:
    """Tiles of 128x128 that call themselves runs of 1x128, by themselves and by their quantizer."""
    arguments = arguments_of(mz.Float8BlockQuantizer(block_scaling_dim=2)(torch.randn(256, 256)))
    refuses([*arguments[:4], {**arguments[4], "is_2D_scaled": False}, *arguments[5:]])
    other = mz.Float8BlockQuantizer(block_scaling_dim=1)
    refuses([*arguments[:4], {**arguments[4], "quantizer": other}, *arguments[5:]])
    refuses([*arguments[:4], {**arguments[4], "quantizer": "text"}, *arguments[5:]])
    refuses([*arguments[:4], {**arguments[4], "quantizer": mz.MXFP8Quantizer(), "fp8_dtype": 77}, *arguments[5:]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3),
        mz.Float8RowwiseQuantizer,
        mz.Float8BlockQuantizer,
        lambda: mz.Float8BlockQuantizer(block_scaling_dim=1),
        mz.MXFP8Quantizer,
        mz.NVFP4Quantizer,
        lambda: mz.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        lambda: mz.NVFP4Quantizer(row_scaled_nvfp4=True),
        mz.IdentityQuantizer,
    ],
)
def test_without_a_quantizer(make: Callable[[], Any]) -> None:
    """The plain values of a tensor say enough."""
    tensor = make()(torch.randn(40, 160))
    arguments = arguments_of(tensor)
    arguments[4]["quantizer"] = None
    assert torch.equal(load(arguments).dequantize(), tensor.dequantize())
    for name, buffer in arguments[3].items():
        if buffer is not None:
            refuses([*arguments[:3], {**arguments[3], name: buffer.flatten()[:-1]}, *arguments[4:]])


def test_strides_are_made_usual() -> None:
    """One that says a byte a thousand times over is as large as it says, when a kernel gets it."""
    tensor = mz.MXFP8Quantizer(columnwise=False)(torch.ones(64, 64))
    arguments = arguments_of(tensor)
    byte = tensor._rowwise_data[0, 0].clone()
    arguments[3]["_rowwise_data"] = byte.expand(64, 64)
    found = load(arguments)
    assert found._rowwise_data.is_contiguous()
    assert torch.equal(found.dequantize(), tensor.dequantize())


def test_a_quantizer_brings_no_methods() -> None:
    quantizer = mz.MXFP8Quantizer()
    arguments = arguments_of(quantizer(torch.ones(32, 32)))
    hostile = copy.copy(quantizer)
    hostile.__dict__["inner_tensor_specs"] = "text"
    with pytest.raises(ValueError, match="a quantizer with a inner_tensor_specs of its own"):
        rebuild_quantized_tensor(*arguments[:4], {**arguments[4], "quantizer": hostile})


def test_parts_of_tensors_load() -> None:
    """Rows, other shapes, one direction: what operations make of a tensor is saved and loaded as it is."""
    for quantizer in (
        mz.MXFP8Quantizer(),
        mz.NVFP4Quantizer(),
        mz.Float8RowwiseQuantizer(),
        mz.Float8BlockQuantizer(block_scaling_dim=1),
        mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E5M2),
    ):
        tensor = quantizer(torch.randn(256, 128))
        for part in (tensor[:128], tensor.view(2, 128, 128), tensor.to_dtype(torch.bfloat16), tensor.detach()):
            assert torch.equal(load(arguments_of(part)).dequantize(), part.dequantize())


@pytest.mark.parametrize("quantizer", [None, mz.MXFP8Quantizer()])
def test_groups(quantizer: Any) -> None:
    made = mz.GroupedTensor.make_grouped_tensor_with_shapes(2, [(32, 64), (64, 64)], quantizer)
    made.quantize([torch.randn(32, 64), torch.randn(64, 64)])
    arguments = arguments_of(made)
    assert torch.equal(load(arguments).dequantize(), made.dequantize())
    for name, buffer in arguments[3].items():
        if buffer is not None:
            for changed in (buffer[:-1], buffer + 1 if name in ("first_dims", "tensor_offsets") else None):
                if changed is not None:
                    refuses([*arguments[:3], {**arguments[3], name: changed}, *arguments[4:]])
    for shapes in (((32, 64),), ((32, 64), (64, 65)), ((32, 64), (-64, 64)), "text", (), ((32, 64), 3)):
        refuses([*arguments[:4], {**arguments[4], "shapes": shapes}, *arguments[5:]])


# safetensors


def test_safetensors_says_what_to_save(tmp_path: Path) -> None:
    with mz.quantized_model_init(recipe=mz.recipe.MXFP8BlockScaling()):
        model, other = mz.Linear(64, 64), mz.Linear(64, 64)
    assert model.weight.data_ptr() == 0
    file = tmp_path / "model.safetensors"
    for save in (lambda: save_file(model.state_dict(), file), lambda: save_model(model, str(file))):
        with pytest.raises(TypeError, match=r"this is quantized \(MXFP8Tensor\). Save what .*full_state\(model\)"):
            save()
    save_file(full_state(model), file)
    load_full_state(other, load_file(file))
    assert torch.equal(other.weight.dequantize(), model.weight.dequantize())
