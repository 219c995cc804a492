"""`python -m dev.compatibility [--write docs/compatibility.md]` compares our public surface with Transformer Engine's.

Transformer Engine's names, parameters and defaults are those of `mezzotint/as_transformer_engine/names.json`; ours are
what its paths give. A name can be missing, or take other parameters, or other defaults; `dev/compatibility.toml` and
`absent.toml` have the reasons, and `tests/compat/test_surface.py` fails if there is none. Which of Transformer Engine's
tests do not pass here, and why, is in `dev/upstream_tests.toml`.
"""

import argparse
import ast
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mezzotint
from mezzotint.as_transformer_engine import absent
from mezzotint.as_transformer_engine.modules import FACTS, counterpart, is_absent, upstream_names
from mezzotint.as_transformer_engine.paths import PATHS, VERSION

REASONS = Path(__file__).with_name("compatibility.toml")
TESTS = Path(__file__).with_name("upstream_tests.toml")
PREFIX = "transformer_engine.pytorch."


@dataclass(frozen=True)
class Difference:
    """A `Difference` is a parameter or a member that Transformer Engine has and we lack, or the other
    way round, or another default."""

    name: str  # path of the name, with the member of a class behind it
    kind: str  # "missing member", "missing parameter", "extra parameter", "other default", "other order"
    what: str  # the parameter or member, with the defaults where they differ

    @property
    def path(self) -> str:
        """Return the text that the patterns of reasons match."""
        return f"{self.name} {self.kind} {self.what}"


# Signatures


def parameters_of(text: str) -> dict[str, str | None]:
    """Return the parameters of a signature as it was written down, with their defaults, None for one without."""
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
    found = dict(zip([each.arg for each in plain], defaults, strict=True))
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return found | {each.arg: None if default is None else ast.unparse(default) for each, default in named}


def signature_of(value: Any) -> inspect.Signature | None:
    """Return the signature of a function or class of ours, or None if it takes anything."""
    try:
        made = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    takes_all = [each for each in made.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    return None if takes_all else made


def spelled(default: Any) -> str:
    """Return a default as the facts spell it."""
    if isinstance(default, type) or inspect.isfunction(default):
        return default.__name__
    return str(default) if type(default).__module__ == "torch" else repr(default)


def same_default(theirs: str, ours: Any) -> bool:
    """Return whether a default is the same; one that is no literal counts as the same if only its spelling differs."""
    if theirs.startswith("torch."):
        return getattr(torch, theirs.removeprefix("torch."), None) == ours
    try:
        return ast.literal_eval(theirs) == ours
    except (ValueError, SyntaxError, TypeError):
        last = theirs.split(".")[-1].split("(")[0]
        return last in spelled(ours) or "getenv" in theirs or theirs == "field(default=None)"


def compare_signatures(name: str, text: str, value: Any, *, is_method: bool) -> Iterator[Difference]:
    """Yield how the parameters of ours differ."""
    made = signature_of(value)
    if made is None or text == "(*args)":
        return
    ours = {key: each for key, each in made.parameters.items() if each.kind is not inspect.Parameter.VAR_POSITIONAL}
    if is_method:
        ours = {key: each for key, each in ours.items() if key not in ("self", "cls")}
    theirs = parameters_of(text)
    takes_positions = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in made.parameters.values())
    for key, default in theirs.items():
        if key not in ours:
            if not takes_positions:
                yield Difference(name, "missing parameter", key)
        elif default not in (None, "required") and ours[key].default is inspect.Parameter.empty:
            yield Difference(name, "other default", f"{key}: {default}, here none")
        elif default not in (None, "required") and not same_default(default, ours[key].default):
            yield Difference(name, "other default", f"{key}: {default}, here {spelled(ours[key].default)}")
    for key, each in ours.items():
        if key not in theirs and "*args" not in text and each.default is inspect.Parameter.empty:
            yield Difference(name, "extra parameter", key)
    common = [key for key in theirs if key in ours]
    if common != [key for key in ours if key in theirs] and not takes_positions:
        yield Difference(name, "other order", ", ".join(common))


def compare(path: str, name: str, facts: Any) -> Iterator[Difference]:
    """Yield how a name of ours differs from Transformer Engine's."""
    value, full = counterpart(path, name), f"{path}.{name}"
    if isinstance(facts, str):
        if facts.startswith("("):
            yield from compare_signatures(full, facts, value, is_method=False)
        return
    for member, text in facts.items():
        if member == "()":
            yield from compare_signatures(full, text, value, is_method=False)
        elif not hasattr(value, member):
            if not _is_field(value, member):
                yield Difference(full, "missing member", member)
        elif text.startswith("("):
            given = inspect.getattr_static(value, member)
            is_bound = isinstance(given, staticmethod | classmethod)
            yield from compare_signatures(f"{full}.{member}", text, getattr(value, member), is_method=not is_bound)


