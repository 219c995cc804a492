"""`python -m bench <name> [arguments]` runs `main(arguments)` of `bench/<name>.py`; without a name it lists them."""

import argparse
import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def find_commands() -> dict[str, str]:
    """Return the first line of the docstring of every module here that defines `main`, by the module's name."""
    commands = {}
    for path in sorted(HERE.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            commands[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return commands


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    commands = find_commands()
    listing = "\n".join(f"  {name:<12} {summary}" for name, summary in commands.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="%(prog)s <name> [arguments]",
        epilog=f"names:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="`python -m bench <name> --help` says which")
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    if args.name not in commands:
        parser.error(f"there is no {args.name!r}\n\nnames:\n{listing}")
    return importlib.import_module(f"bench.{args.name}").main(args.arguments)


if __name__ == "__main__":
    sys.exit(main())
