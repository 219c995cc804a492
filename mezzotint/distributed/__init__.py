"""More than one process, on torch.distributed: groups, collectives, shards of quantized tensors."""
