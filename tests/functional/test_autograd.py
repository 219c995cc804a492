"""The shell around the cores: arguments that refuse typos, saving and restoring, and that a core writes nothing."""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.functional import (
    activation,
    autograd,
    grouped_linear,
    layernorm_linear,
    layernorm_mlp,
    linear,
    norm,
    tensor_parallel,
)
from mezzotint.functional.autograd import Core, GradState, Saved, flatten, run_core, unflatten
from mezzotint.tensor.scale_slot import ScaleSlot
from mezzotint.tensor.storage import QuantizedTensorStorage
from tests.quantizer_formats import USAGES, Format, assert_same_bytes, buffers, over_formats, snapshot
from tests.quantizer_formats import sample as values
from tests.recipes import MODULES, RECIPES, VARIANTS, assert_equal, make, sample, step

over_modules = pytest.mark.parametrize("name", MODULES)
over_recipes = pytest.mark.parametrize("recipe", RECIPES)
PACKAGES = (autograd, linear, layernorm_linear, layernorm_mlp, grouped_linear, norm, activation, tensor_parallel)


# Arguments

ARGUMENTS = {
    cls.__name__: cls
    for package in PACKAGES
    for _, cls in inspect.getmembers(package, inspect.isclass)
    if dataclasses.is_dataclass(cls) and cls.__module__ == package.__name__ and not cls.__name__.startswith("_")
}
MUTABLE = [
    "ActivationBwdArgs",
    "ActivationFwdArgs",
    "GradState",
    "GroupedLinearBwdArgs",
    "GroupedLinearFwdArgs",
    "GroupedLinearMade",
    "LayerNormLinearBwdArgs",
    "LayerNormLinearFwdArgs",
    "LayerNormLinearMade",
    "LayerNormMLPBwdArgs",
    "LayerNormMLPFwdArgs",
    "LayerNormMLPMade",
    "LinearBwdArgs",
    "LinearFwdArgs",
    "LinearMade",
    "MainGrad",
    "NormBwdArgs",
    "NormFwdArgs",
    "NormMade",
    "WeightGrad",
]
FROZEN = ["Core", "LinearQuantizers", "Needs", "NormOptions", "Numerics", "Parallel", "Residual"]


def test_all_arguments_are_known() -> None:
    assert sorted(ARGUMENTS) == sorted([*MUTABLE, *FROZEN])


