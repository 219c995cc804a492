"""Cores on prototypes give, slot by slot, the prototypes of what they give on tensors."""

from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.dynamo.fakes import as_protos, fake_backward, fake_forward, fake_linear_backward, fake_linear_forward
from mezzotint.functional.autograd import Core
from mezzotint.functional.linear import LINEAR
from mezzotint.tensor.proto import TensorProto
from mezzotint.tensor.storage import QuantizedTensorStorage
from tests.recipes import IN, MODULES, RECIPES, VARIANTS, make

ALL = RECIPES | VARIANTS


class Caught(Exception):
    def __init__(self, core: Core, args: Any) -> None:
        self.core, self.args_given = core, args


def caught(monkeypatch: pytest.MonkeyPatch, name: str, recipe: Any) -> tuple[Core, Any]:
    """What a module gives to autograd."""

    def stop(core: Core, args: Any, needs_grad: bool) -> Any:
        raise Caught(core, args)

    monkeypatch.setattr(f"mezzotint.module.{name}.run_core", stop)
    # as where Dynamo traces
    monkeypatch.setattr("mezzotint.layer.run.scale_slot", lambda scales, slot, history: scales[slot : slot + 1])
    module = make(name, bias=True)
    splits = ([5, 0, 28],) if name == "grouped_linear" else ()
    with pytest.raises(Caught) as found, mz.autocast(enabled=recipe is not None, recipe=recipe):
        module(torch.randn(33, IN, dtype=torch.bfloat16, requires_grad=True), *splits)
    return found.value.core, found.value.args_given


def leaves(value: Any) -> list[Any]:
    """Tensors and storages, or their prototypes, of results and of what is saved, in order."""
    if isinstance(value, torch.Tensor | QuantizedTensorStorage | TensorProto):
        return [value]
    parts = value if isinstance(value, tuple) else [getattr(value, name) for name in getattr(value, "SAVED", ())]
    return [found for part in parts for found in leaves(part)]


def assert_equal(protos: Any, real: Any) -> None:
    assert protos == as_protos(real)
    for tensor, proto in zip(leaves(real), leaves(protos), strict=True):
        assert (proto.shape, proto.dtype, proto.device) == (tuple(tensor.shape), tensor.dtype, tensor.device)
        assert proto.is_quantized == isinstance(tensor, QuantizedTensorStorage)
        if isinstance(tensor, QuantizedTensorStorage):
            buffers = dict(tensor._buffers())
            assert proto.inner_names() == tuple(buffers)
            made = [(tuple(b.shape), b.dtype) for b in proto.create_inner_tensors()]
            assert made == [(tuple(b.shape), b.dtype) for b in buffers.values()]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", ALL)
def test_slot_by_slot(monkeypatch: pytest.MonkeyPatch, name: str, recipe: str) -> None:
    core, args = caught(monkeypatch, name, ALL[recipe])
    protos = as_protos(args)
    outputs, extras, saved = fake_forward(core, protos)
    with torch.no_grad():
        y, made = core.forward(args)
        real_outputs, real_extras = core.outputs(args, y, made)
        real_saved = core.setup(args, made)
    assert_equal(outputs, real_outputs)
    assert_equal(extras, real_extras)
    assert_equal(saved, real_saved)
    gradient = torch.randn_like(real_outputs[0])
    gradients, amaxes = fake_backward(core, saved, as_protos(gradient))
    with torch.no_grad():
        real_gradients, real_amaxes = core.backward(real_saved, gradient)
    assert_equal(gradients, real_gradients)
    assert_equal(amaxes, real_amaxes)
    assert [g is None for g in gradients] == [g is None for g in real_gradients]


def test_linear_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing but shapes: no tensor is made, on whatever device."""
    core, args = caught(monkeypatch, "linear", RECIPES["mxfp8"])
    assert core is LINEAR
    args = as_protos(args)
    for field in ("x", "weight", "bias", "weight_q"):
        getattr(args, field).device = torch.device("cuda", 0)
    args.x.shape = (1 << 20, 7, IN)
    (y,), _, saved = fake_linear_forward(args)
    assert (y.shape, y.device) == ((1 << 20, 7, args.weight.shape[0]), torch.device("cuda", 0))
    assert saved.x.num_bytes() > (1 << 20) * 7 * IN
    (dx, dw, db), _ = fake_linear_backward(saved, y)
    assert [(g.shape, g.dtype) for g in (dx, dw, db)] == [(g.shape, g.dtype) for g in (args.x, args.weight, args.bias)]
