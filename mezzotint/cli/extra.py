"""This module names the packages that the command line needs beside torch, which are the extra `mezzotint[cli]`, and
says so where one of them is missing. It imports none of them."""

EXTRA = ("typer", "rich", "numpy", "matplotlib", "safetensors", "tensorboard")


def what_to_install(error: ModuleNotFoundError) -> str:
    """Return the line for a user whose environment lacks a package of the extra; raise any
    other error again."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise error
    return f"{package} is not installed: pip install 'mezzotint[cli]'"
