"""This program runs a script or a module that imports `transformer_engine`, unchanged, on Mezzotint:

python -m mezzotint.as_transformer_engine script.py ARGUMENTS
python -m mezzotint.as_transformer_engine -m package.module ARGUMENTS
"""

import runpy
import sys
from pathlib import Path


def run_program() -> None:
    """Run the script or module of the command line as Python would, with its own `sys.argv` and as `__main__`."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + is_module or arguments[0] in ("-h", "--help"):
        is_help = arguments[:1] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    if is_module:
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_program()
