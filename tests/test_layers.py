"""Imports inside the package go one way: a file imports lower rows of `ROWS` or files of its own package.

Within a package there is no cycle, and no import hides inside a function. The root `__init__.py` may import
anything; nothing may import from it. The checks read the source (`ast`), also of files that no test loads.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mezzotint"

# Lowest first. A name is a file or a folder of the package; those of one row do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("constants", "files", "late", "memory", "notebook"),
    ("tracing",),
    ("formats",),
    ("hw",),
    ("kernels",),
    ("comm",),
    ("tensor",),
    ("optimizers",),
    ("recipe_names",),
    ("recipe",),
    ("availability", "region"),
    ("functional",),
    ("finite",),
    ("custom_recipes", "quantization"),
    ("compat",),
    ("layer",),
    ("module", "ops"),
    ("attention", "cross_entropy", "moe"),
    ("transformer",),
    ("convert", "distributed", "graph", "offload", "recomputation"),
    ("serving",),
    ("dynamo", "inspect"),
    ("api",),
    ("as_transformer_engine", "trainer"),
    ("cli",),
    ("__main__",),
)
ROW_OF = {unit: row for row, units in enumerate(ROWS) for unit in units}

# Files that may import inside a function, and why.
MAY_IMPORT_LATE = {
    "mezzotint": "the command line begins without what `api` imports",
    "mezzotint.as_transformer_engine.modules": "a counterpart is imported when a name of it is used",
    "mezzotint.cli.app": "help and errors of typing do not wait for torch",
    "mezzotint.distributed": "DTensor takes seconds to import, and most programs have no use for it",
    "mezzotint.kernels._lib": "Triton loads when the first CUDA tensor arrives",
    "mezzotint.hw": "asks a library that may be absent what it can do",
    "mezzotint.dynamo.trace": "runs inside the compiler, which is imported by then",
    "mezzotint.inspect.plot": "matplotlib may be absent, and takes a second to import",
    "mezzotint.serving.load": "transformers may be absent, and takes seconds to import",
    "mezzotint.inspect.store": "TensorBoard may be absent, and takes a second to import",
}


@dataclass(frozen=True, slots=True)
class Import:
    source: str  # the importing module, dotted
    line: int
    target: str | None  # the imported module of the package; None: outside of it, or known only at run time
    is_late: bool  # inside a function, or by a call
    is_typing: bool  # under `if TYPE_CHECKING`: for annotations, not there when the program runs

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: imports {self.target or 'a module'}"


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name → file, for every Python file under the package."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert modules, f"no Python file under {package}"
    return modules


def unit_of(module: str) -> str | None:
    """The file or folder of the package that a module is in; None for the root `__init__.py`."""
    return module.split(".")[1] if "." in module else None


@cache
def find_imports(package: Path) -> list[Import]:
    """Every import of every file under the package."""
    modules = find_modules(package)
    return [found for name in modules for found in _imports_of(name, modules)]


def _imports_of(source: str, modules: dict[str, Path]) -> Iterator[Import]:
    is_package = modules[source].name == "__init__.py"
    package_parts = source.split(".") if is_package else source.split(".")[:-1]

    def known(name: str) -> str | None:
        """The module, or the nearest parent of it that is a file here."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    def walk(node: ast.AST, is_late: bool, is_typing: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(source, node.lineno, known(alias.name), is_late, is_typing)
            case ast.ImportFrom(module=module, names=names, level=level):
                parent = package_parts[: len(package_parts) - level + 1] if level else []
                base = ".".join([*parent, *([module] if module else [])])
                for alias in names:
                    yield Import(source, node.lineno, known(f"{base}.{alias.name}"), is_late, is_typing)
            case ast.Call(func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module")):
                yield Import(source, node.lineno, None, True, is_typing)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_typing |= isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_late or is_function, is_typing)

    yield from walk(ast.parse(modules[source].read_text(encoding="utf-8")), False, False)


