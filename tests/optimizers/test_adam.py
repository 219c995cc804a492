"""FusedAdam on plain parameters: as torch.optim's, masters and moments in fewer bits, state, scaler, compiler."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mezzotint.optimizers import FusedAdam
from mezzotint.optimizers.states import join_remainder

SHAPES = ((8, 40), (7,), (0, 4), (2, 3, 5))
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
# What changes how things are kept.
KEPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "l2": {"adam_w_mode": False, "bias_correction": False},
    "master": {"master_weights": True},
    "master-fp16": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "moments-bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "moments-fp16": {"master_weights": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "moments-fp8": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.float16,
    },
    "capturable": {"capturable": True},
}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    """Those of a step: rounded to BF16, so that they are the same in every dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).bfloat16()
        param.grad = grad.to(param.dtype if dtype is None else dtype)


def train(optimizer: Any, params: list[nn.Parameter], first: int = 0, count: int = 4, step: Any = None) -> None:
    for i in range(first, first + count):
        set_gradients(params, i)
        (optimizer.step if step is None else step)()


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("by_tensor", [True, False])
def test_fp32_is_torch_optim_bit_for_bit(adam_w_mode: bool, by_tensor: bool) -> None:
    mine, other = parameters(), parameters()
    options = {**OPTIONS, "lr": torch.tensor(0.01) if by_tensor else 0.01}
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    theirs = torch_class(other, **options, fused=True)
    ours = FusedAdam(mine, **options, adam_w_mode=adam_w_mode)
    train(ours, mine)
    train(theirs, other)
    assert_equal(mine, other)
    for a, b in zip(mine, other, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.state[a][name], theirs.state[b][name])


def test_defaults_are_those_of_adamw_but_for_weight_decay() -> None:
    mine, other = parameters(), parameters()
    train(FusedAdam(mine), mine)
    train(torch.optim.AdamW(other, weight_decay=0.0, fused=True), other)
    assert_equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [False, True])
def test_masters_are_what_fp32_parameters_would_be(dtype: torch.dtype, remainders: bool) -> None:
    mine, other = parameters(dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    ours = FusedAdam(mine, **OPTIONS, master_weights=True, store_param_remainders=remainders)
    theirs = torch.optim.AdamW(other, **OPTIONS, fused=True)
    for i in range(5):
        set_gradients(mine, i, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
        for a, b in zip(mine, other, strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        ours.step()
        theirs.step()
    assert_equal([ours.get_unscaled_state(p, "master_param") for p in mine], other)
    assert_equal(mine, [p.to(dtype) for p in other])
    kept = {ours.state[p]["master_param"].dtype for p in mine}
    assert kept == {torch.int16 if remainders and dtype == torch.bfloat16 else torch.float32}


def test_a_remainder_is_of_the_parameter_as_it_was_split() -> None:
    """Half way between two BF16 numbers the parameter goes away from zero, its remainder back. Rounded to nearest, the
    one with an even last bit would be another number, and the master with it."""
    masters = torch.tensor([0x3F808000, 0x3F818000, 0x40008000], dtype=torch.int32).view(torch.float32)
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=0.0, master_weights=True, store_param_remainders=True)
    optimizer.set_scaled_state(param, "master_param", masters)
    assert not torch.equal(param, masters.bfloat16())
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), masters)


def test_without_masters_every_step_rounds() -> None:
    mine, value = parameters(torch.bfloat16), [p.detach().float() for p in parameters(torch.bfloat16)]
    ours = FusedAdam(mine, **OPTIONS)
    other = [nn.Parameter(v) for v in value]
    theirs = torch.optim.AdamW(other, **OPTIONS, fused=True)
    for i in range(4):
        set_gradients(mine, i)
        set_gradients(other, i)
        ours.step()
        theirs.step()
        with torch.no_grad():
            for p in other:
                p.copy_(p.bfloat16())
    assert_equal([p.float() for p in mine], other)


