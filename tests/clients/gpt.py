"""A GPT of Megatron-Core's, and the same one with its decoder in Mezzotint's modules: what `test_megatron` compares."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.overrides import TorchFunctionMode

import mezzotint as mz
from mezzotint import recipe as recipes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, FFN, HEADS, LAYERS, VOCAB, LENGTH, BATCH = 64, 128, 4, 2, 128, 32, 2

# Megatron's settings, and the recipe that they come to.
CASES: dict[str, tuple[dict[str, Any], recipes.Recipe | None]] = {
    "bf16": ({}, None),
    "delayed": (
        {"fp8": "hybrid", "fp8_recipe": Fp8Recipe.delayed, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
        recipes.DelayedScaling(amax_history_len=4, reduce_amax=True),
    ),
    "tensorwise": ({"fp8": "hybrid", "fp8_recipe": Fp8Recipe.tensorwise}, recipes.Float8CurrentScaling()),
    "blockwise": ({"fp8": "e4m3", "fp8_recipe": Fp8Recipe.blockwise}, recipes.Float8BlockScaling()),
    "mxfp8": ({"fp8": "e4m3", "fp8_recipe": Fp8Recipe.mxfp8}, recipes.MXFP8BlockScaling()),
    # Stochastic rounding draws from the generator, which Megatron's decoder and ours use in the same order.
    "nvfp4": ({"fp4": "e2m1", "fp4_recipe": Fp4Recipe.nvfp4}, recipes.NVFP4BlockScaling()),
}


class CpuAsCuda(TorchFunctionMode):
    """Gives Megatron's optimizers, which write "cuda" for the device and ask tensors for their CUDA types, the CPU."""

    TYPES: ClassVar = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return self.TYPES[args[0].dtype]
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def cpu_as_current_device() -> Iterator[None]:
    """Answer "cpu" to Megatron where it asks for the current CUDA device without need, as for buffers of its own."""
    if DEVICE == "cuda":
        yield
        return
    with patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None):
        yield


@contextmanager
def processes(tensor_parallel_size: int = 1, rank: int = 0, store: str | None = None) -> Iterator[None]:
    """Run with the process groups of Megatron, one process or as many as the tensors are split over."""
    found = dist.HashStore() if store is None else dist.FileStore(store, tensor_parallel_size)
    backend = "gloo" if DEVICE == "cpu" or tensor_parallel_size > torch.cuda.device_count() else "nccl"
    dist.init_process_group(backend, store=found, rank=rank, world_size=tensor_parallel_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(**settings: Any) -> TransformerConfig:
    """Return the configuration of a small GPT in BF16."""
    return TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": HEADS,
            "use_cpu_initialization": DEVICE == "cpu",
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "bf16": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            **settings,
        }
    )


def megatron_gpt(cfg: TransformerConfig, **spec: Any) -> GPTModel:
    """Return Megatron's model with its specification of Transformer Engine's layers.

    Megatron's own tracker of random numbers asks for a CUDA device, and so do its rotary embeddings: the tracker is
    Transformer Engine's, and positions are learnt.
    """
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(7, te_rng_tracker=True, force_reset_rng=True)
    layers = get_gpt_layer_with_transformer_engine_spec(**spec)
    model = GPTModel(cfg, layers, VOCAB, LENGTH, position_embedding_type="learned_absolute")
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm_weight"):  # features of many sizes: recipes then differ in their losses
            parameter.data.copy_(2.0 ** torch.linspace(-10, 2, HIDDEN))
    return model.to(DEVICE).bfloat16()  # as Megatron's Float16Module does


