"""Hugging Face's Trainer with converted models, and peft on Mezzotint's modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mezzotint as mz

RECIPES = {
    "delayed": mz.recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": mz.recipe.Float8CurrentScaling(),
    "blockwise": mz.recipe.Float8BlockScaling(),
    "mxfp8": mz.recipe.MXFP8BlockScaling(),
    "nvfp4": mz.recipe.NVFP4BlockScaling(),
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=4, **sizes)).to(torch.bfloat16)


def rows() -> list[dict[str, torch.Tensor]]:
    """Four rows, three times."""
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(2)).repeat(3, 1)
    return [{"input_ids": row, "labels": row} for row in tokens]


def fit(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Train for three steps of four rows by Hugging Face's Trainer; return the losses."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def bf16_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return fit(llama(), tmp_path_factory.mktemp("bf16"))


@pytest.mark.parametrize("name", RECIPES)
def test_trainer(name: str, tmp_path: Path, bf16_losses: list[float]) -> None:
    """The losses fall, are those of the same model trained again, and are not BF16's."""
    losses = [fit(mz.convert(llama(), RECIPES[name]), tmp_path) for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] != bf16_losses
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_gradient_checkpointing(name: str, tmp_path: Path) -> None:
    """As without it."""
    once, again = [
        fit(mz.convert(llama(), RECIPES[name]), tmp_path, gradient_checkpointing=is_on) for is_on in (False, True)
    ]
    assert once == again


def test_a_saved_model_is_read_as_the_original(tmp_path: Path) -> None:
    model = mz.convert(llama(), RECIPES["mxfp8"])
    fit(model, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = mz.Linear(32, 64, params_dtype=torch.bfloat16, device="cpu")
        self.down = mz.Linear(64, 32, params_dtype=torch.bfloat16, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("name", RECIPES)
def test_lora(name: str) -> None:
    """peft finds `mz.Linear` by itself; only its own matrices are trained, and merging them gives the same model."""
    torch.manual_seed(1)
    model = get_peft_model(Mlp(), LoraConfig(r=16, target_modules=["up", "down"]))
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4
    assert all("lora_" in key for key in trained)
    x = torch.randn(16, 32).to(torch.bfloat16)
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5), []
    for _ in range(4):
        with mz.autocast(recipe=RECIPES[name]):
            y = model(x)
        loss = (y.float() - x.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_lora_without_the_alias() -> None:
    """peft's own way to name a class that it does not know: no module of another name is needed."""
    config = LoraConfig(r=16, target_modules=["up", "down"])
    config._register_custom_module({mz.Linear: lora.Linear})
    model = get_peft_model(Mlp(), config)
    assert type(model.base_model.model.up) is lora.Linear
    x = torch.randn(16, 32).to(torch.bfloat16)
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        y = model(x)
    y.float().square().mean().backward()
    assert all((parameter.grad is not None) == ("lora_" in name) for name, parameter in model.named_parameters())


def test_lora_on_a_converted_model(tmp_path: Path) -> None:
    """A converted linear is still an `nn.Linear`: peft takes it as one, and the Trainer trains its matrices."""
    model = get_peft_model(mz.convert(llama(), RECIPES["mxfp8"]), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    assert isinstance(model.base_model.model.model.layers[0].self_attn.q_proj, lora.LoraLayer)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fit(model, tmp_path)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
