"""More than one process, on torch.distributed: groups, collectives, shards of quantized tensors."""

from mezzotint.distributed.expert import Exchange, combine, dispatch, plan_exchange
from mezzotint.distributed.gradients import reduce_gradients

__all__ = ["Exchange", "combine", "dispatch", "plan_exchange", "reduce_gradients"]
