"""This package writes, reads and verifies checkpoints in the low-precision formats that models are published in."""
