"""`mezzotint plan`: what it says without data is what a real step shows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzotint.cli.memory import LiveBytes, plan_step
from mezzotint.cli.model import LanguageModel
from mezzotint.cli.recipes import RECIPES
from mezzotint.cli.sizes import MODELS, ModelConfig, find_model
from mezzotint.quantization import autocast
from tests.cli.tools import fails, one_thread, works

Capture = pytest.CaptureFixture[str]

SMALL = ModelConfig(hidden=64, ffn=96, layers=5, heads=4, kv_heads=2, vocab=80, sequence=32, batch=2)
SHAPES = {
    "deep": SMALL,
    "one layer": replace(SMALL, layers=1),
    "two layers, tied": replace(SMALL, layers=2, tied=True),
    "no groups, wide heads": replace(SMALL, kv_heads=4, head_dim=32, layers=4),
}


def forward(model: LanguageModel, config: ModelConfig, recipe: Any) -> torch.Tensor:
    tokens = torch.randint(config.vocab, (config.batch, config.sequence))
    with autocast(enabled=recipe is not None, recipe=recipe):
        return model(tokens, tokens)


def measure_saved(config: ModelConfig, recipe: Any) -> int:
    """In eager mode, each storage once, parameters left out."""
    model = LanguageModel(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, config, recipe)
    return sum(storage.nbytes() for storage in held.values())


def measure_peak(config: ModelConfig, recipe: Any) -> int:
    """Of the second step: the optimizer's state is there from the beginning."""
    model = LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    live, fixed = LiveBytes(), [*model.parameters(), *model.buffers()]
    live.ignore(fixed)
    with live:
        for _ in range(2):
            live.end_part("step")
            forward(model, config, recipe).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak + sum(tensor.untyped_storage().nbytes() for tensor in fixed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_shapes(shape: str, recipe: str) -> None:
    check(SHAPES[shape], recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    check(SMALL, recipe)


def check(config: ModelConfig, name: str) -> None:
    """Within a hundredth; a tenth is promised."""
    recipe = RECIPES[name]
    with one_thread():
        planned = plan_step(config, recipe)
        assert planned.saved == pytest.approx(measure_saved(config, recipe), rel=0.01)
        assert planned.peak == pytest.approx(measure_peak(config, recipe), rel=0.01)
    model = LanguageModel(config)
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned.gradients == 4 * planned.parameters
    assert planned.optimizer == pytest.approx(8 * planned.parameters, rel=0.01)


def test_nothing_is_left_behind() -> None:
    """Modules keep things; none of them is a fake one afterwards."""
    plan_step(SMALL, RECIPES["delayed"])
    with one_thread():
        loss = forward(LanguageModel(SMALL), SMALL, RECIPES["delayed"])
        loss.backward()
    assert type(loss) is torch.Tensor
    assert loss.item() > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_models_that_are_published(name: str, parameters: int) -> None:
    planned = plan_step(MODELS[name], RECIPES["mxfp8"])
    assert planned.parameters == parameters
    assert planned.peak > planned.weights + planned.gradients + planned.optimizer


def test_saved_grows_with_the_batch_and_not_with_the_depth() -> None:
    one, two = (plan_step(replace(SMALL, layers=layers), None) for layers in (10, 20))
    assert one.saved_per_layer == two.saved_per_layer
    assert two.saved - one.saved == 10 * one.saved_per_layer
    wide = plan_step(replace(SMALL, batch=4), None)
    assert wide.saved_per_layer == pytest.approx(2 * one.saved_per_layer, rel=0.05)


def test_parameters_of_16_bits() -> None:
    planned = plan_step(SMALL, None, torch.bfloat16)
    assert planned.gradients == 2 * planned.parameters


def test_table_and_json(capsys: Capture) -> None:
    said = works(capsys, "plan", "llama3-8b", "--recipes=bf16,nvfp4", "--batch=2")
    assert "8.03 B parameters, 32 layers, batch 2 × 8192 tokens" in said
    report = json.loads(works(capsys, "plan", "llama3-8b", "--recipes=bf16,nvfp4", "--batch=2", "--json"))
    assert report["model"]["batch"] == 2
    assert set(report["recipes"]) == {"bf16", "nvfp4"}
    for name, found in report["recipes"].items():
        row = next(line for line in said.splitlines() if line.startswith(f"│ {name} "))
        assert f"{found['peak'] / 2**30:,.1f} GiB" in row
        assert found["peak_in"] in row


JSON_FILE = """{"hidden_size": 64, "ffn": 96, "num_layers": 2, "heads": 4, "kv_heads": 2, "vocab": 80, "seq": 32,
"batch": 3}"""
TOML_FILE = "hidden = 64\nffn = 96\nlayers = 2\nheads = 4\nkv_heads = 2\nvocab = 80\nseq = 32\nbatch = 3\n"
HUGGING_FACE = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 80,
"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
"max_position_embeddings": 131072, "rope_theta": 500000, "tie_word_embeddings": true, "rms_norm_eps": 1e-5}"""


@pytest.mark.parametrize(("name", "text"), [("a.json", JSON_FILE), ("a.toml", TOML_FILE)])
def test_models_in_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert find_model(str(tmp_path / name)) == replace(SMALL, layers=2, batch=3)


def test_models_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(HUGGING_FACE)
    found = find_model(str(tmp_path / "config.json"))
    wanted = replace(SMALL, layers=2, rope_base=500000, tied=True)
    assert replace(found, sequence=32, batch=2) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds no table"),
        ('{"hiden": 64}', "'hiden', which is no size of a model: give hidden, ffn"),
        ('{"hidden": "64"}', "hidden = '64': give an integer"),
        ('{"hidden": true}', "hidden = True: give an integer"),
        ('{"tied": 1}', "tied = 1: give true or false"),
        ('{"layers": 0}', "--layers is 0: give 1 or more"),
        ('{"model_type": "mixtral"}', "of a 'mixtral'"),
        ('{"model_type": []}', "of a []"),
        ("null", "holds no table"),
        ("[" * 100_000, "cannot be read"),
        ('{"hidden": 64.0}', "hidden = 64.0: give an integer"),
        ('{"hidden": 1' + "0" * 5000 + "}", "cannot be read"),
        ('{"hidden": 1' + "0" * 30 + "}", "--hidden is 1.0e+30: give less than 2^31"),
        ('{"rope_base": NaN}', "--rope-base is nan: give a finite number"),
        ('{"rope_base": Infinity}', "--rope-base is inf: give a finite number"),
        ('{"hidden": 64, "hidden_size": 128}', "hidden_size = 128 and hidden = 64: give one of them"),
    ],
)
def test_files_that_are_no_model(capsys: Capture, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model.json").write_text(text)
    assert said in fails(capsys, "plan", tmp_path / "model.json")
