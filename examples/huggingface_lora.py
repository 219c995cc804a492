"""Fine-tune a model that is published in FP8: LoRA of peft beside weights that stay as they were published, byte by
byte. Nothing is downloaded: the example writes the published folder itself.

    python examples/huggingface_lora.py [folder]
"""

import filecmp
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mezzotint as mz

try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError:
    sys.exit("this example needs transformers and peft: pip install transformers peft")

STEPS, SEQUENCE = 10, 64


def publish(folder: Path) -> None:
    """Write a model in the format of DeepSeek's: E4M3, one scale per tile of 128x128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    mz.export(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), "hf-fp8", folder)


def train(model: Any) -> list[float]:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)[:8]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    publish(folder / "published")
    base = mz.load_quantized(folder / "published")
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
    model.print_trainable_parameters()
    for step, loss in enumerate(train(model), 1):
        print(f"step {step:2d}: loss {loss:.4f}")
    model.save_pretrained(folder / "adapter")  # the matrices of LoRA alone

    again = PeftModel.from_pretrained(mz.load_quantized(folder / "published"), folder / "adapter")
    ids = torch.tensor([list(b"Fine-tune a model")])
    with torch.no_grad():
        print("adapter read again: the same logits:", torch.equal(again.eval()(ids).logits, model.eval()(ids).logits))
    mz.export(again.unload(), "hf-fp8", folder / "exported")
    names = [file.name for file in (folder / "published").glob("*.safetensors")]
    _, differ, errors = filecmp.cmpfiles(folder / "published", folder / "exported", names, shallow=False)
    print("weights exported again: the same bytes:", not differ and not errors)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
