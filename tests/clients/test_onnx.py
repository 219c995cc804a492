"""ONNX of models in high precision, run by ONNX Runtime: what `docs/clients.md` says."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformer_engine.pytorch as te
from torch import nn

import mezzotint as mz

WIDTH = 32
OPTIONS: dict[str, Any] = {"params_dtype": torch.float32, "device": "cpu"}


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "layernorm_linear": te.LayerNormLinear(WIDTH, 2 * WIDTH, **OPTIONS),
        "layernorm_mlp": te.LayerNormMLP(WIDTH, 4 * WIDTH, activation="swiglu", normalization="RMSNorm", **OPTIONS),
        "layer": te.TransformerLayer(WIDTH, 4 * WIDTH, 4, **OPTIONS),
    }


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize("name", models())
def test_the_values_of_the_model(name: str, tmp_path: Path) -> None:
    """For another number of tokens than that of the export, too."""
    model, x = models()[name].eval(), torch.randn(16, 2, WIDTH)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
        program = program.run_decompositions(mz.dynamo.decompositions())
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        for given in (x, torch.randn(11, 2, WIDTH)):
            (made,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
            torch.testing.assert_close(torch.from_numpy(made), model(given), rtol=1e-5, atol=1e-5)