def test_fp32_parameters_are_their_own_masters() -> None:
    params = parameters()
    optimizer = FusedAdam(params, master_weights=True, master_weight_dtype=torch.float16)
    train(optimizer, params)
    for p in params:
        assert "master_param" not in optimizer.state[p]
        assert torch.equal(optimizer.get_unscaled_state(p, "master_param"), p)
    with pytest.raises(ValueError, match="master_param"):
        optimizer.set_scaled_state(params[0], "master_param", params[0].detach())


@pytest.mark.parametrize(
    ("kept", "bound"), [("moments-bf16", 0.02), ("moments-fp16", 0.002), ("moments-fp8", 0.2), ("master-fp16", 0.05)]
)
def test_fewer_bits_are_near_fp32(kept: str, bound: float) -> None:
    """How far the update is off, relative to the update."""
    mine, other = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    start = [p.detach().clone() for p in other]
    ours = FusedAdam(mine, **OPTIONS, **{**KEPT[kept], "master_weights": True})
    train(ours, mine)
    train(torch.optim.AdamW(other, **OPTIONS, fused=True), other)
    for p, q, s in zip(mine, other, start, strict=True):
        if p.numel():
            master = ours.get_unscaled_state(p, "master_param")
            assert (master - q).norm() <= bound * (q - s).norm() + 1e-3 * bound


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(kept: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = FusedAdam(params, **OPTIONS, **KEPT[kept])
    train(optimizer, params, 0, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, file)
    train(optimizer, params, 3, 3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p) for p in saved["params"]]
    other = FusedAdam(again, lr=1.0, **KEPT[kept])
    other.load_state_dict(saved["optimizer"])
    train(other, again, 3, 3)
    assert_equal(params, again)
    for p, q in zip(params, again, strict=True):
        one, two = optimizer.state[p], other.state[q]
        assert one.keys() == two.keys()
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            assert torch.equal(optimizer.get_unscaled_state(p, name), other.get_unscaled_state(q, name))


def test_state_dict_is_fp32_and_loads_into_other_dtypes() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS, master_weights=True, exp_avg_dtype=torch.uint8)
    train(optimizer, params)
    saved = optimizer.state_dict()
    assert {name for state in saved["state"].values() for name in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "master_param",
    }
    assert {value.dtype for state in saved["state"].values() for value in state.values()} == {torch.float32}
    other = FusedAdam(parameters(torch.bfloat16), master_weights=True, store_param_remainders=True)
    other.load_state_dict(saved)
    for p, q in zip(params, other.param_groups[0]["params"], strict=True):
        assert other.state[q]["master_param"].dtype == torch.int16
        assert torch.equal(other.get_unscaled_state(q, "master_param"), optimizer.get_unscaled_state(p, "master_param"))
        assert torch.equal(other.get_unscaled_state(q, "exp_avg"), optimizer.get_unscaled_state(p, "exp_avg"))
        assert torch.equal(p, q)
    back = FusedAdam(params, master_weights=True)
    back.load_state_dict(other.state_dict())
    for p in params:
        assert torch.equal(back.state[p]["master_param"], optimizer.get_unscaled_state(p, "master_param"))


def test_loads_the_state_of_torch_optim_and_goes_on_bit_for_bit() -> None:
    mine, other = parameters(), parameters()
    theirs = torch.optim.AdamW(other, **OPTIONS, fused=True)
    train(theirs, other, 0, 3)
    ours = FusedAdam(mine)
    with torch.no_grad():
        for p, q in zip(mine, other, strict=True):
            p.copy_(q)
    ours.load_state_dict(theirs.state_dict())
    train(ours, mine, 3, 3)
    train(theirs, other, 3, 3)
    assert_equal(mine, other)


def test_loads_a_step_that_is_kept_by_group() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    train(optimizer, params, 0, 3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 3
    other = FusedAdam(parameters())
    other.load_state_dict(saved)
    assert {float(state["step"]) for state in other.state.values()} == {3.0}
    assert "step" not in other.param_groups[0]


def test_a_copy_of_the_optimizer_has_its_own_state() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS, **KEPT["moments-fp8"])
    train(optimizer, params, 0, 2)
    other = copy.deepcopy(optimizer)
    train(optimizer, params, 2, 2)
    again = other.param_groups[0]["params"]
    train(other, again, 2, 2)
    assert_equal(params, again)


