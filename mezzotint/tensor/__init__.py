"""Quantized tensors: this package has the quantizers (values), the storages that hold their buffers, the `torch.Tensor`
subclasses around those, and prototypes, which stand for tensors without data."""
