"""Training on more than one rank, on top of torch.distributed: this package has groups, collectives and shards of
quantized tensors.

Modules that need DTensor, whose import takes seconds, are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mezzotint.comm.gradients import reduce_gradients
from mezzotint.distributed.check import check_same
from mezzotint.moe.exchange import Exchange, combine, dispatch, plan_exchange

if TYPE_CHECKING:
    from mezzotint.distributed.fsdp import low_precision_gather
    from mezzotint.distributed.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, TensorParallel

__all__ = [
    "ColwiseParallel",
    "Exchange",
    "RowwiseParallel",
    "SequenceParallel",
    "TensorParallel",
    "check_same",
    "combine",
    "dispatch",
    "low_precision_gather",
    "plan_exchange",
    "reduce_gradients",
]

_LATE = {
    "ColwiseParallel": "styles",
    "RowwiseParallel": "styles",
    "SequenceParallel": "styles",
    "TensorParallel": "styles",
    "low_precision_gather": "fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
