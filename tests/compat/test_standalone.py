"""Exported programs that need nothing of this package: another process loads them, with PyTorch alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mezzotint as mz
from mezzotint.dynamo import decompositions, keep_bits
from tests.recipes import EVERY_RECIPE

WIDTH = 96  # three blocks of 32, and no whole one of 128
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
MAKE: dict[str, Any] = {
    "linear": lambda: mz.Linear(WIDTH, WIDTH, **OPTIONS),
    "layernorm_mlp": lambda: mz.LayerNormMLP(WIDTH, WIDTH, **OPTIONS),
    "layer": lambda: mz.TransformerLayer(
        WIDTH, WIDTH, 3, attn_input_format="bshd", normalization="RMSNorm", activation="swiglu", **OPTIONS
    ),
}
# Every recipe, and each larger module once: they take long to export, and longer to compile as C++.
LARGER = {"mxfp8": "layer", "delayed": "layernorm_mlp"}
PAIRS = [(LARGER.get(recipe, "linear"), recipe) for recipe in EVERY_RECIPE]
QUICK = [("layernorm_mlp", "nvfp4")]
# The scales of delayed scaling are views of one buffer, of which PyTorch warns when it saves them.
pytestmark = pytest.mark.filterwarnings("ignore:No complete tensor found in the group")


class Region(nn.Module):
    def __init__(self, module: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.module, self.recipe = module, recipe

    def forward(self, x: torch.Tensor) -> Any:
        with mz.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x)


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 5, WIDTH, generator=torch.Generator().manual_seed(size)).bfloat16()


def make(name: str, recipe: str, is_quantized: bool = False) -> Region:
    torch.manual_seed(0)
    with mz.quantized_model_init(is_quantized, EVERY_RECIPE[recipe]):
        return Region(MAKE[name]().eval(), EVERY_RECIPE[recipe])


def program_of(model: nn.Module) -> torch.export.ExportedProgram:
    """For any batch, without operators of ours."""
    with torch.no_grad():
        program = torch.export.export(model, (batch(2),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    program = program.run_decompositions(decompositions())
    assert "mezzotint" not in str(program.graph)
    return program


def write_results(model: nn.Module, file: Path) -> None:
    with torch.no_grad():
        torch.save([((batch(size),), model(batch(size))) for size in (3, 26)], file)


def load_elsewhere(folder: Path) -> list[str]:
    """The names of the files that a process without this package ran, with the bits of the models."""
    script = Path(__file__).with_name("standalone.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, script, folder], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.compile
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([pair for pair in PAIRS if pair not in QUICK], marks=pytest.mark.slow),
    ],
)
def test_saved_programs(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    for name, recipe in pairs:
        model = make(name, recipe)
        torch.export.save(program_of(model), tmp_path / f"{name}-{recipe}.export.pt2")
        write_results(model, tmp_path / f"{name}-{recipe}.pt")
    assert len(load_elsewhere(tmp_path)) == len(pairs)


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["block", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_quantized_parameters(recipe: str, tmp_path: Path) -> None:
    """The program holds their codes and scales as plain tensors, and no copy in high precision."""
    model = make("linear", recipe, is_quantized=True).requires_grad_(False)
    program = program_of(model)
    assert all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in program.state_dict.values())
    assert not [
        tensor for tensor in program.state_dict.values() if tensor.dtype == torch.bfloat16 and tensor.dim() == 2
    ]
    torch.export.save(program, tmp_path / "linear.export.pt2")
    write_results(model, tmp_path / "linear.pt")
    assert load_elsewhere(tmp_path) == ["linear.export.pt2"]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_packages_of_aotinductor(name: str, recipe: str, tmp_path: Path) -> None:
    model = make(name, recipe)
    program = program_of(model)
    options = {**keep_bits(program), "aot_inductor.compile_wrapper_opt_level": "O0"}  # the compiler is quicker
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.aoti.pt2"), inductor_configs=options
        )
    write_results(model, tmp_path / "model.pt")
    assert load_elsewhere(tmp_path) == ["model.aoti.pt2"]