def test_states_by_hand() -> None:
    param = nn.Parameter(torch.randn(4, 4).bfloat16())
    optimizer = FusedAdam([param], **KEPT["moments-fp8"])
    optimizer.initialize_state(param)
    assert {name: value.dtype for name, value in optimizer.state[param].items()} == {
        "step": torch.float32,
        "exp_avg": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq": torch.float16,
        "exp_avg_sq_scale": torch.float32,
        "master_param": torch.int16,
    }
    value = torch.tensor([[-7.0, 3.5, 0.0, 448.0]]).expand(4, 4).contiguous() * 2.0**-20
    optimizer.set_scaled_state(param, "exp_avg", value)
    assert torch.equal(optimizer.get_unscaled_state(param, "exp_avg"), value)
    assert optimizer.get_unscaled_state(param, "exp_avg", skip_unscale=True).dtype == torch.uint8
    master = torch.randn(4, 4)
    optimizer.set_scaled_state(param, "master_param", master)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), master)
    assert torch.equal(param, master.bfloat16())
    assert torch.equal(join_remainder(param.detach(), optimizer.state[param]["master_param"]), master)
    with pytest.raises(ValueError, match="state_name is 'momentum'"):
        optimizer.set_scaled_state(param, "momentum", master)
    with pytest.raises(ValueError, match=r"unscaled_state has shape \(2,\)"):
        optimizer.set_scaled_state(param, "exp_avg", torch.zeros(2))


def test_decoupled_gradients() -> None:
    mine, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    options = {**OPTIONS, "master_weights": True}
    ours, theirs = FusedAdam(mine, **options, use_decoupled_grad=True), FusedAdam(other, **options)
    for i in range(3):
        set_gradients(other, i)
        for p, q in zip(mine, other, strict=True):
            p.grad = torch.full_like(p, torch.nan)  # not looked at
            assert q.grad is not None
            p.decoupled_grad = q.grad.float()
        ours.step()
        theirs.step()
    assert_equal(mine, other)
    ours.zero_grad(set_to_none=False)
    assert all(not p.decoupled_grad.any() and not p.grad.any() for p in mine)
    ours.zero_grad()
    assert all(p.decoupled_grad is None and p.grad is None for p in mine)


def test_parameters_without_gradients_and_empty_groups() -> None:
    one, two = parameters()[:2]
    optimizer = FusedAdam([{"params": []}, {"params": [one, two], "lr": 0.5}])
    optimizer.step()
    assert not optimizer.state
    one.grad = torch.ones_like(one)
    before = two.detach().clone()
    optimizer.step()
    assert torch.equal(two, before)
    assert two not in optimizer.state
    two.grad = torch.ones_like(two)
    optimizer.step()  # its first step, the other's second
    assert (float(optimizer.state[one]["step"]), float(optimizer.state[two]["step"])) == (2.0, 1.0)
    other = parameters()[:2]
    theirs = torch.optim.AdamW(other, lr=0.5, weight_decay=0.0, fused=True)
    other[0].grad = torch.ones_like(one)
    theirs.step()
    other[1].grad = torch.ones_like(two)
    theirs.step()
    assert_equal([one, two], other)


