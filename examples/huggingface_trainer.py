"""Train a Hugging Face model in MXFP8 with transformers' own Trainer: compiled, with gradient
checkpointing, interrupted, resumed, saved, and read again. Nothing is downloaded.

    python examples/huggingface_trainer.py [backend of torch.compile] [folder]

The model learns the bytes of this file. The run that is interrupted after six of twelve steps
ends with the losses of the one that is not, bit for bit.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mezzotint as mz
from mezzotint import recipe

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install transformers accelerate")

STEPS, SEQUENCE = 12, 64


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    # In this dtype from the start: `.to(torch.bfloat16)` would round the angles of positions too.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return mz.convert(model, recipe.MXFP8BlockScaling())


def make_rows() -> list[dict[str, torch.Tensor]]:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(folder: Path, backend: str) -> Trainer:
    """Return a trainer of a new model, which writes a checkpoint after half of the steps."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        gradient_checkpointing=True,
        torch_compile=True,
        torch_compile_backend=backend,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    return Trainer(make_model(), arguments, train_dataset=make_rows())


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(backend: str, folder: Path) -> None:
    whole = make_trainer(folder, backend)
    whole.train()
    resumed = make_trainer(folder, backend)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    for step, (first, second) in enumerate(zip(losses_of(whole), losses_of(resumed), strict=True), 1):
        print(f"step {step:2d}: loss {first:.4f}, {second:.4f} in the run that is resumed")
    assert losses_of(whole) == losses_of(resumed)

    whole.save_model(str(folder / "saved"))  # `save_pretrained`: the files of a Llama, for anyone who reads one
    read = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.bfloat16)
    mz.convert(read, recipe.MXFP8BlockScaling())
    ids = torch.tensor([list(b"Train a Hugging Face model")], device=whole.model.device)
    with torch.no_grad():
        same = torch.equal(read.to(ids.device)(ids).logits, whole.model.eval()(ids).logits)
    print(f"read again, by from_pretrained: the same logits: {same}")


if __name__ == "__main__":
    given = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()
    main(sys.argv[1] if len(sys.argv) > 1 else "inductor", Path(given))
