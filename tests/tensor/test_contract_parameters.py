"""What holds for every format: parameters, pickling, operations of torch."""

import copy
import io

import pytest
import torch
from torch import nn

from tests.quantizer_formats import Format, assert_same_bytes, buffers, over_formats, sample, snapshot
from tests.tensor.contract import over_usages

# Parameters


@over_formats()
def test_parameter(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    parameter = nn.Parameter(tensor)
    assert type(parameter) is fmt.tensor
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert_same_bytes(parameter, tensor)
    assert not isinstance(tensor, nn.Parameter)
    frozen = nn.Parameter(tensor, requires_grad=False)
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
    assert not isinstance(parameter.detach(), nn.Parameter)
    assert not isinstance(parameter.clone(), nn.Parameter)
    assert not isinstance(parameter.to("meta"), nn.Parameter)


@over_formats()
def test_deepcopy(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    parameter.main_grad = torch.ones(32, 64)
    parameter.grad = torch.full((32, 64), 2.0)
    shared = [parameter, parameter]
    first, second = copy.deepcopy(shared)
    assert first is second
    assert type(first) is fmt.tensor
    assert isinstance(first, nn.Parameter)
    assert first.requires_grad
    assert first.is_leaf
    assert_same_bytes(first, parameter)
    assert all(getattr(first, n).data_ptr() != b.data_ptr() for n, b in buffers(parameter).items())
    assert torch.equal(first.main_grad, parameter.main_grad)
    assert first.main_grad is not parameter.main_grad
    assert torch.equal(first.grad, parameter.grad)
    assert first.grad is not parameter.grad
    assert first._quantizer is not parameter._quantizer
    if fmt.is_value:
        assert first._quantizer == parameter._quantizer
    storage = copy.deepcopy(fmt.quantize(sample((5, 7)), internal=True))
    assert_same_bytes(storage, fmt.quantize(sample((5, 7)), internal=True))
    assert tuple(storage.shape) == (5, 7)


@over_formats()
def test_module_moves_keep_attributes(fmt: Format) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(fmt.quantize(sample((32, 64))))
    module.weight.main_grad = torch.ones(1)
    module.weight.grad = torch.ones(32, 64)
    weight, before = module.weight, snapshot(module.weight)
    for _ in range(2):
        module.to("cpu")
        module.cpu()
        assert module.weight is weight
        assert isinstance(module.weight, nn.Parameter)
        assert type(module.weight) is fmt.tensor
        assert torch.equal(module.weight.main_grad, torch.ones(1))
        assert module.weight.grad is not None
        assert_same_bytes(module.weight, before)
    copied = copy.deepcopy(module)
    assert torch.equal(copied.weight.main_grad, torch.ones(1))
    assert isinstance(copied.weight, nn.Parameter)
    module.weight.grad = None
    module.to("meta")
    assert module.weight.device.type == "meta"
    assert isinstance(module.weight, nn.Parameter)
    assert type(module.weight) is fmt.tensor
    assert module.weight.requires_grad
    assert torch.equal(module.weight.main_grad, torch.ones(1))
    assert [name for name, _ in module.named_parameters()] == ["weight"]


@over_formats()
def test_attributes_survive_moves(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    parameter.main_grad = torch.ones(1)
    for moved in (parameter.cpu(), parameter.to("cpu", copy=True), parameter.to("meta")):
        assert torch.equal(moved.main_grad, torch.ones(1))


@over_formats()
def test_optimizer_step(fmt: Format) -> None:
    parameter = nn.Parameter(fmt.quantize(sample((32, 64))))
    before = parameter.dequantize().detach()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    (parameter * 2.0).sum().backward()
    assert torch.equal(parameter.grad, torch.full((32, 64), 2.0))
    torch.manual_seed(0)
    optimizer.step()
    torch.manual_seed(0)
    quantizer = fmt.make()
    assert_same_bytes(parameter, quantizer.quantize(before - 1.0))
    assert isinstance(parameter, nn.Parameter)


@over_formats()
def test_state_dict_loads_both_ways(fmt: Format) -> None:
    module = nn.Linear(64, 32, bias=False)
    module.weight = nn.Parameter(fmt.quantize(sample((32, 64), seed=1)))
    torch.manual_seed(0)
    module.load_state_dict({"weight": sample((32, 64))})
    assert type(module.weight) is fmt.tensor
    assert_same_bytes(module.weight, fmt.quantize(sample((32, 64))))
    plain = nn.Linear(64, 32, bias=False)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight.detach(), module.weight.dequantize())


# Pickling


@pytest.mark.cover(2)
@over_formats()
@over_usages
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(fmt: Format, rowwise: bool, columnwise: bool, weights_only: bool) -> None:
    state = {
        "tensor": fmt.quantize(sample((40, 49), torch.bfloat16), rowwise, columnwise),
        "storage": fmt.quantize(sample((3, 5, 7), seed=1), rowwise, columnwise, True),
        "parameter": nn.Parameter(fmt.quantize(sample((32, 64), seed=2), rowwise, columnwise)),
        "plain": torch.ones(3),
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert torch.equal(loaded["plain"], state["plain"])
    for name in ("tensor", "storage", "parameter"):
        expected, found = state[name], loaded[name]
        assert type(found) is type(expected)
        assert_same_bytes(found, expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.dequantize(), expected.dequantize())
        assert type(found._quantizer) is type(expected._quantizer)
        assert found._quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        if fmt.is_value:
            assert found._quantizer == expected._quantizer
        for attribute, _, _ in fmt.storage._VALUES:
            assert type(getattr(found, attribute)) is type(getattr(expected, attribute)), attribute
        torch.manual_seed(0)
        found.quantize_(torch.zeros(tuple(found.shape)))
        assert not found.dequantize().any()
    assert loaded["parameter"].requires_grad
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert not isinstance(loaded["tensor"], nn.Parameter)


# Operations


@over_formats()
def test_operations_dequantize(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    value = tensor.dequantize()
    for result, expected in (
        (tensor + 1, value + 1),
        (1 - tensor, 1 - value),
        (tensor @ tensor.t(), value @ value.t()),
        (torch.nn.functional.linear(value, tensor), torch.nn.functional.linear(value, value)),
        (tensor.sum(), value.sum()),
        (torch.cat([tensor, tensor]), torch.cat([value, value])),
        (tensor.transpose(0, 1), value.transpose(0, 1)),
        (tensor.view(64, 32) + 0, value.view(64, 32)),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert tensor.numel() == value.numel()
    assert tensor.stride() == value.stride()
    assert torch.equal(tensor.expand_as(tensor) + 0, value)


@over_formats()
def test_in_place_operations_quantize_again(fmt: Format) -> None:
    tensor = fmt.quantize(sample((32, 64)))
    value = tensor.dequantize()
    pointers = {name: b.data_ptr() for name, b in buffers(tensor).items()}
    for change in (lambda t: t.add_(1), lambda t: t.mul_(torch.full((64,), 0.5)), lambda t: t.zero_()):
        torch.manual_seed(0)
        assert change(tensor) is tensor
        assert_same_bytes(tensor, fmt.quantize(change(value)))
        value = tensor.dequantize()
    torch.manual_seed(0)
    torch.add(sample((32, 64)), 1.0, out=tensor)
    assert_same_bytes(tensor, fmt.quantize(sample((32, 64)) + 1.0))
    torch.manual_seed(0)
    for given in torch._foreach_zero_([tensor]) or ():  # torch 2.11 gives nothing back
        assert given is tensor
    assert not tensor.dequantize().any()
    assert {name: b.data_ptr() for name, b in buffers(tensor).items()} == pointers