def test_any_strides() -> None:
    """A parameter that is not contiguous, and a gradient of other strides than its parameter's."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    odd, plain = nn.Parameter(base.clone()[:, ::2]), nn.Parameter(base.clone())
    straight = [nn.Parameter(base[:, ::2].contiguous()), nn.Parameter(base.clone())]
    grad = torch.randn(8, 6).t()
    odd.grad, plain.grad = torch.ones_like(odd), grad
    straight[0].grad, straight[1].grad = torch.ones(6, 4), grad.contiguous()
    FusedAdam([odd, plain], lr=0.1).step()
    FusedAdam(straight, lr=0.1).step()
    assert_equal([odd, plain], straight)


def test_closure() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).detach() == 3.0
    assert (param < 1).all()


# Gradient scaler


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("kept", ["plain", "remainders", "moments-fp8"])
def test_grad_scaler(kept: str, is_unscaled: bool) -> None:
    """As without one, but for a step with an infinity, which changes nothing."""
    mine, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    ours, theirs = FusedAdam(mine, **OPTIONS, **KEPT[kept]), FusedAdam(other, **OPTIONS, **KEPT[kept])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, backoff_factor=0.5)
    scaler.scale(torch.zeros(()))  # makes the scale
    for i in range(4):
        set_gradients(mine, i)
        for p in mine:
            assert p.grad is not None
            p.grad.mul_(scaler.get_scale())
        if i == 2:
            assert mine[0].grad is not None
            mine[0].grad[0, 0] = torch.inf
            before = copy.deepcopy(mine), copy.deepcopy(ours.state_dict())
        if is_unscaled:
            scaler.unscale_(ours)
        ours.step(grad_scaler=scaler)
        scaler.update()
        if i == 2:
            assert_equal(mine, before[0])
            for state, old in zip(ours.state_dict()["state"].values(), before[1]["state"].values(), strict=True):
                assert all(torch.equal(state[name], old[name]) for name in old)
        else:
            set_gradients(other, i)
            theirs.step()
    assert scaler.get_scale() == 512.0
    assert_equal(mine, other)
    ours.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))


# Compiler


@pytest.mark.cover(0)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("kept", "dtype"), [*((name, torch.bfloat16) for name in KEPT if name != "plain"), ("plain", torch.float32)]
)
def test_compiled(kept: str, dtype: torch.dtype) -> None:
    """One graph for all steps, bit for bit as eager code."""
    mine, other = parameters(dtype)[:2], parameters(dtype)[:2]
    ours, theirs = FusedAdam(mine, **OPTIONS, **KEPT[kept]), FusedAdam(other, **OPTIONS, **KEPT[kept])
    counters.clear()
    backend = "inductor" if kept == "moments-fp8" else "aot_eager"
    compiled = torch.compile(ours.step, fullgraph=True, backend=backend)
    for i in range(4):
        if kept == "capturable" and i == 2:  # a schedule
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"].mul_(0.5)
        train(ours, mine, i, 1, compiled)
        train(theirs, other, i, 1)
    assert_equal(mine, other)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_capturable_keeps_the_learning_rate_in_a_tensor() -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=0.5, capturable=True)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"amsgrad": True}, RuntimeError, "amsgrad"),
        ({"lr": -1.0}, ValueError, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay is nan"),
        ({"exp_avg_dtype": torch.int8}, ValueError, "exp_avg_dtype is torch.int8"),
        ({"exp_avg_sq_dtype": torch.float64}, ValueError, "exp_avg_sq_dtype"),
        ({"master_weight_dtype": torch.bfloat16}, ValueError, "master_weight_dtype"),
        ({"store_param_remainders": True}, ValueError, "store_param_remainders"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FusedAdam(parameters(), **options)


def test_parameters_and_gradients_that_are_not_taken() -> None:
    with pytest.raises(TypeError, match="float64"):
        FusedAdam([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedAdam(embedding.parameters()).step()
    params = parameters()
    other = torch.optim.AdamW(parameters(), amsgrad=True)
    train(other, other.param_groups[0]["params"], 0, 1)
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        FusedAdam(params).load_state_dict(other.state_dict())
    optimizer = FusedAdam(params, use_decoupled_grad=True)
    params[0].decoupled_grad = torch.ones_like(params[0])  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="grad_scaler"):
        optimizer.step(grad_scaler=scaler)


def test_set_grad_none_is_deprecated() -> None:
    params = parameters()
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = FusedAdam(params, set_grad_none=False)
    set_gradients(params, 0)
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
