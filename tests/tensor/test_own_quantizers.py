"""Quantizers that a user writes: themselves only until they are registered, whole when they are copied, and told apart
by class and by every attribute."""

import copy
import enum
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import DType, Quantizer, TensorProto
from mezzotint.dynamo import register_value_opaque_quantizer
from tests.quantizer_formats import E4M3, E5M2, assert_same_bytes, sample


class Bits(Quantizer):
    """A user's quantizer: fixed point, of so many bits, held in the identity's classes."""

    def __init__(self, bits: int) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.bits = bits

    def _quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 2**self.bits).round() / 2**self.bits]

    def _describe_buffers(self, shape: tuple[int, ...]) -> Any:
        return {"hp_data": (shape, torch.float32)}

    def _classes(self) -> Any:
        return mz.IdentityTensorStorage, mz.IdentityTensor


class Tagged(mz.MXFP8Quantizer):
    """One of ours, and an attribute."""

    def __init__(self, tag: Any) -> None:
        super().__init__(E4M3)
        self.tag = tag


class Own(Bits):
    """With products of its own, and a list."""

    custom = True

    def __init__(self, bits: int, log: list[str]) -> None:
        super().__init__(bits)
        self.log = log


class Delayed(mz.Float8Quantizer):
    """Delayed scaling, and an attribute."""

    def __init__(self, tag: str) -> None:
        super().__init__(torch.full((1,), 2.0), torch.zeros(1), E4M3)
        self.tag = tag


def rebuilt(quantizer: Quantizer) -> Any:
    """Through the graph's repr."""
    text, names = quantizer.__fx_repr__()
    return eval(text, {"__builtins__": {}, **names})