def _is_field(value: Any, member: str) -> bool:
    """Return whether instances have a member that the class has not: annotated, or a parameter of its constructor."""
    kinds = value.__mro__ if inspect.isclass(value) else ()
    made = signature_of(value)
    return any(member in vars(kind).get("__annotations__", {}) for kind in kinds) or (
        made is not None and member in made.parameters
    )


@cache
def differences() -> list[Difference]:
    """Return all differences of names that are defined where they are listed and that we have."""
    return [
        found
        for path, names in upstream_names().items()
        if path in PATHS
        for name, facts in names.items()
        if not _is_elsewhere(facts) and not is_absent(path, name)
        for found in compare(path, name, facts)
    ]


def missing() -> list[str]:
    """Return the names of importable modules that we lack, once each, where they are defined."""
    return [
        f"{path}.{name}"
        for path, names in upstream_names().items()
        if path in PATHS
        for name, facts in names.items()
        if not _is_elsewhere(facts) and is_absent(path, name)
    ]


def unreachable() -> list[str]:
    """Return the modules that cannot be imported."""
    return [path for path in upstream_names() if path not in PATHS]


def extra() -> list[str]:
    """Return our public names that Transformer Engine's top level has not."""
    theirs = set(upstream_names()["transformer_engine.pytorch"])
    return [name for name in mezzotint.__all__ if name not in theirs]


# Reasons


@cache
def reasons() -> dict[str, dict[str, str]]:
    """Return the reasons of differences, extra names and unreachable modules by pattern."""
    return tomllib.loads(REASONS.read_text(encoding="utf-8"))


def reason_of(kind: str, text: str) -> str | None:
    """Return the first reason whose pattern matches."""
    return next((why for pattern, why in reasons()[kind].items() if fnmatchcase(text, pattern)), None)


def failing_tests() -> list[tuple[str, str]]:
    """Return Transformer Engine's tests that do not pass here, each with the reason."""
    found = tomllib.loads(TESTS.read_text(encoding="utf-8"))
    return [(f"{file}::{name}", why) for why, files in found.items() for file, names in files.items() for name in names]


# The page


def short(path: str) -> str:
    """Return a path without the package that nearly all of them begin with."""
    return path.removeprefix(PREFIX)


def grouped(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return names by reason, in the order of the reasons."""
    found: dict[str, list[str]] = {}
    for name, why in pairs:
        found.setdefault(why, []).append(name)
    return found


def listed(pairs: list[tuple[str, str]]) -> list[str]:
    """Return lines: each reason, and the names that it applies to."""
    lines = []
    for why, names in grouped(pairs).items():
        lines += [f"- {why}", "  " + ", ".join(f"`{name}`" for name in names)]
    return lines


def page() -> str:
    """Return docs/compatibility.md."""
    lacking, different, lost = missing(), differences(), _unreachable_names()
    total = sum(not _is_elsewhere(facts) for names in upstream_names().values() for facts in names.values())
    changed = [
        (f"{short(each.name)}: {each.kind} {each.what}", reason_of("different", each.path) or "?") for each in different
    ]
    facts = FACTS.relative_to(Path(__file__).resolve().parents[1])
    lines = [
        "# Every name of Transformer Engine",
        "",
        "Written by `python -m dev.compatibility --write docs/compatibility.md`; do not edit. The names, parameters",
        f"and defaults are those of Transformer Engine {VERSION}, as `{facts}` has them.",
        "Paths are below `transformer_engine.pytorch` unless they begin otherwise.",
        "",
        f"Of {total} names that its modules define, {total - len(lacking) - lost} are here, {len(lacking)} can be",
        f"imported and raise when they are used, and {lost} are in modules that cannot be imported. Of those that",
        f"are here, {len(different)} parameters, defaults and members differ.",
    ]
    sections = {
        "Missing names": [(short(each), absent.reason(each)) for each in lacking],
        "Modules that cannot be imported": [(short(e), reason_of("unreachable", e) or "?") for e in unreachable()],
        "Other parameters, defaults and members": changed,
        "Names that only Mezzotint has": [(each, reason_of("extra", each) or "?") for each in extra()],
        "Upstream's tests that do not pass": failing_tests(),
    }
    for title, pairs in sections.items():
        lines += ["", f"## {title}", "", *listed(pairs)]
    return "\n".join(lines) + "\n"


def _is_elsewhere(facts: Any) -> bool:
    """Return whether a name is defined in another module."""
    return isinstance(facts, str) and facts.startswith("= ")


def _unreachable_names() -> int:
    return sum(len(upstream_names()[path]) for path in unreachable())


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path)
    path = parser.parse_args().write
    if path is None:
        print(page())
    else:
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
