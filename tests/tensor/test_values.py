"""Our quantizers are values: equality, hash and graph repr go by `_value_fields`, and every attribute counts."""

import copy
import io
import itertools
import pickle
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mezzotint as mz
from mezzotint import DType, Quantizer
from mezzotint.tensor.quantizer import rebuild_quantizer
from tests.quantizer_formats import E4M3, E5M2, FORMATS, Format, assert_same_bytes, over_formats, sample

over_values = over_formats(is_value=True)

# Another legal value of each field that is no bool and no element type.
OTHER: dict[str, Any] = {
    "amax_epsilon": {0.0: 0.5},
    "block_scaling_dim": {1: 2, 2: 1},
    "block_len": {128: 64},
    "scale_rule": {"roundup": "floor", "floor": "roundup"},
    "nvfp4_e4m3_max": {448: 256, 256: 448},
    "nvfp4_4over6_err_mode": {"MAE": "MSE", "MSE": "MAE"},
    "dtype_name": {None: "float16", "bfloat16": "float16"},
    "columnwise_source": {"original": "rowwise_dequantized", "rowwise_dequantized": "original"},
}


def other_value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, DType):
        return E5M2 if value == E4M3 else E4M3
    if isinstance(value, Quantizer):
        return value.with_usage(rowwise=not value.rowwise_usage)
    return OTHER[name][value]


def rebuilt(quantizer: Quantizer) -> Any:
    """Through the graph's repr: a string, evaluated with nothing but the names that come with it."""
    text, names = quantizer.__fx_repr__()
    return eval(text, {"__builtins__": {}, **names})


# Equality and hash


@over_values
def test_equal_values_are_equal(fmt: Format) -> None:
    first, second = fmt.make(), fmt.make()
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first._value_key() == second._value_key()
    assert len({first, second}) == 1
    assert first == first
    assert first != object()
    assert first is not None
    assert set(first._value_fields()) >= {"rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"}


@over_values
def test_every_field_counts(fmt: Format) -> None:
    quantizer = fmt.make()
    fields = quantizer._value_fields()
    for name, value in fields.items():
        if name == "amax_reduction_group":
            continue
        changed = type(quantizer)._from_value(**{**fields, name: other_value(name, value)})
        assert changed != quantizer, name
        assert changed._value_key() != quantizer._value_key(), name
        assert changed.__fx_repr__() != quantizer.__fx_repr__(), name
        assert rebuilt(changed) == changed, name
        assert pickle.loads(pickle.dumps(changed)) == changed, name


@over_values
def test_constructor_arguments_are_fields(fmt: Format) -> None:
    """What the constructor stored beyond the fields is derived from them: `_from_value` restores all of it."""
    quantizer = fmt.make()
    again = type(quantizer)._from_value(**quantizer._value_fields())
    assert set(vars(again)) == set(vars(quantizer))
    for name, value in vars(quantizer).items():
        assert getattr(again, name) == value, name
        assert type(getattr(again, name)) is type(value), name


def test_formats_differ_from_each_other() -> None:
    values = [fmt.make() for fmt in FORMATS.values() if fmt.is_value]
    assert len(set(values)) == len(values)


def test_subclasses_are_other_values() -> None:
    class Mine(mz.MXFP8Quantizer):
        pass

    assert Mine(E4M3) != mz.MXFP8Quantizer(E4M3)
    assert mz.MXFP8Quantizer(E4M3) != Mine(E4M3)
    assert Mine(E4M3) == Mine(E4M3)