def saved(quantizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(quantizer, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Whole copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda q: q.copy(),
    "with_usage": lambda q: q.with_usage(columnwise=False),
    "internal": lambda q: q._with_internal(True),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": saved,
    "proto": lambda q: TensorProto((32, 64), torch.float32, q).quantizer,
    "empty": lambda q: q.make_empty((32, 64))._quantizer,
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(
    ("make", "attribute", "value"),
    [
        (lambda: Bits(4), "bits", 4),
        (lambda: Own(4, ["a"]), "log", ["a"]),
        (lambda: Tagged("a"), "tag", "a"),
        (lambda: Delayed("a"), "tag", "a"),
    ],
    ids=["plain", "custom", "of ours", "of delayed scaling"],
)
def test_copies_keep_every_attribute(name: str, make: Any, attribute: str, value: Any) -> None:
    quantizer = make()
    before = dict(vars(quantizer))
    made = COPIES[name](quantizer)
    assert made is not quantizer
    assert type(made) is type(quantizer)
    assert getattr(made, attribute) == value
    assert made.columnwise_usage == (name != "with_usage")
    assert made.internal == (name == "internal")
    # It is another one: what is done to either does not show in the other.
    made.set_usage(rowwise=False)
    setattr(made, attribute, None)
    assert {k: v for k, v in vars(quantizer).items() if k != "_memo"} == {
        k: v for k, v in before.items() if k != "_memo"
    }


def test_copies_share_objects_and_deep_copies_do_not() -> None:
    quantizer = Own(4, [])
    assert quantizer.copy().log is quantizer.log  # type: ignore[attr-defined]
    assert copy.deepcopy(quantizer).log is not quantizer.log
    delayed = Delayed("a")
    assert delayed.with_usage(columnwise=False).scale is delayed.scale  # type: ignore[attr-defined]
    assert delayed.frozen().scale is not delayed.scale  # type: ignore[attr-defined]
    assert copy.deepcopy(delayed).amax is not delayed.amax


@pytest.mark.parametrize("columnwise", [True, False, None])
def test_asking_for_a_usage_changes_nothing(columnwise: bool | None) -> None:
    for quantizer in (Own(4, []), Bits(4), Tagged("a"), Delayed("a")):
        made = quantizer.with_usage(rowwise=False, columnwise=columnwise)
        assert made.get_usages() == {"rowwise": False, "columnwise": columnwise is not False}
        assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}


class Renamed(mz.MXFP8Quantizer):
    """Attributes whose names and kinds could be taken for others'."""

    def __init__(self) -> None:
        super().__init__(E5M2)
        self.other_dtype, self.number = DType.kFloat4E2M1, int(E4M3)


class Numbered(Quantizer):
    """An attribute `dtype` that is no DType."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.dtype = int(E4M3)


def test_pickled_attributes_keep_their_kind() -> None:
    for again in (saved(Renamed()), pickle.loads(pickle.dumps(Renamed()))):
        assert (type(again.other_dtype), type(again.number), type(again.dtype)) == (DType, int, DType)
        assert again == Renamed()
    assert type(saved(Numbered()).dtype) is int


def test_an_earlier_pickle_is_read() -> None:
    name = "mezzotint.tensor.mxfp8.MXFP8Quantizer"
    fields = {**mz.MXFP8Quantizer(E5M2)._value_fields(), "dtype": int(E5M2)}
    made = mz.tensor.quantizer.rebuild_quantizer(name, fields)
    assert made == mz.MXFP8Quantizer(E5M2)
    assert made.dtype is E5M2  # type: ignore[attr-defined]


def local_class() -> Any:
    class Mine(mz.MXFP8Quantizer):
        pass

    return Mine


def test_a_name_that_another_class_has_taken_is_not_pickled() -> None:
    first, second = local_class(), local_class()
    assert type(pickle.loads(pickle.dumps(second(E4M3)))) is second
    with pytest.raises(pickle.PicklingError, match=r"another class is called '.*local_class.<locals>.Mine' by now"):
        pickle.dumps(first(E4M3))
    assert type(copy.copy(first(E4M3))) is first
    assert type(copy.deepcopy(first(E4M3))) is first


# Equality


def test_a_users_quantizer_is_equal_to_itself_only() -> None:
    for make in (lambda: Bits(4), lambda: Own(4, []), lambda: Delayed("a")):
        quantizer: Any = make()
        assert quantizer == quantizer
        assert quantizer != make()
        assert quantizer != quantizer.copy()
        assert len({quantizer, make(), quantizer.copy(), quantizer}) == 3
        assert not quantizer._is_value()


def test_a_registered_quantizer_is_a_value() -> None:
    @register_value_opaque_quantizer
    class Registered(Bits):
        pass

    assert Registered(4) == Registered(4)
    assert hash(Registered(4)) == hash(Registered(4))
    assert Registered(4) != Registered(8)
    assert Registered(4) != Bits(4)
    assert Registered(4).copy() == Registered(4)
    assert rebuilt(Registered(4)) == Registered(4)
    assert rebuilt(Registered(4)).bits == 4
    assert Bits(4) != Bits(4)  # the class that it derives from is none


def test_attributes_that_a_subclass_adds_are_part_of_its_value() -> None:
    assert Tagged("a") == Tagged("a")
    assert hash(Tagged("a")) == hash(Tagged("a"))
    assert Tagged("a") != Tagged("b")
    assert rebuilt(Tagged("b")).tag == "b"
    assert "tag='b'" in repr(Tagged("b"))
    # However they came there, and in whatever order.
    first, second = mz.MXFP8Quantizer(E4M3), mz.MXFP8Quantizer(E4M3)
    first.tag, first.other = 1, 2  # type: ignore[attr-defined]
    assert first != second
    second.other, second.tag = 2, 1  # type: ignore[attr-defined]
    assert first == second
    assert hash(first) == hash(second)
    assert first.__fx_repr__() == second.__fx_repr__()
    assert first.with_usage(columnwise=False).tag == 1  # type: ignore[attr-defined]


def test_a_value_that_changed_is_another() -> None:
    quantizer, other = Tagged("a"), Tagged("a")
    assert (hash(quantizer), quantizer) == (hash(other), other)
    quantizer.tag = "b"
    assert quantizer != other
    assert quantizer == Tagged("b")
    hybrid = mz.HybridQuantizer(rowwise_quantizer=Tagged("a"), columnwise_quantizer=mz.NVFP4Quantizer())
    before = hash(hybrid), hybrid.copy()
    hybrid.rowwise_quantizer.tag = "b"  # type: ignore[attr-defined]
    assert hash(hybrid) != before[0]
    assert hybrid != before[1]


class _Group:
    """Stands in for a process group."""


@pytest.mark.parametrize("value", [_Group(), torch.ones(1), [1], {"a": 1}], ids=lambda v: type(v).__name__)
def test_added_attributes_must_be_plain(value: Any) -> None:
    quantizer = Tagged(value)
    message = rf"Tagged.tag is {type(value).__name__}: a quantizer is a value of plain ints.*_DERIVED"
    for use in (
        quantizer._value_key,
        lambda: hash(quantizer),
        lambda: quantizer == quantizer.copy(),
        lambda: Tagged("a") == quantizer,
        quantizer.__fx_repr__,
    ):
        with pytest.raises(TypeError, match=message):
            use()


def test_a_part_that_is_no_value() -> None:
    with pytest.raises(TypeError, match=r"Tagged.tag is Bits, which is equal to itself only, .* register its class"):
        hash(Tagged(Bits(4)))
    assert Tagged(mz.NVFP4Quantizer()) == Tagged(mz.NVFP4Quantizer())
    hybrid = mz.HybridQuantizer(rowwise_quantizer=Bits(4), columnwise_quantizer=mz.MXFP8Quantizer(E4M3))
    assert hybrid != hybrid.copy()
    assert len({hybrid, hybrid}) == 1


class Table(mz.MXFP8Quantizer):
    """With a tensor that follows from a number."""

    _DERIVED = mz.MXFP8Quantizer._DERIVED | {"table"}

    def __init__(self, size: int) -> None:
        super().__init__(E4M3)
        self.size = size
        self._rebuild_derived_state()

    def _rebuild_derived_state(self) -> None:
        self.table = torch.arange(self.size)


def test_derived_state_is_no_part_of_the_value() -> None:
    assert Table(4) == Table(4)
    for again in (rebuilt(Table(4)), Table(4).copy(), saved(Table(4)), copy.deepcopy(Table(4))):
        assert again == Table(4)
        assert torch.equal(again.table, torch.arange(4))


def test_registration_names_a_class_without_a_hash() -> None:
    class Unhashable(Bits):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"cls is Unhashable, which has __eq__ without __hash__: define both"):
        register_value_opaque_quantizer(Unhashable)


class Clipped(Bits):
    """With a property that is written through."""

    @property
    def levels(self) -> int:
        return 2**self.bits

    @levels.setter
    def levels(self, levels: int) -> None:
        self.bits = levels.bit_length() - 1


def test_properties_of_a_users_quantizer_are_written() -> None:
    quantizer = Clipped(2)
    quantizer.levels = 16
    assert quantizer.bits == 4
    assert quantizer.copy().levels == 16  # type: ignore[attr-defined]


def test_what_follows_from_an_attribute_follows_its_assignment() -> None:
    x = sample((48, 64))
    nvfp4 = mz.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    nvfp4.with_random_sign_mask = False
    expected = mz.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)
    assert nvfp4 == expected
    assert_same_bytes(nvfp4.quantize(x), expected.quantize(x))
    identity = mz.IdentityQuantizer()
    identity.dtype = torch.bfloat16
    assert identity == mz.IdentityQuantizer(dtype=torch.bfloat16)
    assert_same_bytes(identity.copy().quantize(x), mz.IdentityQuantizer(dtype=torch.bfloat16).quantize(x))
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        identity.dtype = torch.int8


# Names in graphs


class Modes(enum.Flag):
    A = 1
    B = 2
    BOTH = 3


class Ints(enum.IntFlag):
    A = 1
    B = 4


class Aliases(enum.Enum):
    FIRST = "a"
    SECOND = "a"


Odd: Any = enum.Enum("Odd", {"not an identifier": 1, "class": 2})


@pytest.mark.parametrize(
    "value",
    [Modes.A, Modes.A | Modes.B, Modes(0), Ints.A | Ints.B, Ints(8), Aliases.SECOND, Odd["not an identifier"]],
    ids=repr,
)
def test_any_enum_survives_the_graph(value: Any) -> None:
    again = rebuilt(Tagged(value))
    assert again == Tagged(value)
    assert type(again.tag) is type(value)


def test_classes_of_one_name_have_two_names_in_a_graph() -> None:
    class MXFP8Quantizer(mz.MXFP8Quantizer):
        pass

    quantizers = [cls(E4M3) for cls in (mz.MXFP8Quantizer, MXFP8Quantizer, local_class(), local_class())]
    names: dict[str, type] = {}
    for quantizer in quantizers:
        for name, cls in quantizer.__fx_repr__()[1].items():
            assert names.setdefault(name, cls) is cls
    texts = [quantizer.__fx_repr__()[0] for quantizer in quantizers]
    assert [type(eval(text, {"__builtins__": {}, **names})) for text in texts] == [type(q) for q in quantizers]
    assert [q.__fx_repr__()[0] for q in quantizers] == texts  # the compiler's caches go by the text


def test_enums_of_one_name_have_two_names_in_a_graph() -> None:
    class DType(enum.Enum):
        kFloat8E4M3 = "mine"

    hybrid = mz.HybridQuantizer(
        rowwise_quantizer=Tagged(DType.kFloat8E4M3), columnwise_quantizer=mz.MXFP8Quantizer(E4M3)
    )
    again = rebuilt(hybrid)
    assert again == hybrid
    assert again.rowwise_quantizer.tag is DType.kFloat8E4M3
    assert again.rowwise_quantizer.dtype is E4M3


# Reductions


@pytest.mark.parametrize(
    "make", [lambda **o: mz.Float8CurrentScalingQuantizer(E4M3, **o), mz.NVFP4Quantizer], ids=["float8", "nvfp4"]
)
def test_a_reduction_that_is_asked_for_and_not_done(make: Any) -> None:
    message = r"with_amax_reduction is True, and amax_reduction_group None: no quantizer reduces .*give tp_group"
    with pytest.raises(ValueError, match=message):
        make(with_amax_reduction=True)
    quantizer = make()
    quantizer.with_amax_reduction = True
    with pytest.raises(ValueError, match=message):
        quantizer.quantize(sample((32, 64)))
    for group in ("dp", 0, _Group()):
        with pytest.raises(TypeError, match=r"amax_reduction_group is .*no quantizer reduces"):
            make(with_amax_reduction=True, amax_reduction_group=group).quantize(sample((32, 64)))


def test_the_layout_of_two_parts_is_that_of_their_bytes() -> None:
    """Of parts with one class and one layout, which say of their bytes in metadata what they are."""

    def make(dtype: Any, columnwise: Any) -> Any:
        return mz.HybridQuantizer(rowwise_quantizer=mz.MXFP8Quantizer(dtype), columnwise_quantizer=columnwise)

    target = make(E4M3, mz.NVFP4Quantizer()).quantize(sample((32, 64)))
    before = target.dequantize()
    for other in (make(E5M2, mz.NVFP4Quantizer()), make(E4M3, mz.NVFP4Quantizer(nvfp4_e4m3_max=256))):
        with pytest.raises(ValueError, match="whose bytes mean something else"):
            other.update_quantized(sample((32, 64), seed=1), target)
        assert torch.equal(target.dequantize(), before)
        # Bytes are not copied between them, either: the target quantizes what it is given.
        fresh = make(E4M3, mz.NVFP4Quantizer()).quantize(sample((32, 64)))
        values = other.quantize(sample((32, 64), seed=1))
        assert_same_bytes(fresh.copy_(values), make(E4M3, mz.NVFP4Quantizer()).quantize(values.dequantize()))
