"""From training to serving and back: checkpoints in the low-precision formats that models are published in."""
