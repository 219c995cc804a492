"""A Llama of Hugging Face, built from a configuration: converted, trained, compiled, saved."""

import copy
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mezzotint as mz
from tests.recipes import RECIPES

transformers = pytest.importorskip("transformers")

EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "convert_huggingface.py")
LAYERS, LINEARS = 2, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Norm of the difference of logits over their norm. Seen: 0.036 to 0.042 in FP8, 0.13 in NVFP4.
BOUNDS = {"delayed": 0.1, "current": 0.1, "mxfp8": 0.1, "nvfp4": 0.3}


def llama(layers: int = LAYERS, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        **options,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def train(model: Any, call: Any, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(num_steps):
        loss = call(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_converted(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    keys = model.state_dict().keys()
    report = mz.convert_report(mz.convert(model, RECIPES["mxfp8"]))
    assert {entry.fqn.rpartition(".")[2] for entry in report.converted} == set(LINEARS)
    assert len(report.converted) == LAYERS * len(LINEARS)
    assert [entry.fqn for entry in report.kept] == ["lm_head"]
    assert ("an embedding's" in report.kept[0].why) == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.state_dict().keys() == keys
    llama(tie_word_embeddings=tied).load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("recipe", BOUNDS)
def test_near_the_original(recipe: str) -> None:
    original = llama()
    model = mz.convert(original, RECIPES[recipe], inplace=False)
    with torch.no_grad():
        expected = original(tokens()).logits.float()
        error = (model(tokens()).logits.float() - expected).norm() / expected.norm()
        assert 0 < error < BOUNDS[recipe]
        assert torch.equal(mz.unconvert(model)(tokens()).logits.float(), expected)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_training(recipe: str) -> None:
    model = mz.convert(llama(layers=1), RECIPES[recipe])
    losses = train(model, model, 10)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.compile
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled(checkpointed: bool) -> None:
    """One whole graph, also where layers are recomputed."""
    model = mz.convert(llama(layers=1), RECIPES["mxfp8"])
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    counters.clear()
    losses = train(model, torch.compile(model, fullgraph=True, backend=counter), 2)
    assert losses == train(eager, eager, 2)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


def test_what_the_library_does_with_models(tmp_path: Path) -> None:
    original = llama()
    model = mz.convert(original, RECIPES["mxfp8"], inplace=False)
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    outputs = model(tokens(), output_hidden_states=True)
    assert len(outputs.hidden_states) == LAYERS + 1
    assert model.generate(tokens()[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 7)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded) is type(original)
    for key, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # `test_compiled` does, in less time
    runpy.run_path(EXAMPLE)["main"]("inductor", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "14 of 15 linear layers converted, 90.0% of their weights"
    assert lines[-1].startswith("step 1: loss 5.")


def test_the_example_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        runpy.run_path(EXAMPLE)