def wrong_direction(package: Path) -> list[str]:
    """Imports that go up or sideways, and files that have no row."""
    units = {unit for module in find_modules(package) if (unit := unit_of(module))}
    errors = [f"{unit} has no row: give it one in ROWS" for unit in sorted(units - ROW_OF.keys())]
    for found in find_imports(package):
        unit = unit_of(found.source)
        if unit not in ROW_OF or found.target is None:
            continue
        target = unit_of(found.target)
        if target is None:
            errors.append(f"{found}, the root: import from the file that defines the name")
        elif target != unit and target in ROW_OF and ROW_OF[target] >= ROW_OF[unit]:
            errors.append(f"{found}: {target} is not below {unit}")
    return errors


def late_imports(package: Path) -> list[str]:
    """Imports inside functions or by a call, outside of the files that may."""
    return [
        f"{found} inside a function or by a call: import at the top of the file"
        for found in find_imports(package)
        if found.is_late and found.source not in MAY_IMPORT_LATE
    ]


COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv", "monitored_barrier"),
}


def own_collectives(package: Path) -> list[str]:
    """Collectives of torch.distributed that are called, or named, outside of `comm`."""
    return [
        f"{name}, line {line}: torch.distributed.{found}: use what mezzotint.comm.collectives has"
        for name, path in find_modules(package).items()
        if unit_of(name) != "comm"
        for line, found in _torch_collectives(ast.parse(path.read_text(encoding="utf-8")))
    ]


def _torch_collectives(tree: ast.AST) -> Iterator[tuple[int, str]]:
    aliases = {"torch.distributed"}  # texts that stand for the module
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                aliases |= {each.asname for each in names if each.name == "torch.distributed" and each.asname}
            case ast.ImportFrom(module="torch", names=names):
                aliases |= {each.asname or each.name for each in names if each.name == "distributed"}
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch.distributed"):
                yield from ((node.lineno, each.name) for each in names if each.name in COLLECTIVES)
                yield from ((node.lineno, each.name) for each in names if "functional_collectives" in each.name)
            case ast.Attribute(value=value, attr=attr) if attr in COLLECTIVES and ast.unparse(value) in aliases:
                yield node.lineno, attr


def is_result(found: Import) -> bool:
    """The one exception: what `Quantizer.quantize` gives to users, whose class stands on quantizers."""
    return (found.source, found.target) == ("mezzotint.tensor.quantizer", "mezzotint.tensor.quantized_tensor")


def import_cycle(package: Path) -> list[str]:
    """The modules along a cycle of imports, or nothing. An import that is late closes none, nor one for types, but
    inside of `tensor/`."""
    graph: dict[str, set[str]] = {}
    for found in find_imports(package):
        is_counted = not found.is_typing or (unit_of(found.source) == "tensor" and not is_result(found))
        if found.target is not None and not found.is_late and is_counted:
            graph.setdefault(found.source, set()).add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_package_is_read() -> None:
    assert {unit_of(module) for module in find_modules(PACKAGE)} >= {"constants", "kernels", "tensor"}
    crossing = {(unit_of(i.source), unit_of(i.target)) for i in find_imports(PACKAGE) if i.target}
    assert ("kernels", "constants") in crossing
    assert ("tensor", "kernels") in crossing


def test_a_file_imports_only_lower_rows() -> None:
    assert wrong_direction(PACKAGE) == []


def test_only_comm_calls_collectives() -> None:
    assert own_collectives(PACKAGE) == []


def test_no_import_inside_a_function() -> None:
    assert late_imports(PACKAGE) == []


def test_no_import_cycle() -> None:
    assert import_cycle(PACKAGE) == []


