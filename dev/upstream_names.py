"""`python -m dev.upstream_names GITDIR` writes down Transformer Engine's public names, parameters and defaults.

GITDIR is the git directory of a copy of NVIDIA/TransformerEngine. Only facts are taken from it: which module defines
which name, what its parameters are called, and what their defaults are. They go into `names.json` of
`mezzotint/as_transformer_engine`, where the aliases read which names Transformer Engine has and Mezzotint lacks, and
`tests/compat/test_surface.py` compares the rest.

A name of a module is one of these: "(a, b=1)" for a function; {"()": "(a, b=1)", "method": "(…)", "x":
"value"} for a class, with its constructor under "()" if it has one of its own; "value"; or "=
other.module.name" for what is defined elsewhere.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "mezzotint/as_transformer_engine/names.json"
ROOTS = (
    "transformer_engine/pytorch/",
    "transformer_engine/common/recipe/",
    "transformer_engine/debug/pytorch/debug_state",
)
# These files hold no public names: build scripts, kernels, a former implementation, references of upstream's own tests.
LEFT_OUT = re.compile(r"/(setup|cpu_offload_v1|onnx_extensions|reference_\w+)\.py$|/triton/|/csrc/")
# Besides __init__.py, these files exist to pass on names of other files.
GIVES_IMPORTS = re.compile(r"/__init__\.py$|/pytorch/(fp8|float8_tensor)\.py$")
BINDINGS = "transformer_engine/pytorch/csrc/extensions/pybind.cpp"
COMMON_BINDINGS = "transformer_engine/common/util/pybind_helper.h"
EXTENSION = "transformer_engine_torch"

Names = dict[str, Any]


def git(directory: str, *command: str) -> str:
    """Return what a git command prints."""
    run = subprocess.run(["git", "-C", directory, *command], capture_output=True, text=True, check=True)
    return run.stdout


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_bound: bool) -> str:
    """Return the parameters with their defaults and without types; if `is_bound`, without the first."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    parts = [_parameter(arg.arg, default) for arg, default in zip(plain, defaults, strict=True)][is_bound:]
    if given.vararg:
        parts.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(arg.arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append(f"**{given.kwarg.arg}")
    return f"({', '.join(parts)})"


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    return " ".join(ast.unparse(each) for each in node.decorator_list)


def class_members(node: ast.ClassDef) -> Names:
    """Return the public members of a class, with its constructor, or its fields if it is a dataclass, under "()"."""
    members: Names = {}
    is_dataclass = "dataclass" in _decorators(node)
    fields = []
    for each in node.body:
        match each:
            case ast.FunctionDef(name="__init__"):
                members["()"] = signature(each, is_bound=True)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _is_public(name):
                how = _decorators(each)
                if "property" in how or ".setter" in how:
                    members[name] = "value"
                elif "overload" not in how:
                    members[name] = signature(each, is_bound="staticmethod" not in how)
            case ast.AnnAssign(target=ast.Name(id=name), value=default):
                if is_dataclass and "ClassVar" not in ast.unparse(each.annotation):
                    fields.append(_parameter(name, default))
                if _is_public(name):
                    members[name] = "value"
            case ast.Assign(targets=targets):
                found = [target.id for target in targets if isinstance(target, ast.Name)]
                members |= dict.fromkeys(filter(_is_public, found), "value")
    if is_dataclass and fields and "()" not in members:
        members["()"] = f"({', '.join(fields)})"
    return members


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
            yield from _statements([each for handler in getattr(node, "handlers", []) for each in handler.body])


def module_names(path: str, text: str) -> Names:
    """Return the public names of one file."""
    names: Names = {}
    module = module_of(path)
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in _statements(ast.parse(text).body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _is_public(name):
                names[name] = signature(node, is_bound=False)
            case ast.ClassDef(name=name) if _is_public(name):
                names[name] = class_members(node)
            case ast.AnnAssign(target=ast.Name(id=name)) if _is_public(name):
                names.setdefault(name, "value")
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name) and _is_public(target.id):
                        names.setdefault(target.id, "value")
            case ast.ImportFrom(module=source, names=imported, level=level) if GIVES_IMPORTS.search(path):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([source] if source else [])])
                if base.startswith("transformer_engine"):
                    for alias in imported:
                        if alias.name == "*" or _is_public(alias.asname or alias.name):
                            key = f"* {base}" if alias.name == "*" else alias.asname or alias.name
                            names[key] = f"= {base}.{alias.name}"
    return names


def module_of(path: str) -> str:
    """Return the dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def expand_stars(modules: dict[str, Names]) -> None:
    """Replace each `import *` by the names behind it."""
    for names in modules.values():
        for key in [key for key in names if key.startswith("* ")]:
            base = names.pop(key).removeprefix("= ").removesuffix(".*")
            for name in modules.get(base, {}):
                names.setdefault(name, f"= {base}.{name}")


def binding_names(text: str) -> Names:
    """Return the functions, enums and classes that the C++ extension gives to Python."""
    text = re.sub(r"\\\n", "\n", text)
    names: Names = {}
    for match in re.finditer(r'\bm\.def\(\s*"(\w+)"', text):
        end = text.index(";", match.end())
        arguments = re.findall(
            r'py(?:bind11)?::arg\("(\w+)"\)(?:\s*=\s*([\w:.<>+-]+(?:\(\w*\))?))?', text[match.end() : end]
        )
        plain = [name + (f"={_python(default)}" if default else "") for name, default in arguments]
        names[match[1]] = f"({', '.join(plain)})" if arguments else "(*args)"
    for match in re.finditer(r'(enum_|class_)<[^;]*?>\(\s*m,\s*"(\w+)"', text):
        end = text.index(";", match.end())
        found = re.findall(r'\.(value|def)\("([a-zA-Z]\w*)"', text[match.end() : end])
        names[match[2]] = {name: "value" if kind == "value" else "(*args)" for kind, name in found}
    return names


def _python(default: str) -> str:
    """Return a default of C++ as Python writes it."""
    default = default.strip()
    plain = {"py::none()": "None", "std::nullopt": "None", "true": "True", "false": "False", "nullptr": "None"}
    default = re.sub(r"^static_cast<\w+>\((\w+)\)$", r"\1", default)
    return plain.get(default, re.sub(r"^([\d.]+)f$", r"\1", default))


def read(directory: str) -> dict[str, Any]:
    """Return version, commit and names of a copy of the repository."""
    commit = git(directory, "rev-parse", "HEAD").strip()
    files = git(directory, "ls-tree", "-r", "--name-only", commit).splitlines()
    chosen = [path for path in files if path.startswith(ROOTS) and path.endswith(".py") and not LEFT_OUT.search(path)]
    modules = {module_of(path): module_names(path, git(directory, "show", f"{commit}:{path}")) for path in chosen}
    expand_stars(modules)
    common = binding_names(git(directory, "show", f"{commit}:{COMMON_BINDINGS}"))
    modules[EXTENSION] = common | binding_names(git(directory, "show", f"{commit}:{BINDINGS}"))
    version = git(directory, "show", f"{commit}:build_tools/VERSION.txt").strip()
    return {"version": version, "commit": commit, "modules": {name: names for name, names in modules.items() if names}}


def main() -> None:
    """Write the file."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    OUT.write_text(json.dumps(read(sys.argv[1]), indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
