"""Models of Hugging Face, built from a configuration: a Llama converted, trained, compiled, saved; experts whose
weights are 3-D parameters; GPT-2, whose linears are transposed."""

import copy
import inspect
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mezzotint as mz
from mezzotint.distributed.fsdp import low_precision_gather
from tests.recipes import RECIPES

transformers = pytest.importorskip("transformers")

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "convert_huggingface.py")
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
    assert [entry.fqn for entry in report.kept] == ["model.embed_tokens", "lm_head"]
    assert ("an embedding's" in report.kept[1].why) == tied
    assert report.num_weights == sum(p.numel() for p in model.parameters() if p.dim() > 1)
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


@pytest.mark.cover(0)
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


@pytest.mark.parametrize("saves", ["model", "base"])
def test_what_is_saved_is_the_original(tmp_path: Path, saves: str) -> None:
    """Delayed scaling's state is in the state dict, and in no file that `from_pretrained` would wonder about."""
    model = mz.convert(llama(layers=1), mz.recipe.DelayedScaling())
    train(model, model, 1)
    assert any(key.endswith("_extra_state") for key in model.state_dict())
    saved = model if saves == "model" else model.model
    saved.save_pretrained(tmp_path)
    kind = transformers.LlamaForCausalLM if saves == "model" else transformers.LlamaModel
    loaded, info = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    for key, value in loaded.state_dict().items():
        assert torch.equal(saved.state_dict()[key], value)
    again = mz.convert(llama(layers=1), mz.recipe.DelayedScaling())
    again.load_state_dict(model.state_dict(), strict=True)
    scale = model.model.layers[0].mlp.up_proj.scale_fwd
    assert torch.equal(again.model.layers[0].mlp.up_proj.scale_fwd, scale)
    assert not torch.equal(scale, torch.ones_like(scale))
    assert not mz.unconvert(model)._keys_to_ignore_on_save


# Experts in 3-D parameters


