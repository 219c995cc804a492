"""`quantize_weight`: quantized already, hit, miss, and when a workspace is valid."""

from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint import DType
from mezzotint.functional.weight import as_storage, is_valid_workspace, quantize_weight
from mezzotint.tensor.float8 import Float8ScaledQuantizer
from tests.quantizer_formats import (
    FORMATS,
    USAGES,
    Format,
    assert_same_bytes,
    buffers,
    over_formats,
    same_bytes,
    sample,
    snapshot,
)

SHAPE = (32, 64)


def weight(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> nn.Parameter:
    return nn.Parameter(sample(shape, torch.bfloat16, seed))


def quantized(fmt: Format, w: torch.Tensor, rowwise: bool = True, columnwise: bool = True) -> Any:
    """What a workspace of this weight holds."""
    return fmt.quantize(w.detach(), rowwise, columnwise, True)


def pointers(storage: Any) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in buffers(storage).items()}


# Quantized already


@over_formats()
def test_a_quantized_weight_is_used_as_it_is(fmt: Format) -> None:
    w = nn.Parameter(fmt.quantize(weight().detach()))
    held = snapshot(w)
    workspace = quantized(fmt, weight(1))
    kept = snapshot(workspace)
    for quantizer in (fmt.make(), None):
        for given in (workspace, None):
            made, new, amax = quantize_weight(w, quantizer, given, cache=True, update_workspace=True)
            assert new is None
            assert amax is None
            assert type(made) is fmt.storage
            assert made.shape == w.shape
            assert made.dtype == w.dtype
            assert pointers(made) == pointers(w)
    assert_same_bytes(w, held)
    assert_same_bytes(workspace, kept)


@over_formats()
def test_a_storage_is_used_as_it_is(fmt: Format) -> None:
    storage = quantized(fmt, weight())
    assert quantize_weight(storage, fmt.make(), cache=True) == (storage, None, None)
    assert as_storage(storage) is storage


def test_high_precision_is_used_as_it_is() -> None:
    w = weight()
    made, new, amax = quantize_weight(w, None, cache=True)
    assert (new, amax) == (None, None)
    assert made.data_ptr() == w.data_ptr()
    assert not made.requires_grad


# Miss


@over_formats()
@pytest.mark.parametrize("cache", [True, False])
def test_miss(fmt: Format, cache: bool) -> None:
    w = weight()
    for usages in USAGES:
        torch.manual_seed(0)
        made, new, amax = quantize_weight(w, fmt.quantizer(*usages), None, cache=cache)
        assert type(made) is fmt.storage  # a plain holder, outside of autograd
        assert new is (made if cache else None)
        assert amax is None
        assert made.get_usages() == dict(zip(("rowwise", "columnwise"), usages, strict=True))
        assert_same_bytes(made, quantized(fmt, w, *usages))
        assert all(not buffer.requires_grad for buffer in buffers(made).values())


@over_formats()
def test_a_miss_makes_new_buffers_every_time(fmt: Format) -> None:
    w = weight()
    first, _, _ = quantize_weight(w, fmt.make(), cache=True)
    second, _, _ = quantize_weight(w, fmt.make(), cache=True)
    assert not set(pointers(first).values()) & set(pointers(second).values())


def test_a_given_scale_brings_the_amax() -> None:
    """Delayed scaling as a core knows it."""
    w, scale = weight(), torch.full((1,), 3.0)
    quantizer = Float8ScaledQuantizer(DType.kFloat8E4M3)
    made, new, amax = quantize_weight(w, quantizer, scale=scale, cache=True)
    assert new is made
    assert amax is not None
    assert amax.tolist() == [w.abs().max().item()]
    fmt = mz.Float8Quantizer(scale, torch.zeros(1), DType.kFloat8E4M3)
    assert_same_bytes(made, fmt._with_internal(True).quantize(w.detach()))
    assert quantize_weight(weight(1), quantizer, made, scale=scale * 2, cache=True, update_workspace=False) == (
        made,
        None,
        None,
    )


# Hit


@over_formats()
@pytest.mark.parametrize("cache", [True, False])
def test_hit_without_update(fmt: Format, cache: bool) -> None:
    workspace = quantized(fmt, weight())
    kept = snapshot(workspace)
    made, new, amax = quantize_weight(weight(1), fmt.make(), workspace, cache=cache, update_workspace=False)
    assert made is workspace
    assert (new, amax) == (None, None)
    assert_same_bytes(workspace, kept)


@over_formats()
@pytest.mark.parametrize("cache", [True, False])
def test_hit_with_update(fmt: Format, cache: bool) -> None:
    """In place, as if it had been quantized anew; updating is what happens unless it is forbidden."""
    workspace = quantized(fmt, weight())
    old = pointers(workspace)
    torch.manual_seed(0)
    made, new, amax = quantize_weight(weight(1), fmt.make(), workspace, cache=cache)
    assert made is workspace
    assert (new, amax) == (None, None)
    assert pointers(workspace) == old
    assert_same_bytes(workspace, quantized(fmt, weight(1)))


@over_formats(is_random=False)
def test_an_update_refreshes_what_is_held(fmt: Format) -> None:
    """Also a direction that is not needed now."""
    workspace = quantized(fmt, weight())
    quantize_weight(weight(1), fmt.quantizer(True, False), workspace)
    if fmt.storage is mz.IdentityTensorStorage:
        assert torch.equal(workspace.dequantize(), weight(1))
    else:
        assert_same_bytes(workspace, quantized(fmt, weight(1)))