class OwnLayer(nn.Module):
    """A layer of the decoder in Mezzotint's modules."""

    def __init__(self, cfg: TransformerConfig, is_fused: bool) -> None:
        super().__init__()
        size, group = cfg.tensor_model_parallel_size, None
        if size > 1:
            group = parallel_state.get_tensor_model_parallel_group()
        common = {"params_dtype": torch.bfloat16, "device": DEVICE, "tp_group": group, "tp_size": size}
        common |= {"sequence_parallel": cfg.sequence_parallel, "return_bias": True}
        self.qkv = mz.LayerNormLinear(HIDDEN, 3 * HIDDEN, parallel_mode="column", **common | {"return_bias": False})
        self.attention = mz.DotProductAttention(
            HEADS, HIDDEN // HEADS, attention_dropout=0.0, qkv_format="sbhd", tp_size=size, tp_group=group
        )
        self.proj = mz.Linear(HIDDEN, HIDDEN, parallel_mode="row", **common)
        self.mlp: nn.Module | None = None
        if is_fused:
            self.mlp = mz.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=size > 1, **common)
        else:
            self.fc1 = mz.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **common)
            self.fc2 = mz.Linear(FFN, HIDDEN, parallel_mode="row", **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3 * HIDDEN // HEADS).chunk(3, -1)
        y, bias = self.proj(self.attention(q, k, v))
        x = x + (y + bias)
        if self.mlp is None:
            y, bias = self.fc1(x)
            y, bias = self.fc2(nn.functional.gelu(y + bias))
        else:
            y, bias = self.mlp(x)
        return x + (y + bias)


class OwnDecoder(nn.Module):
    """The decoder in Mezzotint's modules, with the weights of Megatron's."""

    NAMES: ClassVar = {"self_attention.linear_qkv.": "qkv.", "self_attention.linear_proj.": "proj."}
    SEPARATE: ClassVar = {"mlp.linear_fc1.": "fc1.", "mlp.linear_fc2.": "fc2."}
    FUSED: ClassVar = {
        "mlp.linear_fc1.layer_norm": "mlp.layer_norm",
        "mlp.linear_fc1.": "mlp.fc1_",
        "mlp.linear_fc2.": "mlp.fc2_",
    }

    def __init__(
        self, cfg: TransformerConfig, recipe: recipes.Recipe | None, like: nn.Module, is_fused: bool = False
    ) -> None:
        super().__init__()
        self.recipe = recipe
        with mz.quantized_model_init(recipe=recipe) if cfg.fp8_param else nullcontext():
            self.layers = nn.ModuleList(OwnLayer(cfg, is_fused) for _ in range(LAYERS))
        self.final_layernorm = mz.LayerNorm(
            HIDDEN, dtype=torch.bfloat16, device=DEVICE, sequence_parallel=cfg.sequence_parallel
        )
        state = like.state_dict()
        if is_fused:  # what two modules have of delayed scaling is no state of one
            state = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
        for theirs, ours in (self.NAMES | (self.FUSED if is_fused else self.SEPARATE)).items():
            state = {name.replace(theirs, ours): value for name, value in state.items()}
        self.load_state_dict(state)

    def forward(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        with nullcontext() if self.recipe is None else mz.autocast(recipe=self.recipe):
            for layer in self.layers:
                hidden_states = layer(hidden_states)
        return self.final_layernorm(hidden_states)


def own_gpt(cfg: TransformerConfig, recipe: recipes.Recipe | None, is_fused: bool = False) -> GPTModel:
    """Return the model whose decoder is ours: embedding, head and loss are Megatron's."""
    model = megatron_gpt(cfg)
    model.decoder = OwnDecoder(cfg, recipe, model.decoder, is_fused)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (BATCH, LENGTH) of a step and their positions."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    return tokens.to(DEVICE), torch.arange(LENGTH, device=DEVICE).expand(BATCH, -1)


def train(model: nn.Module, steps: int = 3, first: int = 0) -> list[float]:
    """Train by SGD; return the losses."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        tokens, positions = batch(step)
        model.zero_grad()
        model.set_is_first_microbatch()  # Megatron's schedules say so at every step: weights are quantized anew
        loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        finish(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.float() - 0.1 * parameter.grad.float())
        losses.append(loss.item())
    return losses


def finish(model: nn.Module) -> None:
    """Sum gradients of parameters that every process has and sees other tokens with, as Megatron's optimizers do."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
