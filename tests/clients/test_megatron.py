"""Megatron-Core's GPT with its specification of Transformer Engine's layers, unchanged: it trains, and its losses are
those of the same model in Mezzotint's modules, bit for bit."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine
from gpt import CASES, DEVICE, CpuAsCuda, batch, config, cpu_as_current_device, megatron_gpt, own_gpt, processes, train
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import TEFusedMLP, TEGroupedLinear
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import multiprocessing

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOADED = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",  # the other kind makes a CUDA stream
    "add_bias_linear": False,
}
SPLIT = {"sequence_parallel": True}
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="Megatron-Core asks for a CUDA device: it reads its generator")
Losses = tuple[list[float], list[float]]


@pytest.fixture
def one_process() -> Iterator[None]:
    with processes():
        yield


def losses(case: str, **settings: Any) -> Losses:
    """Return the losses of Megatron's model and of ours. Ours recomputes nothing."""
    options, recipe = CASES[case]
    theirs = train(megatron_gpt(config(**options, **settings)))
    left = {name: value for name, value in settings.items() if name not in FULL | OFFLOADED}
    return theirs, train(own_gpt(config(**options, **left), recipe))


def fused_losses(case: str, **settings: Any) -> Losses:
    """Return those with Megatron's MLP of operations, and with a LayerNormMLP of ours."""
    options, recipe = CASES[case]
    cfg = config(**options, **settings)
    model = megatron_gpt(cfg, use_te_op_fuser=True)
    assert isinstance(model.decoder.layers[0].mlp, TEFusedMLP)
    return train(model), train(own_gpt(cfg, recipe, is_fused=True))


def test_the_names_are_ours() -> None:
    assert transformer_engine.__provided_by__.startswith("mezzotint ")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_losses(case: str) -> None:
    theirs, ours = losses(case)
    assert theirs == ours
    assert len(set(theirs)) == 3


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("bf16", "nvfp4")])
@pytest.mark.usefixtures("one_process")
def test_quantized_parameters(case: str) -> None:
    theirs, ours = losses(case, fp8_param=True)
    assert theirs == ours


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_cuda) if case in ("bf16", "nvfp4") else case for case in CASES]
)
@pytest.mark.usefixtures("one_process")
def test_recomputation(case: str) -> None:
    """Megatron has Transformer Engine recompute where a recipe of FP8 is set, and recomputes itself otherwise."""
    theirs, ours = losses(case, **FULL)
    assert theirs == ours


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_the_op_fuser(case: str) -> None:
    theirs, ours = fused_losses(case)
    assert theirs == ours


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_activations_are_offloaded(case: str) -> None:
    """On the CPU they stay where they are: the contexts and their functions are entered and called all the same."""
    theirs, ours = losses(case, **OFFLOADED)
    assert theirs == ours


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_a_checkpoint(case: str, tmp_path: Path) -> None:
    """A model that was read from a distributed checkpoint goes on as the one that was saved."""
    cfg = config(**CASES[case][0])
    saved = megatron_gpt(cfg)
    train(saved, 2)
    read = megatron_gpt(cfg)
    with cpu_as_current_device():
        dist_checkpointing.save(saved.sharded_state_dict(), tmp_path)
        state = dist_checkpointing.load(read.sharded_state_dict(), tmp_path)
    read.load_state_dict(state)
    assert train(read, 2, first=2) == train(saved, 2, first=2)


@pytest.mark.parametrize("case", ["bf16", "delayed", "mxfp8"])
@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_of_experts(case: str, tmp_path: Path) -> None:
    """Megatron saves what each expert of a GroupedLinear has, scales included, and puts it together again."""
    cfg = config(**CASES[case][0], **EXPERTS)
    with cpu_as_current_device():
        saved, read = [megatron_gpt(cfg, num_experts=4, moe_grouped_gemm=True) for _ in range(2)]
        assert isinstance(saved.decoder.layers[0].mlp.experts.linear_fc1, TEGroupedLinear)
        train(saved, 2)
        dist_checkpointing.save(saved.sharded_state_dict(), tmp_path)
        state = dist_checkpointing.load(read.sharded_state_dict(), tmp_path)
        read.load_state_dict(state)
        assert train(read, 2, first=2) == train(saved, 2, first=2)


def optimizer_losses(case: str, is_distributed: bool, **settings: Any) -> list[float]:
    """Return the losses of Megatron's model under its DDP and its optimizer, whose master weights are FP32."""
    cfg = config(**CASES[case][0], **settings, use_cpu_initialization=False)  # else the master weights are not set
    # What Megatron asks for where parameters are MXFP8.
    reuses = {"reuse_grad_buf_for_mxfp8_param_ag": cfg.fp8_param and is_distributed}
    is_split = {"use_distributed_optimizer": is_distributed}
    model = megatron_gpt(cfg)
    ddp = DistributedDataParallel(
        cfg, DistributedDataParallelConfig(fp8_param_gather=cfg.fp8_param, **is_split, **reuses), model
    )
    common = {"lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16, "fp8_recipe": cfg.fp8_recipe, "clip_grad": 0.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **common, **is_split, **reuses), [ddp])
    found = []
    for step in range(3):
        torch.manual_seed(step)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        model.set_is_first_microbatch()
        tokens, positions = batch(step)
        loss = ddp(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_the_distributed_optimizer(case: str) -> None:
    """It trains as the one that is not distributed. With quantized parameters too; but for those of FP8, of which
    Megatron gathers codes and BF16 in one call: PyTorch's gloo takes both for one dtype, and gives back neither."""
    with cpu_as_current_device(), CpuAsCuda() if DEVICE == "cpu" else nullcontext():
        expected = optimizer_losses(case, False)
        assert len(set(expected)) == 3
        assert optimizer_losses(case, True) == expected
        if case == "mxfp8":
            assert optimizer_losses(case, True, fp8_param=True) == expected


TWO: dict[str, tuple[Callable[..., Losses], str, dict[str, Any]]] = {
    **{case: (losses, case, SPLIT) for case in CASES},
    "mxfp8-parameters": (losses, "mxfp8", SPLIT | {"fp8_param": True}),
    "delayed-recomputed": (losses, "delayed", SPLIT | FULL),
    "mxfp8-fused": (fused_losses, "mxfp8", SPLIT),
}


def run_two(rank: int, folder: str) -> None:
    """One of two processes: all cases, whose losses or errors it leaves in a file."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with cpu_as_current_device(), processes(2, rank, f"{folder}/store"):
        for name, (run, case, settings) in TWO.items():
            try:
                found[name] = run(case, **settings)
            except Exception:
                found[name] = traceback.format_exc()
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(run_two, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes are tested on the CPU, over gloo")
@pytest.mark.parametrize("name", TWO)
def test_two_processes(name: str, two_processes: list[dict[str, Any]]) -> None:
    """Tensor parallel 2 with sequence parallel."""
    for found in two_processes:
        assert isinstance(found[name], tuple), found[name]
        assert found[name][0] == found[name][1]
    assert two_processes[0][name] == two_processes[1][name]
