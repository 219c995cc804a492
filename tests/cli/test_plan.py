"""`mezzotint plan`: what it says without data is what a real step shows."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import hw
from mezzotint.optimizers import FusedAdam
from mezzotint.quantization import autocast
from mezzotint.recomputation import checkpoint
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.memory import LiveBytes, buffers_of, plan_step
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.savings import Savings, parse_size
from mezzotint.trainer.sizes import MODELS, NEEDED, ModelConfig, find_model
from tests.cli.tools import fails, one_thread, row_of, run, works, write_text

Capture = pytest.CaptureFixture[str]

SMALL = ModelConfig(hidden=64, ffn=96, layers=5, heads=4, kv_heads=2, vocab=80, sequence=32, batch=2)
SHAPES = {
    "deep": SMALL,
    "one layer": replace(SMALL, layers=1),
    "two layers, tied": replace(SMALL, layers=2, tied=True),
    "no groups, wide heads": replace(SMALL, kv_heads=4, head_dim=32, layers=4),
}


@pytest.fixture(autouse=True)
def gpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps hold no FP32 copies of what attention multiplies, on any CPU: memory is planned for GPUs."""
    monkeypatch.setattr(hw, "SLOW_BF16", False)


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
    model = LanguageModel(config)
    return measure_step(model, torch.optim.AdamW(model.parameters(), fused=True), config, recipe)


def measure_step(model: LanguageModel, optimizer: Any, config: ModelConfig, recipe: Any) -> int:
    """The peak of the second step: the optimizer's state is there from the beginning."""
    fixed = [part for tensor in (*model.parameters(), *model.buffers()) for part in buffers_of(tensor)]
    live = LiveBytes()
    live.ignore(fixed)
    with live:
        for _ in range(2):
            live.end_part("step")
            forward(model, config, recipe).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak + sum(tensor.untyped_storage().nbytes() for tensor in fixed)


@pytest.mark.cover(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_shapes(shape: str, recipe: str) -> None:
    check(SHAPES[shape], recipe)


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", COMMAND_RECIPES)
def test_recipes(recipe: str) -> None:
    check(SMALL, recipe)


def check(config: ModelConfig, name: str) -> None:
    """Within a hundredth; a tenth is promised."""
    recipe = COMMAND_RECIPES[name]
    with one_thread():
        planned = plan_step(config, recipe)
        assert planned.saved == pytest.approx(measure_saved(config, recipe), rel=0.01)
        assert planned.peak == pytest.approx(measure_peak(config, recipe), rel=0.01)
    model = LanguageModel(config)
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned.gradients == 4 * planned.parameters
    assert planned.optimizer == pytest.approx(8 * planned.parameters, rel=0.01)


BUSY = replace(SMALL, batch=16)  # activations are most of its memory


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
def test_recomputation(recipe: str) -> None:
    planned, usual = (
        plan_step(BUSY, COMMAND_RECIPES[recipe], savings=Savings(recompute=True)),
        plan_step(BUSY, COMMAND_RECIPES[recipe]),
    )
    assert planned.saved_per_layer == 2 * BUSY.batch * BUSY.sequence * BUSY.hidden  # its input, BF16
    assert planned.peak < 0.8 * usual.peak
    model = LanguageModel(BUSY)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    with one_thread():
        peak = measure_step(model, torch.optim.AdamW(model.parameters(), fused=True), BUSY, COMMAND_RECIPES[recipe])
    assert planned.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_quantized_weights(recipe: str) -> None:
    planned = plan_step(SMALL, COMMAND_RECIPES[recipe], savings=Savings(quantized_weights=True))
    with mz.quantized_model_init(recipe=COMMAND_RECIPES[recipe]):
        model = LanguageModel(SMALL)
    held = [part for tensor in (*model.parameters(), *model.buffers()) for part in buffers_of(tensor)]
    assert planned.weights == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.01)
    assert planned.weights < plan_step(SMALL, COMMAND_RECIPES[recipe]).weights
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    with one_thread():
        assert planned.peak == pytest.approx(measure_step(model, optimizer, SMALL, COMMAND_RECIPES[recipe]), rel=0.01)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert planned.optimizer == pytest.approx(sum(value.nbytes for value in states), rel=0.01)


@pytest.mark.cover(0)
@pytest.mark.parametrize(("name", "size"), [("bfloat16", 2), ("float16", 2), ("fp8", 1)])
def test_moments_of_fewer_bits(name: str, size: int) -> None:
    planned = plan_step(SMALL, None, savings=Savings(optimizer_dtype=name))
    assert planned.optimizer == pytest.approx(2 * size * planned.parameters, rel=0.01)
    assert plan_step(SMALL, None).peak - planned.peak == pytest.approx((8 - 2 * size) * planned.parameters, rel=0.01)


