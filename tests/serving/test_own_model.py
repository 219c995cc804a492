"""Models of `TransformerLayer`s: published as a Llama, and its relatives, whose mathematics is theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.serving.source import source_of_model
from mezzotint.serving.verify import open_second, verify_source
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.sizes import ModelConfig

SIZES = {"hidden": 128, "ffn": 256, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 64, "sequence": 32, "batch": 2}
GIVEN = {"rope_theta": 10000.0, "max_position_embeddings": 32}
IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


def make(**more: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**SIZES, **more}))


class Layers(torch.nn.Module):
    """A model of layers with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        usual = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False}
        usual |= {"activation": "swiglu", "normalization": "RMSNorm", "attn_input_format": "bshd"}
        usual |= {"fuse_qkv_params": True, "device": "cpu", "params_dtype": torch.float32}
        self.embedding = torch.nn.Embedding(64, 128)
        self.layers = torch.nn.ModuleList([mz.TransformerLayer(128, 256, 4, **{**usual, **options})])
        self.norm = mz.RMSNorm(128, device="cpu")
        self.head = torch.nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():  # norms, too, else their names could be mixed up
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.angles = mz.RotaryPositionEmbedding(32)(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return self.head(self.norm(x))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "llama"),
        ({"fuse_qkv_params": False}, "llama"),
        ({"window_size": (7, 0)}, "mistral"),
        ({"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True, "qk_norm_eps": 1e-5}, "qwen3"),
    ],
)
def test_theirs_computes_the_same(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Their model, of the dequantized weights, against ours with those weights: FP32, but for orders of sums."""
    model = Layers(**options)
    report = mz.export(model, "compressed-tensors-mxfp8", tmp_path / "out", config=GIVEN)
    theirs: Any = mz.load_quantized(report.path, high_precision=True).eval()
    assert theirs.config.model_type == kind
    ours = mz.load_quantized(report.path, Layers(**options), high_precision=True)
    with torch.no_grad():
        assert relative(ours(IDS), theirs(IDS).logits) < 1e-5
        assert relative(model(IDS), ours(IDS)) > 1e-3  # codes are not the weights


def test_experts_are_a_mixtral(tmp_path: Path) -> None:
    model = make(experts=4, topk=2)
    report = mz.export(model, "compressed-tensors-mxfp8", tmp_path / "out", config=GIVEN)
    theirs: Any = mz.load_quantized(report.path, high_precision=True).eval()
    assert (theirs.config.model_type, theirs.config.num_experts_per_tok) == ("mixtral", 2)
    ours: Any = mz.load_quantized(report.path, make(experts=4, topk=2), high_precision=True)
    with torch.no_grad():
        assert relative(ours(IDS), theirs(IDS).logits) < 0.02  # ours in BF16


def test_a_tied_head(tmp_path: Path) -> None:
    report = mz.export(make(tied=True), "compressed-tensors-mxfp8", tmp_path / "out", config=GIVEN)
    assert not any("lm_head" in name for name in report.kept)
    theirs: Any = mz.load_quantized(report.path, high_precision=True)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


# Heads of 128 channels: queries, keys and values are whole tiles.
WIDE = {"hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 128}
WHOLE: dict[str, tuple[recipe.Recipe, dict[str, int]]] = {
    "hf-fp8": (recipe.Float8BlockScaling(), WIDE),
    "compressed-tensors-fp8-tensor": (recipe.Float8CurrentScaling(), {}),
    "compressed-tensors-mxfp8": (recipe.MXFP8BlockScaling(enable_2d_quantization=True), {}),
    "compressed-tensors-nvfp4": (recipe.NVFP4BlockScaling(), {}),
    "compressed-tensors-mxfp4": (recipe.MXFP4BlockScaling(), {}),
}


def train(model: Any, used: recipe.Recipe, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        with mz.autocast(recipe=used):
            loss = model(IDS, IDS.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_round_trip(format: str, experts: int, path: Path, before: int, after: int) -> None:
    """From quantized weights, of which queries, keys and values, and gate and up, are one."""
    used, sizes = WHOLE[format]
    with mz.quantized_model_init(recipe=used):
        model, other = (make(**sizes, layers=1, experts=experts) for _ in range(2))
    train(model, used, before, seed=1)
    report = mz.export(model, format, path, config=GIVEN)
    assert set(report.as_they_were) == set(report.quantized)
    checks = list(verify_source(source_of_model(model, GIVEN), open_second(report.path)))
    assert [check for check in checks if not check.is_equal] == []
    mz.load_quantized(report.path, other, recipe=used)
    losses = train(other, used, after, seed=2)
    assert losses == train(model, used, after, seed=2)
    assert losses[-1] < losses[0]


def test_losses_are_as_without_the_trip(tmp_path: Path) -> None:
    check_round_trip("hf-fp8", 0, tmp_path / "out", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "steps"), [(0, 2), (2, 20)])
@pytest.mark.parametrize("format", WHOLE)
def test_every_format(format: str, experts: int, steps: int, tmp_path: Path) -> None:
    """Experts are weights of their own here, and quantized: a Mixtral goes on bit by bit, too."""
    check_round_trip(format, experts, tmp_path / "out", steps, steps)


def test_weights_of_delayed_scaling(tmp_path: Path) -> None:
    """Quantized parameters have their scale, so they are written as they are; others do not."""
    with mz.quantized_model_init(recipe=recipe.DelayedScaling()):
        model = make(layers=1)
    train(model, recipe.DelayedScaling(), 2, seed=1)
    report = mz.export(model, "compressed-tensors-fp8-tensor", tmp_path / "out", config=GIVEN)
    assert set(report.as_they_were) == set(report.quantized)
    held: Any = model.layers[0].layernorm_mlp.fc2_weight
    tensors = open_second(report.path).tensors("model.layers.0.mlp.down_proj")
    assert torch.equal(tensors["weight"].view(torch.uint8), held._data)
    assert torch.equal(tensors["weight_scale"], held._scale_inv)
    with pytest.raises(ValueError, match="keeps its scale from step to step"):
        mz.export(
            make(), "compressed-tensors-fp8-tensor", tmp_path / "no", recipe=recipe.DelayedScaling(), config=GIVEN
        )


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_written_as_on_the_cpu(tmp_path: Path) -> None:
    for used in (recipe.NVFP4BlockScaling(), None):
        with mz.quantized_model_init(enabled=used is not None, recipe=used):
            model = make(layers=1)
        folders = []
        for device in ("cpu", "cuda"):
            path = tmp_path / f"{device}-{used is None}"
            folders.append(mz.export(model.to(device), "compressed-tensors-nvfp4", path, config=GIVEN).path)
        files = [(folder / "model.safetensors").read_bytes() for folder in folders]
        assert files[0] == files[1]
    read: Any = mz.load_quantized(folders[1], make(layers=1).cuda())
    assert read.layers[0].self_attention.proj.weight.is_cuda


def test_tiles_that_are_cut_are_not_cut_silently(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"tiles, which .*q_proj.* cut: give requantize=True"):
        mz.export(model, "hf-fp8", tmp_path / "out", config=GIVEN)
    assert list(tmp_path.iterdir()) == []
    report = mz.export(model, "hf-fp8", tmp_path / "out", config=GIVEN, requantize=True)
    assert {name.rpartition(".")[2] for name in report.requantized} == {"q_proj", "k_proj", "v_proj"}
    checks = list(verify_source(source_of_model(model, GIVEN), open_second(report.path)))
    assert all(check.is_equal for check in checks)
    with mz.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        codes = make()
    with pytest.raises(ValueError, match="requantize"):  # there is nothing to quantize them from
        mz.export(codes, "hf-fp8", tmp_path / "codes", config=GIVEN, requantize=True)
    with pytest.raises(ValueError, match="cut blocks of 128 rows"):
        mz.load_quantized(report.path, make())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"normalization": "LayerNorm"}, "has LayerNorm"),
        ({"bias": True}, "has biases"),
        ({"zero_centered_gamma": True}, "zero_centered_gamma"),
        ({"self_attn_mask_type": "no_mask"}, "attn_mask_type='no_mask'"),
        ({"rotary_pos_interleaved": True}, "rotary_pos_interleaved"),
        ({"parallel_attention_mlp": True}, "no pre-norm layer"),
        ({"output_layernorm": True}, "no pre-norm layer"),
        ({"qkv_weight_interleaved": False}, "qkv_weight_interleaved"),
        ({"qk_norm_type": "RMSNorm"}, "norms of queries and keys"),
        ({"layernorm_epsilon": 1e-6}, "norm is no RMSNorm with the eps"),
        ({"apply_residual_connection_post_layernorm": True}, "adds to the norm's output"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
    ],
)
def test_other_mathematics_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        mz.export(Layers(**options), "compressed-tensors-mxfp8", tmp_path / "out", config=GIVEN)
    assert list(tmp_path.iterdir()) == []


def test_what_modules_do_not_know_is_asked_for(tmp_path: Path) -> None:
    for missing in GIVEN:
        given = {name: value for name, value in GIVEN.items() if name != missing}
        with pytest.raises(ValueError, match=f"config has no '{missing}'"):
            mz.export(make(), "compressed-tensors-mxfp8", tmp_path / "out", config=given)
    with pytest.raises(ValueError, match="model is a Linear"):
        mz.export(torch.nn.Linear(2, 2), "hf-fp8", tmp_path / "out")
