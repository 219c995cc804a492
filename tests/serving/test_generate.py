"""`generate()` of transformers on converted and loaded models, with its caches of keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

import mezzotint as mz
from mezzotint import recipe
from tests.serving.models import make_model, tokens

# With scales of a row or of its blocks a token is quantized alike whatever else is in the batch.
BY_TOKEN = {
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
NEW = 6


def generate(model: Any, **options: Any) -> torch.Tensor:
    ids = tokens()[:, :8]
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )


def by_hand(model: Any) -> torch.Tensor:
    """The most probable token, again and again, by forwards over the whole sequence."""
    ids = tokens()[:, :8]
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", BY_TOKEN)
def test_a_converted_model(name: str) -> None:
    model = mz.convert(make_model(), BY_TOKEN[name]).eval()
    expected = by_hand(model)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, cache_implementation="static"), expected)
    assert torch.equal(generate(model, use_cache=False), expected)


@pytest.mark.parametrize("format", ["hf-fp8", "compressed-tensors-nvfp4"])
def test_a_loaded_model(format: str, tmp_path: Path) -> None:
    """The tokens are those of the model that was exported, under the same recipe."""
    used = recipe.Float8BlockScaling() if format == "hf-fp8" else recipe.NVFP4BlockScaling()
    model = make_model()
    mz.export(model, format, tmp_path / "out", recipe=used)
    loaded = mz.load_quantized(tmp_path / "out", recipe=used).eval()
    mz.convert(model.eval(), used, filter=lambda _, name: "proj" in name)
    assert torch.equal(generate(loaded), generate(model))


SLOW = pytest.mark.slow


@pytest.mark.compile
@pytest.mark.parametrize(
    ("static", "in_fp8"),
    [(True, True), (False, False), pytest.param(True, False, marks=SLOW), pytest.param(False, True, marks=SLOW)],
)
def test_one_graph_for_every_token(static: bool, in_fp8: bool) -> None:
    """One graph for the prompt and one for all tokens after it; a cache that grows costs one more, of dynamic size."""
    model = mz.convert(make_model(), BY_TOKEN["mxfp8"]).eval()
    made = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    other = DynamicCache(config=model.config)
    if in_fp8:
        made, other = mz.quantize_cache(made), mz.quantize_cache(other)
    counter = CompileCounterWithBackend("aot_eager")
    call, ids = torch.compile(model, fullgraph=True, backend=counter), tokens()[:, :8]
    with torch.no_grad():
        for _ in range(NEW):
            logits = call(ids, past_key_values=made, use_cache=True).logits[:, -1]
            assert torch.equal(logits.argmax(-1), model(ids, past_key_values=other).logits[:, -1].argmax(-1))
            ids = logits.argmax(-1)[:, None]
    assert counter.frame_count == (2 if static else 3)
