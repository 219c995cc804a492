"""One name, one thing: a public name at the top of a file is defined in one file of the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "mezzotint"

# Names that several files may define, and why.
SHARED = {
    "GroupedLinear": "a module and an operation: both are upstream's names",
    "LayerNorm": "a module and an operation: both are upstream's names",
    "Linear": "a module and an operation: both are upstream's names",
    "RMSNorm": "a module and an operation: both are upstream's names",
}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines at its top level, by `def`, `class` or assignment; imports define none."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                for target in targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    yield from (part.id for part in parts if isinstance(part, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_a_public_name_is_defined_once() -> None:
    """Kernels are aside: a launch has the name of the operation that it launches, in a file for each format. So are
    upstream's names in `compat`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        if where.parts[0] == "compat" or where.parts[:2] == ("kernels", "triton"):
            continue
        for name in defined_names(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                found[name].add(str(where))
    twice = {name: sorted(files) for name, files in found.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(twice)  # none that is not needed any more
