"""Measurements and checks of the whole library: `python -m bench <name> [arguments]`."""
