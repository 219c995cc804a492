"""Train a Hugging Face model in MXFP8: it is built from a configuration (nothing is
downloaded), converted, and trained.

    python examples/convert_huggingface.py [backend of torch.compile] [steps]

The model learns the bytes of this file, once as it is, in BF16, and once converted.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import mezzotint as mz
from mezzotint import recipe

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers: pip install transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)


def train(model: Any, backend: str, num_steps: int) -> list[float]:
    """Return the losses of the steps, in nats a byte."""
    data = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    call = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(num_steps):
        batch = data[step * 64 :][: 4 * 128].view(4, 128)
        loss = call(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(backend: str = "inductor", steps: str = "10") -> None:
    plain = train(make_model(), backend, int(steps))

    model = make_model()
    mz.convert(model, recipe.MXFP8BlockScaling())
    print(mz.convert_report(model))
    converted = train(model, backend, int(steps))
    for step, losses in enumerate(zip(plain, converted, strict=True)):
        print("step {}: loss {:.3f} in BF16, {:.3f} in MXFP8".format(step, *losses))

    mz.unconvert(model)  # a plain Llama again, with what it learnt: `model.save_pretrained(...)`
    make_model().load_state_dict(model.state_dict())


if __name__ == "__main__":
    main(*sys.argv[1:])