def test_switches(capsys: Capture) -> None:
    options = ("plan", "tiny", "--recipes=mxfp8", "--quantized-weights", "--optimizer-dtype=bfloat16", "--recompute")
    assert "quantized weights; moments in bfloat16; layers recomputed" in works(capsys, *options)
    report = json.loads(works(capsys, *options, "--json"))
    savings = {"quantized_weights": True, "optimizer_dtype": "bfloat16", "recompute": True, "memory": "default"}
    assert report["savings"] == savings
    assert "--optimizer-dtype is 'int4': give one of float32" in fails(capsys, *options, "--optimizer-dtype=int4")
    assert "--quantized-weights with --fsdp" in fails(capsys, *options, "--world=2", "--fsdp")
    others = [option for option in options if option != "--quantized-weights"]
    works(capsys, *others, "--optimizer-dtype=float32", "--world=4", "--tp=2", "--fsdp")


def test_memory_modes(capsys: Capture) -> None:
    def saved(memory: str) -> int:
        report = json.loads(works(capsys, "plan", "tiny", "--recipes=current", f"--memory={memory}", "--json"))
        return report["recipes"]["current"]["saved_per_layer"]

    assert saved("compressed") < saved("lean") < saved("default")
    assert "lean memory" in works(capsys, "plan", "tiny", "--recipes=current", "--memory=lean")
    assert "--memory is 'small': give one of default, lean" in fails(capsys, "plan", "tiny", "--memory=small")
    assert "--memory is 'small': give one of default, lean" in fails(capsys, "train", "--memory=small")


def test_what_fits(capsys: Capture) -> None:
    """As many bytes as the peak are enough, and one less is not."""
    options = ("plan", "tiny", "--recipes=bf16,delayed")
    report = json.loads(works(capsys, *options, "--json"))
    assert report["limit"] is None
    low, high = sorted(found["peak"] for found in report["recipes"].values())
    assert low < high
    assert works(capsys, *options, f"--fits={high}B").count(" yes ") == 2
    outcome = run(capsys, *options, f"--fits={high - 1}B")
    assert (outcome.code, outcome.out.count(" yes "), outcome.out.count(" no "), outcome.err) == (1, 1, 1, "")
    outcome = run(capsys, *options, f"--fits={low}b", "--json")
    assert outcome.code == 1
    fits = {name: found["fits"] for name, found in json.loads(outcome.out)["recipes"].items()}
    assert sorted(fits.values()) == [False, True]


def test_sizes_in_words() -> None:
    assert [parse_size(said) for said in ("80GB", "80 GiB", "1.5kb", "2TiB", "7b")] == [
        80 * 10**9,
        80 * 2**30,
        1500,
        2 * 2**40,
        7,
    ]
    for said in ("80", "GB", "-1GB", "0GB", "nanGB", "80 XB", "1e3GB", "80GB80", "9" * 30 + "GB"):
        with pytest.raises(CommandError, match="give a size with its unit, as 80GB or 80GiB"):
            parse_size(said)


def test_nothing_is_left_behind() -> None:
    """Modules keep things; none of them is a fake one afterwards."""
    plan_step(SMALL, COMMAND_RECIPES["delayed"])
    with one_thread():
        loss = forward(LanguageModel(SMALL), SMALL, COMMAND_RECIPES["delayed"])
        loss.backward()
    assert type(loss) is torch.Tensor
    assert loss.item() > 0


@pytest.mark.cover(0)
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
    planned = plan_step(MODELS[name], COMMAND_RECIPES["mxfp8"])
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
    assert "sizes in GiB" in said
    report = json.loads(works(capsys, "plan", "llama3-8b", "--recipes=bf16,nvfp4", "--batch=2", "--json"))
    assert report["model"]["batch"] == 2
    assert set(report["recipes"]) == {"bf16", "nvfp4"}
    for name, found in report["recipes"].items():
        row = row_of(said, name)
        assert f" {found['peak'] / 2**30:,.2f} " in row
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
    found = find_model(str(tmp_path / "config.json"), {"sequence": 32, "batch": 2})
    assert found == replace(SMALL, layers=2, rope_base=500000, tied=True)


def test_what_a_file_does_not_say_is_not_guessed(capsys: Capture, tmp_path: Path) -> None:
    """A configuration of Hugging Face has no batch, and any file may lack a size."""
    path = tmp_path / "config.json"
    path.write_text(HUGGING_FACE)
    for command in (("plan", path), ("train", "--model", path)):
        said = fails(capsys, *command)
        assert "config.json does not say sequence, batch: add them, or give --sequence … --batch …" in said
    assert "batch 3 × 32 tokens" in works(capsys, "plan", path, "--batch=3", "--sequence=32", "--recipes=bf16")
    path.write_text('{"hidden": 64, "ffn": 96, "layers": 1, "heads": 4, "sequence": 16, "batch": 2}')
    assert "does not say vocab: add them, or give --vocab …" in fails(capsys, "plan", path)
    text = write_text(tmp_path)
    more = ("--steps=1", "--no-compile", "--device=cpu", f"--data={text}", f"--out={tmp_path / 'run'}")
    works(capsys, "train", "--model", path, *more)  # whose vocabulary is the text's


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
    rest = [f"--{name}=4" for name in NEEDED if name not in text]
    assert said in fails(capsys, "plan", tmp_path / "model.json", *rest)
