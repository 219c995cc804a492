"""Mezzotint trains in FP8, MXFP8 and NVFP4 on PyTorch, in whole graphs, with the same bits on CPU and GPU.

The public names are in `api.py`, and are here as soon as this is imported. The command line alone begins without them:
its help and its errors need no PyTorch, which takes seconds to import.
"""

import sys
from importlib import import_module
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_command_line() -> bool:
    """Return whether this process runs `mezzotint …` or `python -m mezzotint …`, whose command imports `api` itself."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    if name == "-m":  # Python puts this there until it has found the module that it runs
        return ("-m", "mezzotint") in pairwise(sys.orig_argv)
    return PurePath(name).stem == "mezzotint"


if TYPE_CHECKING or not _is_command_line():
    from mezzotint.api import *  # noqa: F403
    from mezzotint.api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'mezzotint' has no attribute {name!r}")
        return getattr(import_module("mezzotint.api"), name)
