"""This module runs the command line for `python -m mezzotint`."""

import sys

from mezzotint.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
