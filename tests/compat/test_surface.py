"""Our public surface beside Transformer Engine's: what is missing, extra or different has a reason, and no more."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from dev import compatibility
from dev.upstream_names import binding_names, module_names
from mezzotint.as_transformer_engine import absent

ROOT = Path(__file__).resolve().parents[2]
# What clients import first; these lists may only become shorter by names that come.
AT_MOST = {"missing": 310, "different": 70}


def test_a_name_that_is_missing_has_a_reason() -> None:
    missing = compatibility.missing()
    unknown = [name for name in missing if not any(fnmatchcase(name, pattern) for pattern in absent.reasons())]
    assert unknown == [], "write the name, or a reason into absent.toml"
    assert len(missing) <= AT_MOST["missing"]


def test_a_difference_has_a_reason() -> None:
    found = compatibility.differences()
    assert [each.path for each in found if compatibility.reason_of("different", each.path) is None] == []
    assert len(found) <= AT_MOST["different"]


def test_what_is_extra_or_unreachable_has_a_reason() -> None:
    assert [name for name in compatibility.extra() if compatibility.reason_of("extra", name) is None] == []
    paths = compatibility.unreachable()
    assert [path for path in paths if compatibility.reason_of("unreachable", path) is None] == []


@pytest.mark.parametrize("kind", ["different", "extra", "unreachable"])
def test_a_reason_is_needed(kind: str) -> None:
    texts = {
        "different": [each.path for each in compatibility.differences()],
        "extra": compatibility.extra(),
        "unreachable": compatibility.unreachable(),
    }[kind]
    for pattern in compatibility.reasons()[kind]:
        assert [text for text in texts if fnmatchcase(text, pattern)], f"{pattern} matches nothing any more"


def test_failing_tests_are_named_once() -> None:
    tests = [test for test, _ in compatibility.failing_tests()]
    assert len(set(tests)) == len(tests)
    assert all(fnmatchcase(test, "*test_*.py::test_*") for test in tests)


def test_the_page_is_the_one_that_is_generated() -> None:
    """`make docs` writes it."""
    assert (ROOT / "docs/compatibility.md").read_text(encoding="utf-8") == compatibility.page()


# The comparison itself


def find(text: str, value: Any) -> list[tuple[str, str]]:
    return [(each.kind, each.what) for each in compatibility.compare_signatures("f", text, value, is_method=False)]


def test_signatures_are_compared() -> None:
    assert find("(a, b=1, *, c=None)", lambda a, b=1, *, c=None: None) == []
    assert find("(a, b=1)", lambda a, b=2: None) == [("other default", "b: 1, here 2")]
    assert find("(a, b=1)", lambda a, b: None) == [("other default", "b: 1, here none")]
    assert find("(a, b)", lambda a: None) == [("missing parameter", "b")]
    assert find("(a)", lambda a, b: None) == [("extra parameter", "b")]
    assert find("(a)", lambda a, b=1: None) == []  # more options are no difference
    assert find("(a, b)", lambda b, a: None) == [("other order", "a, b")]
    assert find("(a)", lambda **given: None) == []


# The facts


def test_names_of_a_file() -> None:
    text = (
        "import torch\nfrom .module import Linear\nfrom ..common import x\n_private = 1\nSIZE: int = 3\n"
        "def f(a, b=1, *args, c, d=None, **kw): ...\n"
        "@dataclass\nclass Config:\n    size: int = 3\n    name: str = ''\n"
        "class Module(Base):\n    limit = 4\n    def __init__(self, x, y=2): ...\n    def forward(self, z): ...\n"
        "    @staticmethod\n    def make(w): ...\n    @property\n    def p(self): ...\n    def _hidden(self): ...\n"
    )
    found = module_names("transformer_engine/pytorch/__init__.py", text)
    assert found == {
        "Linear": "= transformer_engine.pytorch.module.Linear",
        "x": "= transformer_engine.common.x",
        "SIZE": "value",
        "f": "(a, b=1, *args, c, d=None, **kw)",
        "Config": {"()": "(size=3, name='')", "size": "value", "name": "value"},
        "Module": {"limit": "value", "()": "(x, y=2)", "forward": "(z)", "make": "(w)", "p": "value"},
    }
    assert "Linear" not in module_names("transformer_engine/pytorch/other.py", text)


def test_names_of_the_extension() -> None:
    text = (
        'm.def("gelu", &gelu, "text", py::arg("input"), py::arg("limit") = 7.0f, py::arg("out") = py::none());\n'
        'py::enum_<DType>(m, "DType").value("kByte", 0).value("kInt32", 1);\n'
        'py::class_<Core>(m, "Core").def(py::init<>()).def("size", &Core::size);\n'
    )
    assert binding_names(text) == {
        "gelu": "(input, limit=7.0, out=None)",
        "DType": {"kByte": "value", "kInt32": "value"},
        "Core": {"size": "(*args)"},
    }