@over_formats()
def test_skip_update_flag(fmt: Format) -> None:
    workspace = quantized(fmt, weight())
    kept = snapshot(workspace)
    for flag in (torch.ones(1), torch.zeros(1)):
        torch.manual_seed(0)
        made, new, _ = quantize_weight(weight(1), fmt.make(), workspace, cache=True, skip_update_flag=flag)
        assert made is workspace
        assert new is None
        assert same_bytes(workspace, kept) == bool(flag)
    assert_same_bytes(workspace, quantized(fmt, weight(1)))


def test_an_update_takes_a_given_scale() -> None:
    """Delayed scaling: a hit with an update quantizes by the scale of this call, and tells the amax."""
    quantizer, scale = Float8ScaledQuantizer(DType.kFloat8E4M3), torch.full((1,), 2.0)
    workspace, _, _ = quantize_weight(weight(), quantizer, scale=scale, cache=True)
    made, new, amax = quantize_weight(weight(1), quantizer, workspace, scale=scale * 2, cache=True)
    assert made is workspace
    assert new is None
    assert amax is not None
    assert_same_bytes(made, quantize_weight(weight(1), quantizer, scale=scale * 2)[0])


# When a workspace is valid


def check_validity(workspace: Any, w: torch.Tensor, quantizer: Any, valid: bool) -> None:
    """An invalid one is a miss: a new one is made, and the old one is left alone."""
    assert is_valid_workspace(workspace, w, quantizer) is valid
    if w.is_meta:
        return
    kept = snapshot(workspace)
    torch.manual_seed(0)
    made, new, _ = quantize_weight(w, quantizer, workspace, cache=True, update_workspace=False)
    assert (made is workspace) is valid
    assert new is (None if valid else made)
    assert_same_bytes(workspace, kept)
    if not valid:
        torch.manual_seed(0)
        assert_same_bytes(made, quantizer._with_internal(True).quantize(w.detach()))


@over_formats()
def test_usages(fmt: Format) -> None:
    for held in USAGES:
        for needed in USAGES:
            valid = all(has or not needs for has, needs in zip(held, needed, strict=True))
            check_validity(quantized(fmt, weight(), *held), weight(1), fmt.quantizer(*needed), valid)


@over_formats()
def test_shape(fmt: Format) -> None:
    for shape in ((64, 32), (32, 65), (33, 64), (2, 16, 64)):
        check_validity(quantized(fmt, weight()), weight(1, shape), fmt.make(), False)


@over_formats()
def test_device(fmt: Format) -> None:
    check_validity(quantized(fmt, weight()), torch.empty(SHAPE, device="meta"), fmt.make(), False)
    elsewhere = fmt.quantizer(internal=True).make_empty(SHAPE, device="meta")
    assert not is_valid_workspace(elsewhere, weight(), fmt.make())


@over_formats()
def test_class(fmt: Format) -> None:
    for other in {type(other.make()): other for other in FORMATS.values()}.values():
        if type(other.make()) is not type(fmt.make()):
            check_validity(quantized(other, weight()), weight(1), fmt.make(), False)
    check_validity(quantized(fmt, weight()), weight(1), fmt.make(), True)


def test_a_workspace_without_a_quantizer_is_a_miss() -> None:
    bare = as_storage(FORMATS["mxfp8"].quantize(weight().detach()))
    assert bare._quantizer is None
    check_validity(bare, weight(1), FORMATS["mxfp8"].make(), False)


LAYOUTS = [
    ("nvfp4", "nvfp4_2d"),
    ("nvfp4", "nvfp4_rht"),
    ("nvfp4_rht", "nvfp4_rht_no_signs"),
    ("nvfp4_2d", "nvfp4_rht"),
    ("hybrid", "hybrid_float8_identity"),
    ("hybrid", "hybrid_nvfp4_rht"),
]


@pytest.mark.parametrize(("held", "needed"), [*LAYOUTS, *(pair[::-1] for pair in LAYOUTS)])
def test_options_that_change_the_layout(held: str, needed: str) -> None:
    """Bytes that mean something else, of which a storage says nothing."""
    check_validity(quantized(FORMATS[held], weight()), weight(1), FORMATS[needed].make(), False)


# Options that a storage does say: its bytes can be multiplied, but not overwritten by another quantizer's.
FORMS = [
    ("float8_current", "float8_current_e5m2"),
    ("float8_block_1d", "float8_block_2d"),
    ("mxfp8", "mxfp8_e5m2"),
    ("mxfp8", "mxfp8_swizzled"),
    ("nvfp4", "nvfp4_swizzled"),
    ("nvfp4", "nvfp4_e4m3_256"),
    ("nvfp4", "nvfp4_4over6_mae"),
    ("nvfp4", "nvfp4_row_scaled"),
]


@pytest.mark.parametrize(("held", "needed"), FORMS)
def test_an_update_of_another_form_is_a_miss(held: str, needed: str) -> None:
    workspace = quantized(FORMATS[held], weight())
    made, new, _ = quantize_weight(weight(1), FORMATS[needed].make(), workspace, cache=True, update_workspace=True)
    assert new is made
    assert made is not workspace
    assert_same_bytes(made, quantized(FORMATS[needed], weight(1)))
