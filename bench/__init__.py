"""This package measures and checks the whole library: `python -m bench <name> [arguments]`."""
