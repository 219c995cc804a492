"""Transformer Engine's `_extra_state`: read as it is, refused where it is anything else, written for it to read.

The payloads are made here by Python's pickle, from classes that stand where Transformer Engine has its own.
"""

import io
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import mezzotint as mz
from mezzotint.compat.extra_state import upstream_state_dict
from mezzotint.compat.extra_state_bytes import RECIPES, read_extra_state

RECIPE = mz.recipe.DelayedScaling(amax_history_len=4, margin=1)


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True


@pytest.fixture(autouse=True)
def _upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name with these classes, for the time of a test."""
    module = ModuleType(RECIPES)
    for each in (_FormatHelper, Format, DelayedScaling):
        monkeypatch.setattr(each, "__module__", RECIPES)
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, RECIPES, module)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def as_bytes(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)


def upstreams(gemms: int = 1, rows: int = 4) -> dict[str, Any]:
    """What Transformer Engine's module with some GEMMs has after training."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    return {
        "recipe": DelayedScaling(amax_history_len=rows),
        "scale_fwd": draw(3 * gemms),
        "amax_history_fwd": draw(rows, 3 * gemms),
        "scale_bwd": draw(2 * gemms),
        "amax_history_bwd": draw(rows, 2 * gemms),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": gemms, "autocast_key": "k", "sizes": (1, [2.5])},
    }


def expected(state: dict[str, Any]) -> torch.Tensor:
    scales = torch.cat((state["scale_fwd"], state["scale_bwd"]))
    return torch.cat((scales[None], torch.cat((state["amax_history_fwd"], state["amax_history_bwd"]), 1)))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_module_reads_it(protocol: int, tmp_path: Path) -> None:
    """`load_state_dict` of a file, strictly, with no call beside: scales and histories, and the layers without any."""
    made = {"linear": mz.Linear(32, 32), "mlp": mz.LayerNormMLP(32, 64), "norm": mz.LayerNorm(32)}
    model = torch.nn.ModuleDict(made | {"attention": mz.DotProductAttention(4, 8)})
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    for name, gemms in (("linear", 1), ("mlp", 2)):
        state[f"{name}._extra_state"] = as_bytes(upstreams(gemms), protocol)
    for name in ("norm", "attention"):
        state[f"{name}._extra_state"] = torch.empty(0, dtype=torch.uint8)
    torch.save(state, tmp_path / "checkpoint.pt")
    model.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    for name, gemms in (("linear", 1), ("mlp", 2)):
        found = made[name].get_extra_state()
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found[:5], expected(upstreams(gemms)))
        assert not found[5:].any()


def test_an_older_one_without_a_recipe() -> None:
    state = upstreams()
    del state["recipe"]
    state["scale_inv_fwd"] = 1 / state["scale_fwd"]
    found = read_extra_state(as_bytes(state))
    assert found is not None
    assert torch.equal(found, expected(state))


def test_an_operation_reads_it() -> None:
    """Input and weight forward, grad_output backward; an operation that was not trained has no backward."""
    state = upstreams()
    forward = {"recipe": state["recipe"], "scale_fwd": state["scale_fwd"][:2], "extra_fp8_variables": {}}
    forward["amax_history_fwd"] = state["amax_history_fwd"][:, :2].contiguous()
    backward = {"scale_bwd": state["scale_bwd"][:1], "amax_history_bwd": state["amax_history_bwd"][:, :1].contiguous()}
    wanted = expected(state)
    wanted[:, [2, 4]] = 0.0
    wanted[0, [2, 4]] = 1.0
    op = mz.ops.BasicLinear(32, 32)
    op.load_state_dict({"weight": op.weight, "_extra_state": as_bytes({"forward": forward, "backward": backward})})
    assert torch.equal(op.get_extra_state()[:5], wanted)
    wanted[:, 3] = 0.0
    wanted[0, 3] = 1.0
    assert torch.equal(read_extra_state(as_bytes({"forward": forward})), wanted)


@pytest.mark.parametrize("value", [None, {}, {"recipe": DelayedScaling(), "extra_fp8_variables": {}}])
def test_bytes_without_scales_say_nothing(value: Any) -> None:
    assert read_extra_state(as_bytes(value)) is None
    module = mz.Linear(32, 32)
    module.load_state_dict(module.state_dict() | {"_extra_state": as_bytes(value)})
    assert module._lacks_scales


