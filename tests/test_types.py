"""Annotations of what users call. `make check` has mypy read `tests/typed.py`, a program of a user's."""

import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import mezzotint as mz
from mezzotint import ops

ROOT = Path(__file__).resolve().parents[1]
MODULES = [cls for cls in vars(mz).values() if isinstance(cls, type) and issubclass(cls, torch.nn.Module)]


@pytest.mark.parametrize("cls", [*MODULES, ops.Sequential, ops.Linear, ops.GELU], ids=lambda cls: cls.__name__)
def test_forward_says_what_it_returns(cls: type) -> None:
    assert get_type_hints(cls.forward)["return"] is not Any  # type: ignore[attr-defined]


def test_there_are_modules() -> None:
    assert {mz.Linear, mz.LayerNormMLP, mz.GroupedLinear, mz.TransformerLayer, mz.MultiheadAttention} <= set(MODULES)


@pytest.mark.parametrize("name", ["quantize", "__call__", "make_empty"])
def test_a_quantizer_makes_quantized_tensors(name: str) -> None:
    hints = get_type_hints(getattr(mz.Quantizer, name), localns={"QuantizedTensor": mz.QuantizedTensor})
    assert hints["return"] is mz.QuantizedTensor


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (mz.Linear, "weight"),
        (mz.LayerNormLinear, "layer_norm_weight weight"),
        (mz.LayerNormMLP, "layer_norm_weight fc1_weight fc2_weight"),
        (mz.LayerNorm, "weight"),
        (mz.RMSNorm, "weight"),
        (ops.BasicLinear, "weight"),
    ],
)
def test_parameters(cls: type, names: str) -> None:
    """Not what `nn.Module` says of an attribute that it does not know: a tensor or a module."""
    hints = get_type_hints(cls)
    assert all(hints[name] is torch.nn.Parameter for name in names.split())


def test_make_check_reads_a_users_program() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert "tests/typed.py" in tomllib.load(file)["tool"]["mypy"]["files"]
    assert "assert_type(linear(x), " in (ROOT / "tests/typed.py").read_text(encoding="utf-8")