def test_importing_the_package_is_light() -> None:
    """Neither Triton nor CUDA is touched, and the compiler and DTensor, seconds of imports, come when they are used."""
    code = (
        "import sys, mezzotint, torch\n"
        "for name in ('triton', 'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.fsdp'):\n"
        "    assert name not in sys.modules, f'import mezzotint imports {name}'\n"
        "assert not torch.cuda.is_initialized(), 'import mezzotint initializes CUDA'\n"
        "print(mezzotint.__file__)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == PACKAGE / "__init__.py"


# The checks themselves, on small packages: file → text.


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "mezzotint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "mezzotint"


LOWER_ONLY = {
    "__init__.py": "from mezzotint.cli import main\nfrom mezzotint.constants import A",
    "constants.py": "import torch",
    "hw.py": "from mezzotint.constants import A\ndef f():\n    import triton",
    "kernels/__init__.py": "",
    "kernels/_lib.py": "import importlib\nfrom .. import hw\ndef f():\n    importlib.import_module('x')",
    "kernels/mxfp8.py": "from mezzotint import constants\nfrom ._lib import leaf\nfrom . import _lib",
    "kernels/triton/__init__.py": "import triton",
    "kernels/triton/mxfp8.py": "from ... import constants\nfrom mezzotint.kernels import mxfp8",
    "cli/__init__.py": "import mezzotint.kernels.mxfp8 as k",
}


def test_checks_accept_imports_of_lower_rows(tmp_path: Path) -> None:
    package = write_package(tmp_path, LOWER_ONLY)
    assert wrong_direction(package) == late_imports(package) == import_cycle(package) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("constants.py", "from mezzotint.hw import capability"),
        ("constants.py", "from mezzotint import hw"),
        ("constants.py", "import mezzotint.kernels.mxfp8"),
        ("kernels/mxfp8.py", "from mezzotint.cli import main"),
        ("kernels/mxfp8.py", "from ..cli import main"),
        ("kernels/triton/mxfp8.py", "from ... import cli"),
        ("kernels/mxfp8.py", "if TYPE_CHECKING:\n    from mezzotint.cli import main"),
        ("kernels/_lib.py", "def f():\n    from mezzotint import cli"),
        ("kernels/mxfp8.py", "import mezzotint"),
        ("kernels/mxfp8.py", "from mezzotint import Linear"),
        ("dynamo/__init__.py", "from mezzotint import cli"),
        ("surprise.py", ""),
    ],
)
def test_checks_find_a_wrong_direction(tmp_path: Path, file: str, text: str) -> None:
    errors = wrong_direction(write_package(tmp_path, {**LOWER_ONLY, file: text}))
    assert len(errors) == 1
    assert file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in errors[0]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "import torch.distributed as dist\nf = dist.barrier",
        "from torch import distributed\nf = distributed.broadcast",
        "from torch.distributed import all_gather_object",
        "import torch.distributed\nfrom torch.distributed import _functional_collectives as functional",
    ],
)
def test_checks_find_a_collective(tmp_path: Path, text: str) -> None:
    files = {**LOWER_ONLY, "comm/collectives.py": text, "kernels/mxfp8.py": text}
    (error,) = own_collectives(write_package(tmp_path, files))
    assert error.startswith("mezzotint.kernels.mxfp8, line ")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import math",
        "async def f():\n    from mezzotint import constants",
        "class A:\n    def f(self):\n        if True:\n            import math",
        "import importlib\nm = importlib.import_module('math')",
        "m = __import__('math')",
    ],
)
def test_checks_find_a_late_import(tmp_path: Path, text: str) -> None:
    assert len(late_imports(write_package(tmp_path, {**LOWER_ONLY, "kernels/mxfp8.py": text}))) == 1


def test_checks_find_a_cycle(tmp_path: Path) -> None:
    files = {"kernels/a.py": "from . import b", "kernels/b.py": "from mezzotint.kernels.a import x"}
    assert {"mezzotint.kernels.a", "mezzotint.kernels.b"} == set(import_cycle(write_package(tmp_path, files)))


def test_checks_refuse_an_empty_package(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no Python file"):
        find_modules(tmp_path)