@pytest.mark.parametrize("name", MUTABLE)
def test_a_typo_is_an_error(name: str) -> None:
    cls = ARGUMENTS[name]
    made = object.__new__(cls)
    assert not hasattr(made, "__dict__")
    for field in dataclasses.fields(cls):
        setattr(made, field.name, None)
        with pytest.raises(AttributeError):
            setattr(made, f"{field.name}_", None)
        with pytest.raises(AttributeError):
            getattr(made, f"{field.name}_")
    if issubclass(cls, Saved):
        assert set(cls.SAVED) <= {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_shared_is_frozen(name: str) -> None:
    made = object.__new__(ARGUMENTS[name])
    for attribute in (dataclasses.fields(made)[0].name, "no_such_field"):
        with pytest.raises(AttributeError):
            setattr(made, attribute, None)


# Cores of modules in use

CORES = {
    "linear": ("mezzotint.module.linear", "LINEAR"),
    "layernorm_linear": ("mezzotint.module.layernorm_linear", "LAYERNORM_LINEAR"),
    "layernorm_mlp": ("mezzotint.module.layernorm_mlp", "LAYERNORM_MLP"),
    "grouped_linear": ("mezzotint.module.grouped_linear", "GROUPED_LINEAR"),
}


class Spy:
    """Takes the place of a module's core, and sees what goes through it."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        package, self.name = importlib.import_module(CORES[name][0]), CORES[name][1]
        self.core: Core = getattr(package, self.name)
        self.kept: list[Any] = []  # backward arguments, one for each forward
        self.grads: list[tuple[Any, ...]] = []
        self.results: list[Any] = []
        spied = dataclasses.replace(self.core, forward=self.forward, setup=self.setup, backward=self.backward)
        monkeypatch.setattr(package, self.name, spied)

    def forward(self, args: Any) -> Any:
        return self.core.forward(args)

    def setup(self, args: Any, made: Any) -> Any:
        kept = self.core.setup(args, made)
        self.kept.append(mirror(kept))
        return kept

    def backward(self, saved: Any, *grads: Any) -> Any:
        self.grads.append(grads)
        self.results.append(self.core.backward(saved, *grads))
        return self.results[-1]


def mirror(value: Any) -> Any:
    """The same in new objects, around the same tensors: saving takes them out of the old ones."""
    if isinstance(value, tuple):
        return tuple(mirror(item) for item in value)
    if not isinstance(value, Saved):
        return value
    made = object.__new__(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        setattr(made, field.name, mirror(getattr(value, field.name)))
    return made


class Watch(Spy):
    """Compares every tensor before and after: values, and how often it was written."""

    def forward(self, args: Any) -> Any:
        return watched(self.core.forward, args)

    def setup(self, args: Any, made: Any) -> Any:
        return watched(self.core.setup, args, made)

    def backward(self, saved: Any, *grads: Any) -> Any:
        return watched(self.core.backward, saved, *grads)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a value. Not the live buffers of the shell, and not what is there to be written."""
    if isinstance(value, QuantizedTensorStorage):
        for attribute, buffer in buffers(value).items():
            yield f"{path}.{attribute}", buffer
    elif isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from tensors_of(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, GradState | type):
        for field in dataclasses.fields(value):
            if field.name not in ("main_grad", "history"):
                yield from tensors_of(getattr(value, field.name), f"{path}.{field.name}")


def watched(function: Any, *arguments: Any) -> Any:
    before = [(path, tensor, tensor.clone(), tensor._version) for path, tensor in tensors_of(arguments)]
    assert before
    result = function(*arguments)
    for path, tensor, copy, version in before:
        assert tensor._version == version, f"{path} was written"
        assert torch.equal(tensor.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8)), path
    return result


ALL = {**RECIPES, **VARIANTS}