def mixture(kind: str = "Mixtral", layers: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_local_experts": 4} if kind in ("Mixtral", "GptOss") else {"num_experts": 4}
    sizes |= {"moe_intermediate_size": 64, "decoder_sparse_step": 1} if kind == "Qwen3Moe" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **sizes,
        **options,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def small_tokens() -> torch.Tensor:
    return tokens() % 128


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_experts(kind: str) -> None:
    """Near the original, gradients too, and back; GPT-OSS has transposed weights, biases and a gate of its own."""
    original = mixture(kind)
    model = mz.convert(original, RECIPES["mxfp8"], inplace=False)
    report = mz.convert_report(model)
    assert {entry.fqn for entry in report.converted if "experts" in entry.fqn} == {
        f"{EXPERTS}.gate_up_proj",
        f"{EXPERTS}.down_proj",
    }
    assert {entry.after for entry in report.converted} == {"Linear", "grouped_mm"}
    assert report.num_weights == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert not any(entry.before.startswith("Converted") for entry in report.entries)
    assert model.state_dict().keys() == original.state_dict().keys()
    made = []
    for each in (original, model):
        logits = each(small_tokens(), use_cache=False).logits.float()
        logits.square().mean().backward()
        made.append((logits, *(p.grad.float() for n, p in each.named_parameters() if "experts" in n)))
    for one, other in zip(*made, strict=True):
        assert 0 < (one - other).norm() / one.norm() < 0.3
    assert type(mz.unconvert(model).model.layers[0].mlp.experts) is type(original.model.layers[0].mlp.experts)
    assert vars(model.model.layers[0].mlp.experts).keys() == vars(original.model.layers[0].mlp.experts).keys()
    assert torch.equal(model(small_tokens()).logits.float(), made[0][0])


def test_experts_compute_what_grouped_linear_computes() -> None:
    experts = mixture().model.layers[0].mlp.experts
    mz.convert(experts, RECIPES["mxfp8"])
    x = torch.randn(12, 64, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    scores = torch.rand(12, 2)
    sizes = torch.bincount(chosen.flatten(), minlength=4)
    order = torch.argsort(chosen.flatten(), stable=True)
    layers = []
    for weight in (experts.gate_up_proj, experts.down_proj):
        layer = mz.GroupedLinear(4, *weight.shape[:0:-1], bias=False, single_grouped_weight=True)
        layer.weight = torch.nn.Parameter(weight.detach())
        layers.append(layer)
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        gate, up = layers[0](x[order // 2], sizes).chunk(2, -1)
        y = layers[1](torch.nn.functional.silu(gate) * up, sizes)
    expected = torch.zeros(24, 64).index_copy(0, order, y * scores.flatten()[order][:, None])
    assert torch.equal(experts(x, chosen, scores), expected.view(12, 2, 64).sum(1).to(torch.bfloat16))


def test_experts_without_a_recipe() -> None:
    original = mixture()
    model = mz.convert(original, inplace=False)
    plain = original(small_tokens()).logits
    experts, others = (m.model.layers[0].mlp.experts for m in (model, original))
    x, chosen, scores = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.rand(3, 2)
    assert torch.equal(experts(x, chosen, scores), others(x, chosen, scores))
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        assert not torch.equal(model(small_tokens()).logits, plain)
    with (
        mz.autocast(recipe=RECIPES["delayed"]),
        pytest.raises(ValueError, match=rf"DelayedScaling, which scales {EXPERTS}\.gate_up_proj by what earlier calls"),
    ):
        model(small_tokens())


def test_experts_stay_where_a_recipe_has_state_or_the_filter_says_so() -> None:
    for recipe, choose, why in (
        (RECIPES["delayed"], None, "DelayedScaling keeps scales from step to step"),
        (RECIPES["mxfp8"], lambda module, name: False if "experts" in name else None, "left out by the filter"),
    ):
        model = mz.convert(mixture(), recipe, filter=choose)
        kept = {entry.fqn: entry.why for entry in mz.convert_report(model).kept}
        assert kept[f"{EXPERTS}.down_proj"].startswith(why)
        assert (
            "has a forward of its own" in kept["model.layers.0.mlp.gate"]
            or "reads it" in kept["model.layers.0.mlp.gate"]
        )
        model(small_tokens())


def test_experts_have_names_in_roles() -> None:
    seen = set()

    def factory(role: Any) -> Any:
        seen.add(role.name)
        return mz.IdentityQuantizer()

    model = mz.convert(mixture(), mz.recipe.CustomRecipe(factory))
    seen.clear()
    model(small_tokens())
    layer = "model.layers.0"
    attention = {f"{layer}.self_attn.{name}" for name in LINEARS[:4]}
    assert seen == attention | {f"{layer}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


def test_experts_are_computed_again_with_their_recipe() -> None:
    """Also where backward is outside of the region."""
    experts = mz.convert(mixture()).model.layers[0].mlp.experts
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    arguments = x, torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    gradients = []
    for run in (experts, partial(torch.utils.checkpoint.checkpoint, experts, use_reentrant=False)):
        with mz.autocast(recipe=RECIPES["mxfp8"]):
            y = run(*arguments)
        x.grad = None
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_experts_are_copied_and_saved(tmp_path: Path) -> None:
    model = mz.convert(mixture(), RECIPES["mxfp8"])
    expected = model(small_tokens()).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(small_tokens()).logits, expected)
        assert "recipe=MXFP8BlockScaling" in repr(other.model.layers[0].mlp.experts)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded) is transformers.MixtralForCausalLM
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


@pytest.mark.slow
@pytest.mark.compile
def test_experts_compiled() -> None:
    """One whole graph, for every routing."""
    model = mz.convert(mixture(), RECIPES["mxfp8"])
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # torch 2.11
        for seed in range(2):
            batch = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
            made = []
            for each in (call, eager):
                loss = each(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
                made.append([loss.detach()])
            made[0] += [p.grad for p in model.parameters()]
            made[1] += [p.grad for p in eager.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    assert counter.frame_count == 1


# Transposed linears, and both in shards


def gpt2() -> Any:
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=2, **tokens)
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16).eval()


CONV1D = {f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_conv1d(recipe: str) -> None:
    original = gpt2()
    model = mz.convert(original, RECIPES[recipe], inplace=False)
    report = mz.convert_report(model)
    assert {entry.fqn for entry in report.converted} == CONV1D
    assert {(entry.before, entry.after) for entry in report.converted} == {("Conv1D", "Linear")}
    layer, other = model.transformer.h[0].mlp.c_fc, original.transformer.h[0].mlp.c_fc
    assert isinstance(layer, mz.Linear)
    assert isinstance(layer, type(other))
    assert layer.weight.shape == (64, 256)
    assert "in_features=64, out_features=256" in repr(layer)
    made = []
    for each in (original, model):
        logits = each(small_tokens(), use_cache=False).logits.float()
        logits.square().mean().backward()
        made.append((logits, each.transformer.h[0].mlp.c_fc.weight.grad.float()))
    for one, another in zip(*made, strict=True):
        assert 0 < (one - another).norm() / one.norm() < 0.2
    assert mz.unconvert(model).state_dict().keys() == original.state_dict().keys()
    assert torch.equal(model(small_tokens()).logits.float(), made[0][0])
    assert repr(model) == repr(original)


def test_conv1d_computes_what_linear_computes() -> None:
    layer = gpt2().transformer.h[0].mlp.c_fc
    ours = mz.Linear(64, 256, params_dtype=torch.bfloat16)
    with torch.no_grad():
        ours.weight.copy_(layer.weight.t())
        ours.bias.copy_(layer.bias.normal_())
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    mz.convert(layer)
    made = []
    for each in (layer, ours):
        x.grad = None
        with mz.autocast(recipe=RECIPES["mxfp8"]):
            y = each(x, is_first_microbatch=True)
        y.float().square().sum().backward()
        weight = layer.weight.grad if each is layer else ours.weight.grad.t()
        made.append((y, x.grad, weight, each.bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_conv1d_starts_over_and_loads() -> None:
    original, model = gpt2(), mz.convert(gpt2(), RECIPES["mxfp8"])
    layer = model.transformer.h[0].mlp.c_fc
    layer.reset_parameters()
    assert 0.015 < layer.weight.float().std() < 0.025
    assert not layer.bias.any()
    model.load_state_dict(original.state_dict(), strict=True)
    other = mz.convert(copy.deepcopy(original), RECIPES["mxfp8"])
    assert torch.equal(model(small_tokens()).logits, other(small_tokens()).logits)


@pytest.fixture
def _one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("build", [gpt2, mixture])
def test_sharded_after_converting(build: Callable[[], Any]) -> None:
    model = mz.convert(build(), RECIPES["mxfp8"])
    whole, mesh = copy.deepcopy(model), init_device_mesh("cpu", (1,))
    low_precision_gather(model, RECIPES["mxfp8"])  # what lies transposed, or is 3-D, is gathered in high precision
    fully_shard(model.transformer.h[0] if build is gpt2 else model.model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in (model, whole):
        each(small_tokens(), use_cache=False).logits.float().square().mean().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad)


@pytest.mark.compile
def test_conv1d_compiled() -> None:
    model = mz.convert(gpt2(), RECIPES["mxfp8"])
    eager = copy.deepcopy(model)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    made = []
    for each, module in ((call, model), (eager, eager)):
        logits = each(small_tokens(), use_cache=False).logits
        logits.float().square().mean().backward()
        made.append((logits, *(p.grad for p in module.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # `test_compiled` does, in less time
    runpy.run_path(EXAMPLE)["main"]("inductor", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("14 of 16 weights converted, 81.8% of the parameters")
    assert lines[-1].startswith("step 1: loss 5.")


def test_the_example_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        runpy.run_path(EXAMPLE)
