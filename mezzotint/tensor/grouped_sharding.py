"""Groups in shards of whole members, as FSDP2 cuts one along its first dimension.

All members have one shape, and scales of their own. So a shard is a group of fewer, its buffers are parts of the whole
one's, and what is gathered, one behind the other, is the whole: no scale is shared, no block is cut.
"""

from typing import Any

import torch

from mezzotint.tensor.fsdp_books import check_alike
from mezzotint.tensor.partition import assign, extract


def member_rows(group: Any, start: int, stop: int) -> dict[str, Any] | None:
    """Constructor kwargs of members start..stop; None where there is none, or they differ in shape."""
    if not group.all_same_shape() or start >= stop:
        return None
    fields: dict[str, Any] = {"shapes": group.shapes[start:stop]}
    kwargs = dict(group._FLATTEN_TENSOR_BUFFERS)
    for attribute, buffer in group._buffers():
        size = buffer.shape[0] // group.num_tensors
        fields[kwargs[attribute]] = buffer[start * size : stop * size]
    return fields


def send_members(shard: Any, mesh: Any, orig_size: torch.Size, module: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """`fsdp_pre_all_gather`: all buffers of the shard, and what `gather_members` must know."""
    check_alike(shard.quantizer, shard.device, module, mesh.get_group())
    usages = shard.get_usages()
    buffers, sent = extract(shard, usages["rowwise"], usages["columnwise"], mesh.size())
    return tuple(buffers), (orig_size[0], sent)


def gather_members(empty: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, out: Any) -> Any:
    """`fsdp_post_all_gather`: the whole and its buffers, or nothing for `out`. `empty(n)`: a new group of so many."""
    count, sent = metadata
    whole = empty(count) if out is None else out
    assign(whole, outputs, sent)
    return None if out is not None else (whole, tuple(buffer for _, buffer in whole._buffers()))
