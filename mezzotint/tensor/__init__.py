"""Quantizers (values), storages (holders of buffers), quantized tensors (`torch.Tensor` subclasses), prototypes."""
