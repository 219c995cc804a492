"""The extra `mezzotint[cli]` has what the command line needs beside torch. This module says so where a part of it is
missing, and imports none of it."""

EXTRA = ("typer", "rich", "numpy", "matplotlib", "safetensors", "tensorboard")


def what_to_install(error: ModuleNotFoundError) -> str:
    """Return the line for a user whose environment lacks a package of the extra; raise any
    other error again."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise error
    return f"{package} is not installed: pip install 'mezzotint[cli]'"
