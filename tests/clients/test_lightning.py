"""Lightning's precision plugin of Transformer Engine, unchanged: Fabric and the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.common.recipe as te_recipe
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.plugins import TransformerEnginePrecision as FabricPrecision
from lightning.pytorch.plugins import TransformerEnginePrecision as TrainerPrecision
from torch import nn
from torch.utils.data import DataLoader

import mezzotint as mz

RECIPES: dict[str, Any] = {
    "delayed": {"amax_history_len": 4, "amax_compute_algo": "max", "reduce_amax": False},
    "mxfp8": te_recipe.MXFP8BlockScaling(),
}
STEPS = 4


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def data() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 16, 32, generator=torch.Generator().manual_seed(2)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float()).square().mean()


def own_losses(name: str) -> list[float]:
    """The losses of the same training in our modules, with weights in BF16 as Lightning makes them."""
    model = plain().to(torch.bfloat16)
    for i, module in enumerate(model):
        if isinstance(module, nn.LayerNorm):
            model[i] = mz.LayerNorm(32, params_dtype=torch.bfloat16, device="cpu")
        elif isinstance(module, nn.Linear):
            model[i] = mz.Linear(module.in_features, module.out_features, params_dtype=torch.bfloat16, device="cpu")
    model.load_state_dict(plain().to(torch.bfloat16).state_dict())
    given = RECIPES[name]
    recipe = mz.recipe.DelayedScaling(**given) if isinstance(given, dict) else given
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x in data():
        with mz.autocast(recipe=recipe):
            loss = loss_of(model, x.to(torch.bfloat16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_fabric(name: str) -> None:
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=FabricPrecision(weights_dtype=torch.bfloat16, recipe=RECIPES[name])
    )
    model = fabric.setup_module(plain())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    kinds = [type(module) for module in model.module]
    assert kinds == [mz.LayerNorm, mz.Linear, nn.GELU, mz.Linear]
    losses = []
    for x in data():
        loss = loss_of(model, x.to(torch.bfloat16))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == own_losses(name)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()
        self.losses: list[float] = []

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.net, x.to(torch.bfloat16))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("name", RECIPES)
def test_trainer(name: str, tmp_path: Path) -> None:
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=TrainerPrecision(weights_dtype=torch.bfloat16, recipe=RECIPES[name]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data(), batch_size=None))
    assert isinstance(module.net[1], mz.Linear)
    assert module.losses == own_losses(name)