def test_usage_of_dtypes_by_any_name() -> None:
    assert mz.MXFP8Quantizer(torch.float8_e4m3fn) == mz.MXFP8Quantizer(E4M3) == mz.MXFP8Quantizer(int(E4M3))
    assert mz.IdentityQuantizer(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert mz.Float8CurrentScalingQuantizer(E4M3, "cpu") == mz.Float8CurrentScalingQuantizer(E4M3)


# Graph repr


@over_values
def test_graph_repr_round_trip(fmt: Format) -> None:
    for quantizer in (fmt.make(), fmt.quantizer(True, False), fmt.quantizer(False, True, internal=True)):
        again = rebuilt(quantizer)
        assert again == quantizer
        assert hash(again) == hash(quantizer)
        assert type(again) is type(quantizer)
        results = []
        for q in (quantizer, again):
            torch.manual_seed(0)
            results.append(q.quantize(sample((40, 48))))
        assert_same_bytes(*results)


@pytest.mark.parametrize("with_rht", [False, True])
@pytest.mark.parametrize("with_random_sign_mask", [False, True])
@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_hadamard_flags_survive_the_graph(
    with_rht: bool, with_random_sign_mask: bool, stochastic_rounding: bool
) -> None:
    """Whether the transform is applied, and whether it has random signs: two flags, four different results or three."""
    quantizer = mz.NVFP4Quantizer(
        with_rht=with_rht,
        with_post_rht_amax=with_rht,
        with_random_sign_mask=with_random_sign_mask,
        stochastic_rounding=stochastic_rounding,
    )
    for again in (rebuilt(quantizer), quantizer.copy(), pickle.loads(pickle.dumps(quantizer))):
        assert again.with_rht is with_rht
        assert again.with_random_sign_mask is with_random_sign_mask
        assert again.rht_matrix_random_sign_mask_t == quantizer.rht_matrix_random_sign_mask_t
        assert (again.rht_matrix_random_sign_mask_t != 0) is with_random_sign_mask
        results = []
        for q in (quantizer, again):
            torch.manual_seed(0)
            results.append(q.quantize(sample((48, 64))))
        assert_same_bytes(*results)


def test_hadamard_flags_are_different_flags() -> None:
    made = {}
    for with_rht, signs in itertools.product((False, True), repeat=2):
        quantizer = mz.NVFP4Quantizer(with_rht=with_rht, with_post_rht_amax=with_rht, with_random_sign_mask=signs)
        made[with_rht, signs] = rebuilt(quantizer).quantize(sample((48, 64)))._columnwise_data
    assert torch.equal(made[False, False], made[False, True])  # no transform, so its signs do not matter
    assert not torch.equal(made[True, False], made[True, True])
    assert not torch.equal(made[True, False], made[False, False])
    assert not torch.equal(made[True, True], made[False, False])


def test_floats_survive_the_graph_exactly() -> None:
    for epsilon in (0.1, 1e-300, 2.0**-149, 1.7976931348623157e308):
        quantizer = mz.Float8BlockQuantizer(E4M3, amax_epsilon=epsilon)
        assert rebuilt(quantizer).amax_epsilon == epsilon
        assert rebuilt(quantizer) == quantizer


class _Mode(Enum):
    A = "a"
    B = "b"


class _EnumQuantizer(mz.IdentityQuantizer):
    mode: _Mode

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def _value_fields(self) -> dict[str, Any]:
        return {**super()._value_fields(), "mode": self.mode}


def test_a_users_enum_is_a_value() -> None:
    quantizer = _EnumQuantizer(_Mode.B)
    assert quantizer != _EnumQuantizer(_Mode.A)
    assert rebuilt(quantizer) == quantizer
    assert rebuilt(quantizer).mode is _Mode.B
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer


@over_values
def test_repr_names_the_fields(fmt: Format) -> None:
    text = repr(fmt.make())
    assert text.startswith(type(fmt.make()).__name__)
    assert all(f"{name}=" in text for name in fmt.make()._value_fields())


# What is no value


class _Group:
    """Stands in for a process group."""


GROUPED = [
    pytest.param(lambda group: mz.Float8CurrentScalingQuantizer(E4M3, amax_reduction_group=group), id="float8"),
    pytest.param(lambda group: mz.NVFP4Quantizer(amax_reduction_group=group), id="nvfp4"),
    pytest.param(
        lambda group: mz.HybridQuantizer(
            rowwise_quantizer=mz.MXFP8Quantizer(E4M3),
            columnwise_quantizer=mz.NVFP4Quantizer(amax_reduction_group=group),
        ),
        id="hybrid",
    ),
]


@pytest.fixture
def process_group() -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def assert_refuses(make: Any, group: Any) -> None:
    quantizer, other = make(group), make(group)
    message = rf"amax_reduction_group is {type(group).__name__}.*no quantizer reduces over ranks. Modules do"
    for use in (
        lambda: quantizer._value_key(),
        lambda: hash(quantizer),
        lambda: quantizer == other,
        lambda: quantizer == quantizer,
        lambda: make(None) == quantizer,
        lambda: quantizer.__fx_repr__(),
        lambda: quantizer.quantize(sample((32, 64))),
        lambda: quantizer.update_quantized(sample((32, 64)), make(None).make_empty((32, 64))),
    ):
        with pytest.raises(TypeError, match=message):
            use()


@pytest.mark.parametrize("make", GROUPED)
def test_a_group_is_no_value(make: Any) -> None:
    assert_refuses(make, _Group())


def test_a_process_group_is_no_value(process_group: Any) -> None:
    for parameter in GROUPED:
        assert_refuses(parameter.values[0], process_group)


@pytest.mark.parametrize("value", [torch.ones(1), [1], {"a": 1}, object(), torch.float32])
def test_objects_are_no_values(value: Any) -> None:
    quantizer = mz.MXFP8Quantizer(E4M3)
    quantizer.scale_rule = value
    with pytest.raises(TypeError, match=r"MXFP8Quantizer.scale_rule is .*plain ints, bools, floats"):
        hash(quantizer)


def test_a_hybrid_of_stateful_quantizers_is_itself_only() -> None:
    def make() -> Any:
        delayed = mz.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)
        return mz.HybridQuantizer(rowwise_quantizer=delayed, columnwise_quantizer=mz.MXFP8Quantizer(E4M3))

    quantizer = make()
    assert not quantizer._is_value()
    assert quantizer == quantizer
    assert quantizer != quantizer.copy()
    assert len({quantizer, make()}) == 2
    tensor = quantizer.quantize(sample((32, 64)))
    assert tensor.dequantize().shape == (32, 64)
    assert quantizer.rowwise_quantizer.amax.item() == sample((32, 64)).abs().max()
    tensor.quantize_(sample((32, 64), seed=1))
    assert_same_bytes(tensor, make().quantize(sample((32, 64), seed=1)))


