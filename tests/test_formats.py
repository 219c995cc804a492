"""The registry of formats: what a record may be, and that nothing in the package but a format's own files, the recipes
and the public names knows a format by name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mezzotint.formats import FORMATS, HIGH, KINDS, Backend, OperandKind, QuantizedFormat, format_of, register_format
from mezzotint.recipe import RECIPES, QuantizerRole
from tests import formats, operands, quantizer_formats
from tests.recipes import BOUNDS, EVERY_RECIPE

PACKAGE = Path(__file__).resolve().parents[1] / "mezzotint"

# Files that name every format: where recipes and public names are.
NAMED_IN = ("recipe", "recipe_names.py", "custom_recipes", "api.py", "as_transformer_engine", "compat")
# Others that name one, by the reason. A format that is added is in none of them.
ALLOWED: dict[str, tuple[str, ...]] = {
    "upstream's questions about single formats, and the default recipe": ("availability.py", "quantization.py"),
    "the recipes that `compare` runs unless told": ("cli/app.py",),
    "block sizes that kernels and tensors share": ("constants.py",),
    "delayed scaling keeps scales and amaxes, and there is one format that takes them": (
        "layer/base.py",
        "layer/boundary.py",
        "layer/weights.py",
        "module/base.py",
    ),
    "keeps the input of an activation in FP8 where asked": ("functional/activation.py", "ops/basic/activation.py"),
    "keeps keys and values in FP8 where asked": ("attention/kv_codes.py",),
    "formats that models are published in, each with what trains in it": ("serving/schemes.py",),
    "upstream's FP8 Adam writes codes by given scales": ("optimizers/multi_tensor.py",),
}
ELEMENT_TYPES = re.compile(
    r"float8_?e\d\w*", re.IGNORECASE
)  # torch.float8_e4m3fn, DType.kFloat8E5M2, Triton's float8e4nv


def names_in(path: Path) -> Iterator[str]:
    """Identifiers, modules and string constants of a file; neither comments nor prose (docstrings, messages)."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings among them
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ImportFrom(module=str(name)):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if " " not in text and id(node) not in statements:
                yield text


def formats_named_in(path: Path) -> set[str]:
    words = {ELEMENT_TYPES.sub("", name).lower().replace("_", "") for name in names_in(path)}
    return {name for name in FORMATS if any(name.replace("_", "") in word for word in words)}


def is_own_file(path: Path) -> bool:
    """`kernels/<format>.py` and what goes with it: `triton/nvfp4_amax.py`, `triton/_jit_nvfp4.py`."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return folder in ("kernels", "kernels/triton", "tensor") and any(name in path.stem for name in FORMATS)


def naming_files() -> dict[str, set[str]]:
    """File → formats that it names, for all but those that may."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        if not is_own_file(path) and relative.split("/")[0] not in NAMED_IN and (named := formats_named_in(path)):
            found[relative] = named
    return found


def test_no_other_file_names_a_format() -> None:
    allowed = {file for files in ALLOWED.values() for file in files}
    found = naming_files()
    assert {file: named for file, named in found.items() if file not in allowed} == {}
    assert allowed == found.keys(), "these name no format any more: take them out of ALLOWED"


def test_the_check_sees_names(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for text in ("from mezzotint.tensor.mxfp8 import a", "x = MXFP8Quantizer", "x = {'mxfp8': 1}", "f(is_mxfp8=1)"):
        file.write_text(text, encoding="utf-8")
        assert formats_named_in(file) == {"mxfp8"}, text
    file.write_text(
        '"""MXFP8."""\nraise ValueError("give MXFP8 or so")  # MXFP8\nx = torch.float8_e4m3fn', encoding="utf-8"
    )
    assert formats_named_in(file) == set()


# Every format has what the tests run over.


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_test_data(name: str) -> None:
    """A table that lacks one says so here, not by silence."""
    assert name in formats.FORMATS, "tests/formats.py: add its op to VARIANTS"
    kinds = {kind.name for kind in FORMATS[name].kinds}
    assert kinds <= operands.DATA.keys(), "tests/operands.py: add its kinds to DATA"
    x = torch.randn(64, 64)
    made = [case.quantize(x, columnwise=False).gemm_operand(False).kind for case in quantizer_formats.FORMATS.values()]
    assert kinds <= set(made), "tests/quantizer_formats.py: add its quantizer to FORMATS"


def test_a_recipe_has_test_data() -> None:
    assert EVERY_RECIPE.keys() == BOUNDS.keys(), "tests/recipes.py: add its bound to BOUNDS"


def test_a_recipe_reaches_every_format() -> None:
    used: set[str] = set()
    for kind in RECIPES.values():
        recipe = kind()
        for role in ("input", "weight", "grad_output"):
            asked = recipe.quantizer(QuantizerRole("linear", role))
            if hasattr(asked, "quantize"):
                used.add(asked.quantize(torch.randn(64, 64)).gemm_operand(False).kind)
    assert {format_of(kind).name for kind in used} == FORMATS.keys()  # type: ignore[union-attr]


# Records.


def _kind(name: str) -> OperandKind:
    return OperandKind(
        name=name,
        elements=(7,),
        scale_shape=lambda rows, size, transposed: (1,),
        dequantize=lambda op, size, dtype: op.data.to(dtype),
    )


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (QuantizedFormat(name="mxfp8", title="", kinds=(), products=()), "'mxfp8' is registered already"),
        (QuantizedFormat(name="new", title="", kinds=(_kind("mx"),), products=()), "a kind 'mx', which is taken"),
        (QuantizedFormat(name="new", title="", kinds=(_kind(HIGH),), products=()), "a kind 'high', which is taken"),
        (
            QuantizedFormat(name="new", title="", kinds=(_kind("n"),), products=(("n", "mx"),)),
            r"new multiplies \('n', 'mx'\)",
        ),
        (
            QuantizedFormat(
                name="new",
                title="",
                kinds=(_kind("n"),),
                products=(("n", "n"),),
                backends=(Backend(kind_a="mx", kind_b="n", cc=((9, 0), (10, 0)), name="x", why="why"),),
            ),
            r"new multiplies \('mx', 'n'\): its own kinds are \['n'\]",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(record: QuantizedFormat, why: str) -> None:
    before = dict(FORMATS), dict(KINDS)
    with pytest.raises(ValueError, match=why):
        register_format(record)
    assert before == (FORMATS, KINDS)


def test_format_of() -> None:
    assert format_of(HIGH) is None
    assert all(format_of(kind.name) is made for made in FORMATS.values() for kind in made.kinds)
