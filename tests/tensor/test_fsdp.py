"""Shards of rows of a quantized tensor, put together again: the bytes of the whole, in every format that can."""

import pytest
import torch

from mezzotint.tensor.fsdp import assign, empty_whole, extract, sendable_directions
from tests.quantizer_formats import FORMATS, Format, assert_same_bytes, buffers, over_formats, sample

ROWS, WIDTH, COUNT = 256, 96, 2


def shards_of(fmt: Format) -> list[torch.Tensor]:
    return list(fmt.quantize(sample((ROWS, WIDTH))).split(ROWS // COUNT))


@over_formats()
def test_the_buffers_of_shards_are_those_of_the_whole(fmt: Format) -> None:
    if fmt.make().gather_multiple(False) is None:
        return
    whole = fmt.quantize(sample((ROWS, WIDTH)))
    parts = [shard.fsdp_extract_buffers() for shard in shards_of(fmt)]
    fields, meta = whole.fsdp_buffer_fields(), parts[0][1]
    assert fields == tuple(meta["dims"]) == tuple(meta["shapes"])
    gathered = [torch.cat(pieces) for pieces in zip(*[part[0] for part in parts], strict=True)]
    made = fmt.quantizer().make_empty((ROWS, WIDTH))
    for buffer in buffers(made).values():
        buffer.view(torch.uint8).fill_(255)
    made.fsdp_assign_gathered(gathered, meta)
    for field in fields:
        assert torch.equal(getattr(made, field), getattr(whole, field)), field


@over_formats()
@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)])
def test_what_is_sent_makes_the_whole(fmt: Format, read: tuple[bool, bool]) -> None:
    quantizer = fmt.make()
    which = sendable_directions(quantizer, ROWS // COUNT)
    if which is None:
        assert fmt.name == "hybrid_chained" or fmt.name.endswith("swizzled")
        return
    assert which == (True, not quantizer.derives_columnwise())
    which = read if which[1] else which
    parts = [extract(shard, *which, COUNT) for shard in shards_of(fmt)]
    made = empty_whole((ROWS, WIDTH), quantizer, torch.float32, torch.device("cpu"))
    assign(made, [torch.cat(pieces) for pieces in zip(*[part[0] for part in parts], strict=True)], parts[0][1])
    whole = fmt.quantize(sample((ROWS, WIDTH)))
    if which == (True, True) or quantizer.derives_columnwise():
        assert_same_bytes(made, whole)
        return
    sent, other = (whole._ROWWISE, whole._COLUMNWISE) if which[0] else (whole._COLUMNWISE, whole._ROWWISE)
    held = buffers(whole)
    for name in sent:
        if name in held:
            assert torch.equal(getattr(made, name), held[name]), name
    unusable = [getattr(made, name).view(torch.uint8) for name in other if name in held]
    assert all(bool((buffer == 255).all()) for buffer in unusable[1:] or unusable)


@over_formats()
def test_both_directions_send_as_much(fmt: Format) -> None:
    """Where one is sent at a time: FSDP2 allocates once."""
    if sendable_directions(fmt.make(), ROWS // COUNT) == (True, True):
        row, column = [extract(shards_of(fmt)[0], *which, COUNT)[0] for which in ((True, False), (False, True))]
        assert [(t.numel(), t.dtype) for t in row] == [(t.numel(), t.dtype) for t in column]


def test_blocks_that_would_be_cut() -> None:
    for fmt in FORMATS.values():
        multiple = fmt.make().gather_multiple(True)
        if sendable_directions(fmt.make(), 256) is not None and multiple not in (None, 1):
            assert sendable_directions(fmt.make(), 8) is None, fmt.name


@over_formats()
def test_what_follows_from_the_other_direction_is_known(fmt: Format) -> None:
    if fmt.make().derives_columnwise():
        assert "columnwise" in fmt.derives


@over_formats()
def test_rows_of_parts_lie_where_rows_of_shards_do(fmt: Format) -> None:
    """Of each buffer that differs between them; the others are those that parts share."""
    whole = fmt.quantize(sample((ROWS, WIDTH)))
    along, rows = whole._along_matrix(), whole._along_rows()
    if along is None:
        assert fmt.name.endswith("swizzled")
        return
    shared = {id(buffer) for buffer in whole._shared_buffers(0)}
    for name, buffer in buffers(whole).items():
        lies = along[name][0]
        assert (lies is None) == (name not in rows) == (id(buffer) in shared), name
        if lies is not None:
            assert (lies[0], -(-ROWS // lies[1])) == rows[name][:2], name