# Pickles and copies


@over_formats()
def test_pickle(fmt: Format) -> None:
    quantizer = fmt.quantizer(True, False, internal=True)
    for again in (
        pickle.loads(pickle.dumps(quantizer)),
        copy.deepcopy(quantizer),
        copy.copy(quantizer),
        _through_torch_save(quantizer),
    ):
        assert type(again) is type(quantizer)
        assert again.get_usages() == {"rowwise": True, "columnwise": False}
        assert again.internal
        if fmt.is_value:
            assert again == quantizer
        results = []
        for q in (quantizer, again):
            torch.manual_seed(0)
            results.append(q.quantize(sample((40, 48))))
        assert_same_bytes(*results)


def _through_torch_save(quantizer: Quantizer) -> Any:
    file = io.BytesIO()
    torch.save({"quantizer": quantizer}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["quantizer"]


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"no quantizer is called 'nowhere.Quantizer': import the module"):
        rebuild_quantizer("nowhere.Quantizer", {})


@over_formats()
def test_copies_share_nothing(fmt: Format) -> None:
    quantizer = fmt.make()
    made = quantizer.copy()
    assert made is not quantizer
    assert type(made) is type(quantizer)
    assert not fmt.is_value or made == quantizer
    made.set_usage(rowwise=False)
    made.internal = True
    made.optimize_for_gemm = not made.optimize_for_gemm
    assert quantizer.rowwise_usage
    assert not quantizer.internal
    assert not fmt.is_value or quantizer == fmt.make()
    for name, value in vars(quantizer).items():
        if isinstance(value, Quantizer):
            assert getattr(made, name) is not value


def test_a_hybrid_owns_its_parts() -> None:
    part = mz.MXFP8Quantizer(E4M3)
    hybrid = mz.HybridQuantizer(rowwise_quantizer=part, columnwise_quantizer=mz.NVFP4Quantizer())
    before = hash(hybrid)
    tensor = hybrid.quantize(sample((32, 64)))
    part.optimize_for_gemm = True
    assert hash(hybrid) == before
    hybrid.rowwise_quantizer.optimize_for_gemm = True
    assert not tensor._quantizer.rowwise_quantizer.optimize_for_gemm


@over_formats()
def test_usages(fmt: Format) -> None:
    quantizer = fmt.make()
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    for rowwise, columnwise in itertools.product((True, False, None), repeat=2):
        expected = {"rowwise": rowwise is not False, "columnwise": columnwise is not False}
        made = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        assert made is not quantizer
        assert made.get_usages() == expected
        changed = fmt.make()
        assert changed.set_usage(rowwise=rowwise, columnwise=columnwise) is None
        assert changed.get_usages() == expected
        if fmt.is_value:
            assert changed == made
            assert (made == quantizer) == (expected == quantizer.get_usages())
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    with pytest.raises(TypeError):
        quantizer.with_usage(True)
    made = fmt.quantizer(internal=True)
    made.optimize_for_gemm = True
    assert made.with_usage(columnwise=False).internal
    assert made.with_usage(columnwise=False).optimize_for_gemm
