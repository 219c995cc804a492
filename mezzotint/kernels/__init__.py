"""Kernels: this package defines the leaf ops, which work on plain tensors and which the compiler does not look into.

Each format has one file here (layout, geometry, plain-torch reference, leaf ops, and its record for `formats.py`) and
one of the same name in `triton/` (the CUDA kernels and their launches, imported when the first CUDA tensor arrives).
The reference is the specification and the CPU implementation; the CUDA kernels give the same bytes.
"""
