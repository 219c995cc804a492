"""Steps on quantized parameters: values as torch.optim has them in FP32, bytes as the parameter's quantizer makes."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.optimizers import FusedAdam, FusedSGD
from tests.quantizer_formats import Format, assert_same_bytes, over_formats, same_bytes, sample, snapshot
from tests.recipes import RECIPES
from tests.recipes import sample as tokens

SHAPE = (32, 64)
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "adam": (FusedAdam, OPTIONS, lambda p: torch.optim.AdamW([p], **OPTIONS, fused=True)),
    "sgd": (
        FusedSGD,
        {**OPTIONS, "momentum": 0.9},
        lambda p: torch.optim.SGD([p], **OPTIONS, momentum=0.9, fused=True),
    ),
}


def gradient(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sample(SHAPE, torch.bfloat16, 50 + step).to(dtype)


@over_formats()
@pytest.mark.parametrize("case", CASES)
def test_without_masters(fmt: Format, case: str) -> None:
    """Each step: dequantize, update, quantize in place."""
    make, options, torch_make = CASES[case]
    param = nn.Parameter(fmt.quantize(sample(SHAPE, torch.bfloat16)))
    buffers = {name: buffer.data_ptr() for name, buffer in param._buffers()}
    optimizer = make([param], **options)
    value = nn.Parameter(param.detach().dequantize(dtype=torch.float32))
    other = torch_make(value)
    expected = copy.deepcopy(param.detach())
    for i in range(3):
        param.grad, value.grad = gradient(i, torch.bfloat16), gradient(i)
        torch.manual_seed(i)
        optimizer.step()
        other.step()
        torch.manual_seed(i)
        expected.quantize_(value.detach())
        assert_same_bytes(param, expected)
        with torch.no_grad():
            value.copy_(expected.dequantize(dtype=torch.float32))
    assert {name: buffer.data_ptr() for name, buffer in param._buffers()} == buffers


@over_formats()
def test_with_masters(fmt: Format) -> None:
    """The master goes on in FP32 from what the parameter stood for; the parameter is the master, quantized."""
    param = nn.Parameter(fmt.quantize(sample(SHAPE, torch.bfloat16)))
    optimizer = FusedAdam([param], **OPTIONS, master_weights=True, store_param_remainders=True)
    value = nn.Parameter(param.detach().dequantize(dtype=torch.float32))
    other = torch.optim.AdamW([value], **OPTIONS, fused=True)
    expected = copy.deepcopy(param.detach())
    for i in range(3):
        param.grad, value.grad = gradient(i, torch.bfloat16), gradient(i)
        torch.manual_seed(i)
        optimizer.step()
        other.step()
        torch.manual_seed(i)
        expected.quantize_(value.detach())
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), value)
    assert_same_bytes(param, expected)


def test_delayed_scaling_sees_the_new_values() -> None:
    quantizer = mz.Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), mz.DType.kFloat8E4M3)
    param = nn.Parameter(quantizer.quantize(sample(SHAPE)))
    optimizer = FusedAdam([param], **OPTIONS, master_weights=True)
    optimizer.set_scaled_state(param, "master_param", sample(SHAPE) * 100)
    param.grad = gradient(0)
    optimizer.step()
    assert quantizer.amax == optimizer.state[param]["master_param"].abs().max()


def test_masters_from_values_that_were_kept() -> None:
    with mz.quantized_model_init(recipe=RECIPES["mxfp8"], preserve_high_precision_init_val=True):
        param: Any = mz.Linear(64, 32, bias=False, device="cpu").weight
    optimizer = FusedAdam([param], master_weights=True)
    optimizer.set_scaled_state(param, "master_param", param.get_high_precision_init_val())
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), param.get_high_precision_init_val().float())
    assert not torch.equal(optimizer.get_unscaled_state(param, "master_param"), param.dequantize().float())


@pytest.mark.parametrize("master", [False, True])
def test_scaler_finds_an_infinity(master: bool) -> None:
    """Nothing changes: neither bytes nor delayed scaling's amax nor the generator's numbers in them."""
    for make in (
        lambda: mz.NVFP4Quantizer(stochastic_rounding=True),
        lambda: mz.Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), mz.DType.kFloat8E4M3),
        lambda: mz.MXFP8Quantizer(mz.DType.kFloat8E4M3),
    ):
        param = nn.Parameter(make().quantize(sample(SHAPE)))
        optimizer = FusedAdam([param], **OPTIONS, master_weights=master)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        param.grad = torch.full(SHAPE, torch.inf)
        before = snapshot(param)
        optimizer.step(grad_scaler=scaler)
        assert_same_bytes(param, before)
        assert float(optimizer.state[param]["step"]) == 0.0
        scaler.update()
        param.grad = gradient(0)
        optimizer.step(grad_scaler=scaler)
        assert not same_bytes(param, before)


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
def test_trains_a_quantized_module_and_resumes(name: str) -> None:
    """Loss falls; module and optimizer, saved and loaded, go on bit for bit."""
    recipe = RECIPES[name]

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        with mz.quantized_model_init(recipe=recipe):
            module = mz.Linear(64, 32, params_dtype=torch.bfloat16, device="cpu")
        return module, FusedAdam(module.parameters(), lr=0.01, master_weights=True, exp_avg_dtype=torch.bfloat16)

    x, wanted = tokens(32, seed=1), tokens(32, seed=2, width=32)

    def step(module: Any, optimizer: Any, seed: int) -> float:
        torch.manual_seed(seed)
        with mz.autocast(recipe=recipe):
            loss = (module(x) - wanted).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    module, optimizer = make()
    losses = [step(module, optimizer, i) for i in range(6)]
    assert losses[-1] < 0.95 * losses[0]
    file = io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make()
    other.load_state_dict(saved["module"])
    resumed.load_state_dict(saved["optimizer"])
    for i in range(6, 8):
        assert step(module, optimizer, i) == step(other, resumed, i)
    assert_same_bytes(module.weight, other.weight)
    assert torch.equal(
        optimizer.get_unscaled_state(module.weight, "master_param"),
        resumed.get_unscaled_state(other.weight, "master_param"),
    )