@over_modules
@pytest.mark.parametrize("recipe", ALL)
def test_a_core_writes_none_of_its_inputs(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(make(name), sample(), ALL[recipe])
    Watch(name, monkeypatch)
    assert_equal(step(make(name), sample(), ALL[recipe]), expected)


@over_modules
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_a_core_writes_no_kept_weight(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Watch(name, monkeypatch)
    module = make(name)
    for first in (True, False):
        step(module, sample(), RECIPES[recipe], is_first_microbatch=first)


def test_watching_sees_what_is_written() -> None:
    def write(x: torch.Tensor) -> None:
        x.add_(1)
        x.sub_(1)

    with pytest.raises(AssertionError, match="was written"):
        watched(write, torch.ones(3))
    storage = mz.MXFP8Quantizer().quantize(torch.ones(32, 32))
    with pytest.raises(AssertionError, match="was written"):
        watched(lambda s: s._rowwise_data.zero_(), storage)


# Saving


def scales_of(value: Any) -> Iterator[torch.Tensor]:
    """The scales that delayed scaling's slots are in."""
    if isinstance(value, ScaleSlot):
        yield value.scales
    elif isinstance(value, Saved | tuple):
        for part in value if isinstance(value, tuple) else [getattr(value, name) for name in value.SAVED]:
            yield from scales_of(part)


def check_equal(actual: Any, expected: Any) -> None:
    """The same structure around the very same tensors, in other objects."""
    if isinstance(expected, torch.Tensor):
        assert actual is expected
    elif isinstance(expected, QuantizedTensorStorage):
        assert actual is not expected
        check_storage(actual, expected)
    elif isinstance(expected, ScaleSlot):
        assert actual is not expected
        check_equal((actual.scales, actual.slot, actual.history), (expected.scales, expected.slot, expected.history))
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for item, other in zip(actual, expected, strict=True):
            check_equal(item, other)
    elif isinstance(expected, Saved):
        assert actual is not expected
        assert type(actual) is type(expected)
        for field in dataclasses.fields(expected):  # type: ignore[arg-type]
            value, other = getattr(actual, field.name), getattr(expected, field.name)
            if field.name in expected.SAVED:
                check_equal(value, other)
            else:
                assert value is other or value == other
    else:
        assert actual is expected


def check_storage(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.get_usages() == expected.get_usages()
    assert actual._plain_values() == expected._plain_values()
    for attribute, buffer in buffers(expected).items():
        assert getattr(actual, attribute) is buffer
    assert list(buffers(actual)) == list(buffers(expected))


@over_formats()
def test_storages_are_saved_and_restored(fmt: Format) -> None:
    for usages in USAGES:
        for shape in ((32, 64), (5, 7), (2, 16, 64)):
            storage = fmt.quantize(values(shape), *usages, True)
            kept = snapshot(storage)
            flat: list[torch.Tensor] = []
            spec = flatten(storage, flat, [])
            assert [id(tensor) for tensor in flat] == [id(buffer) for buffer in buffers(storage).values()]
            first, second = unflatten(spec, list(flat), []), unflatten(spec, list(flat), [])
            check_equal(first, storage)
            check_equal(second, storage)
            first.clear()  # what is done to one is not done to the others
            assert_same_bytes(second, kept)
            assert_same_bytes(storage, kept)
            assert torch.equal(second.dequantize(), storage.dequantize())


@over_formats(is_value=True)
def test_what_tells_how_to_restore_holds_no_tensor(fmt: Format) -> None:
    """Tensors that autograd does not know of would outlive the graph."""
    spec = flatten(fmt.quantize(values((32, 64)), internal=True), [], [])
    for value in (spec.cls, spec.shape, spec.dtype, *spec.names, *spec.values.values()):
        assert not isinstance(value, torch.Tensor)
        assert not any(isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values())


def test_plain_values_are_saved_and_restored() -> None:
    x, y = torch.ones(2), torch.ones(3)
    storage = mz.MXFP8Quantizer().quantize(torch.ones(32, 32))
    for value in (None, x, (x, None, y), (), ((x,), (y, (None,))), (storage, x)):
        flat: list[torch.Tensor] = []
        spec = flatten(value, flat, [])
        rest = [*flat, x]
        check_equal(unflatten(spec, rest, []), value)
        assert rest == [x]  # taken from the front, no more than is needed


def restorable(name: str, recipe: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Spy, Any]:
    """A step through a module, of which backward arguments and gradients were seen."""
    spy = Spy(name, monkeypatch)
    step(make(name, **options), sample(), recipe)
    (kept,) = spy.kept
    return spy, kept


NESTED = [(name, {}) for name in MODULES] + [("layernorm_mlp", {"checkpoint": True}), ("linear", {"bias": False})]


@pytest.mark.parametrize(("name", "options"), NESTED, ids=lambda v: v if isinstance(v, str) else "-".join(v))
@over_recipes
def test_arguments_are_saved_and_restored(
    name: str, options: dict[str, Any], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every module, nested as they are; a backward on what was restored, and once more, is the same backward."""
    spy, kept = restorable(name, RECIPES[recipe], monkeypatch, **options)
    flat: list[torch.Tensor] = []
    live: list[torch.Tensor] = []
    spec = flatten(mirror(kept), flat, live)
    assert flat
    assert not {*map(id, flat)} & {*map(id, live)}
    assert not list(tensors_of(spec.like))  # autograd alone holds them
    shared = {id(scales) for scales in scales_of(kept)}  # by the linears of a module
    others = [id(tensor) for tensor in flat if id(tensor) not in shared]
    assert len({*others}) == len(others)  # nothing is saved twice
    check_equal(unflatten(spec, list(flat), list(live)), kept)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(spy.core.backward(unflatten(spec, list(flat), list(live)), *spy.grads[0]))
    for (_, first), (_, second) in zip(tensors_of(results[0]), tensors_of(results[1]), strict=True):
        assert torch.equal(first, second)
    check_equal(unflatten(spec, list(flat), list(live)), kept)
    if recipe != "nvfp4":  # rounds stochastically
        for (_, first), (_, once) in zip(tensors_of(results[0]), tensors_of(spy.results[0]), strict=True):
            assert torch.equal(first, once)


@over_modules
def test_what_is_not_needed_is_not_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient of the weight no input is kept, without one of the input no weight."""
    spy = Spy(name, monkeypatch)
    sizes = {}
    for frozen in ((), ("weight",), ("input",)):
        module, x = make(name), sample()
        for key, parameter in module.named_parameters():
            frozen_weight = "weight" in frozen and parameter.dim() == 2
            frozen_norm = "input" in frozen and "layer_norm" in key
            parameter.requires_grad_(not frozen_weight and not frozen_norm)
        with mz.autocast(recipe=RECIPES["mxfp8"]):
            module(x.requires_grad_("input" not in frozen), *(([10, 10, 20],) if name == "grouped_linear" else ()))
        flat: list[torch.Tensor] = []
        flatten(mirror(spy.kept.pop()), flat, [])
        sizes[frozen] = sum(tensor.numel() * tensor.element_size() for tensor in flat)
    assert sizes["weight",] < sizes[()]
    assert sizes["input",] < sizes[()]


# The shell


@dataclasses.dataclass(slots=True)
class ScaleArgs:
    x: torch.Tensor
    others: tuple[torch.Tensor, ...]
    factor: float
    grad_state: GradState | None = None


@dataclasses.dataclass(slots=True)
class ScaleBwd(Saved):
    x: torch.Tensor
    others: tuple[torch.Tensor, ...]
    factor: float

    SAVED = ("x", "others")


def scale_core(seen: list[Any]) -> Core:
    """factor · x · Σ others, with the sum as an extra."""

    def forward(a: ScaleArgs) -> tuple[Any, ...]:
        total = sum(a.others)
        return a.x * total * a.factor, total

    def outputs(a: ScaleArgs, y: torch.Tensor, made: torch.Tensor) -> tuple[Any, ...]:
        return (y,), (made.amax(),)

    def setup(a: ScaleArgs, made: torch.Tensor) -> ScaleBwd:
        seen.append("setup")
        return ScaleBwd(a.x, a.others, a.factor)

    def backward(b: ScaleBwd, dy: torch.Tensor) -> tuple[Any, ...]:
        seen.append(b)
        dx = dy * sum(b.others) * b.factor
        return (dx, tuple(dy * b.x * b.factor for _ in b.others)), ()

    return Core(forward, outputs, setup, backward, ("x", "others"), tuples=("others",))


def test_apply() -> None:
    seen: list[Any] = []
    x, others = torch.randn(4, requires_grad=True), [torch.randn(4, requires_grad=True) for _ in range(3)]
    y, extra = run_core(scale_core(seen), ScaleArgs(x, tuple(others), 2.0), True)
    assert y.requires_grad
    assert not extra.requires_grad
    assert len(y.grad_fn._input_metadata) == 1  # autograd makes no gradient of zeros for the extra
    y.backward(torch.ones(4), retain_graph=True)
    total = others[0] + others[1] + others[2]
    torch.testing.assert_close(x.grad, 2 * total.detach())
    for other in others:
        torch.testing.assert_close(other.grad, 2 * x.detach())
    y.backward(torch.ones(4))
    torch.testing.assert_close(x.grad, 4 * total.detach())
    assert seen[0] == "setup"
    assert seen[1] is not seen[2]  # each backward has arguments of its own
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones(4))


def test_apply_without_gradients() -> None:
    """No setup, nothing saved, nothing that requires a gradient."""
    seen: list[Any] = []
    x = torch.randn(4, requires_grad=True)
    y, _ = run_core(scale_core(seen), ScaleArgs(x.detach(), (x.detach(),), 2.0), False)
    assert not y.requires_grad
    with torch.no_grad():
        y, _ = run_core(scale_core(seen), ScaleArgs(x, (x,), 2.0), True)
    assert not y.requires_grad
    assert seen == []