class Evil:
    """Its pickle makes a file when it is executed."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.args


def hostile(target: Path) -> dict[str, Any]:
    code = f"open({str(target)!r}, 'w')"
    saved = io.BytesIO()
    torch.save(Evil(eval, code), saved)
    state = upstreams()
    return {
        "a call": Evil(eval, code),
        "a call in a state": state | {"scale_fwd": Evil(eval, code)},
        "a call in a recipe": state | {"recipe": Evil(exec, code)},
        "a call by the name of getattr": state | {"recipe": Evil(getattr, Evil(eval, code), "x")},
        "a function of a recipe's module": state | {"recipe": Evil(mz.recipe.DelayedScaling.__init__, "x")},
        "in a tensor's numbers": state | {"scale_fwd": Evil(torch.storage._load_from_bytes, saved.getvalue())},
        "a list for a scale": state | {"scale_fwd": [1.0, 1.0, 1.0]},
        "no history": {key: value for key, value in state.items() if key != "amax_history_bwd"},
        "another shape": state | {"amax_history_fwd": torch.ones(4, 2)},
        "numbers of another kind": state | {"scale_fwd": torch.ones(3, dtype=torch.float64)},
        "no dictionary": 3,
        "a tensor of a terabyte": state | {"scale_fwd": Evil(torch._utils._rebuild_tensor_v2, *a_terabyte())},
    }


def a_terabyte() -> tuple[Any, ...]:
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.ones(1).untyped_storage(), dtype=torch.float32, _internal=True
    )
    return storage, 0, (2**38,), (0,), False, OrderedDict()


@pytest.mark.parametrize("name", hostile(Path()))
def test_anything_else_is_refused_and_not_executed(name: str, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    data = as_bytes(hostile(target)[name])
    module = mz.Linear(32, 32)
    before = module.get_extra_state()
    with pytest.raises(
        RuntimeError, match=r"_extra_state is \d+ bytes that cannot be read.*Nothing of it was executed"
    ):
        module.load_state_dict(module.state_dict() | {"_extra_state": data})
    with pytest.raises(ValueError, match="Leave the key out"):
        module.set_extra_state(data)
    assert not target.exists()
    assert torch.equal(module.get_extra_state(), before)


@pytest.mark.parametrize("length", [0, 1, 7, 100, -1])
def test_a_damaged_file_is_refused(length: int) -> None:
    data = as_bytes(upstreams())[:length]
    module = mz.Linear(32, 32)
    if length == 0:
        module.set_extra_state(data)
        return
    with pytest.raises(ValueError, match="cannot be read"):
        module.set_extra_state(data)


def test_scales_of_more_gemms_do_not_fit() -> None:
    module = mz.Linear(32, 32)
    with pytest.raises(RuntimeError, match=r"_extra_state has shape \(5, 10\): this module takes \(1 \+ history, 5\)"):
        module.load_state_dict(module.state_dict() | {"_extra_state": as_bytes(upstreams(2))})


def trained(model: torch.nn.Module) -> torch.nn.Module:
    for step in range(3):
        torch.manual_seed(step)
        with mz.autocast(recipe=RECIPE):
            y = model(torch.randn(16, 32))
        y.square().sum().backward()
    return model


@pytest.mark.parametrize("make", [lambda: mz.Linear(32, 32), lambda: mz.LayerNormMLP(32, 64)], ids=["linear", "mlp"])
def test_what_is_written_upstream_reads(make: Any) -> None:
    """By Python's own unpickler, as it does; and a module here reads it back whole."""
    model = trained(make())
    state = upstream_state_dict(model, RECIPE)
    found = pickle.loads(state["_extra_state"].numpy().tobytes())
    assert type(found["recipe"]) is DelayedScaling
    assert found["recipe"] == DelayedScaling(margin=1, amax_history_len=4)
    assert found["extra_fp8_variables"]["num_gemms"] == model.num_gemms
    assert torch.equal(found["scale_fwd"], model.scale_fwd)
    assert torch.equal(found["amax_history_bwd"], model.amax_history_bwd[:4])
    other = make()
    other.load_state_dict(state)
    assert torch.equal(other.get_extra_state(), model.get_extra_state())


def test_operations_are_written_as_operations() -> None:
    make = lambda: mz.ops.Sequential(mz.ops.LayerNorm(32), mz.ops.Linear(32, 32))  # noqa: E731
    model = trained(make())
    state = upstream_state_dict(model, RECIPE)
    assert state["0._extra_state"].numel() == 0
    found = pickle.loads(state["1.basic_ops.0._extra_state"].numpy().tobytes())
    op = model[1].basic_ops[0]
    assert torch.equal(found["forward"]["scale_fwd"], op.scale_fwd[:2])
    assert torch.equal(found["backward"]["amax_history_bwd"], op.amax_history_bwd[:4, :1])
    assert found["forward"]["recipe"] == found["backward"]["recipe"] == DelayedScaling(margin=1, amax_history_len=4)
    other = make()
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["1._extra_state"], model.state_dict()["1._extra_state"])


def test_what_has_learnt_nothing_has_no_bytes() -> None:
    assert upstream_state_dict(mz.Linear(32, 32), RECIPE)["_extra_state"].numel() == 0


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="recipe is MXFP8BlockScaling: only DelayedScaling has state"):
        upstream_state_dict(mz.Linear(32, 32), mz.recipe.MXFP8BlockScaling())  # type: ignore[arg-type]
    own = mz.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history[0])
    with pytest.raises(ValueError, match="a function of its own"):
        upstream_state_dict(trained(mz.Linear(32, 32)), own)
