"""Upstream's names on modules: what tools and subclasses call."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mezzotint as mz
from mezzotint.compat import base_module
from mezzotint.module.base import TransformerEngineBaseModule, quantize_weight
from mezzotint.recipe import DelayedScaling
from tests.quantizer_formats import FORMATS
from tests.recipes import GROUPS, MODULES, RECIPES, make, run, sample, step

NAMES = """
    adjust_amax_history_length backward_dw end_forward fast_setattr forward get_extra_state get_fp8_meta_tensors
    get_quantizer_roles grad_input_quantizer_role init_fp8_meta_tensors init_fp8_metadata is_debug_iter is_fsdp2
    module_setattr need_backward_dw no_debug_features_active output_quantizer_role prepare_forward prepare_forward_ctx
    register_parameter register_wgrad_accumulation_and_reduce_hooks reset_fp8_meta_tensors reset_parameters
    set_activation_dtype set_extra_state set_meta_tensor set_tensor_parallel_group
"""
over_modules = pytest.mark.parametrize("name", MODULES)


@over_modules
def test_names_are_there(name: str) -> None:
    module = make(name)
    assert isinstance(module, TransformerEngineBaseModule)
    assert all(hasattr(module, attribute) for attribute in NAMES.split())


def test_attributes() -> None:
    module = make("linear")
    module.fast_setattr("seen", 3)
    assert module.seen == 3
    module.module_setattr("extra", torch.nn.Parameter(torch.zeros(2)))
    assert "extra" in dict(module.named_parameters())


def test_no_debugging_tool() -> None:
    module = make("linear")
    assert not module.is_debug_iter()
    assert module.no_debug_features_active(module.quantizers)


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_is_fsdp2(one_process: None) -> None:
    module = make("linear")
    assert not module.is_fsdp2
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(module, mesh=mesh)
    assert module.is_fsdp2
    assert not make("linear").is_fsdp2


@pytest.mark.parametrize("fwd", [True, False])
def test_set_meta_tensor(fwd: bool) -> None:
    module = make("linear")
    module.set_meta_tensor(fwd, DelayedScaling(amax_history_len=2000))
    assert module.fp8_meta["scaling_fwd"].amax_history.shape == (2000, 3)
    assert module.fp8_meta["scaling_bwd"].amax_history.shape == (2000, 2)


def test_a_subclass_prepares_its_forward() -> None:
    class Doubled(mz.Linear):
        ended = 0

        def end_forward(self) -> None:
            self.ended += 1

        def forward(self, inp: torch.Tensor) -> torch.Tensor:
            with self.prepare_forward_ctx(inp, num_gemms=1) as prepared:
                assert prepared.is_contiguous()
                return 2 * super().forward(prepared)

    module = Doubled(64, 48, params_dtype=torch.bfloat16, device="cpu")
    x = sample(64).t()
    assert not x.is_contiguous()
    with mz.autocast(recipe=RECIPES["mxfp8"]):
        assert torch.equal(module(x), 2 * mz.Linear.forward(module, x))
        assert module.fp8_meta["recipe"] == RECIPES["mxfp8"]
    assert module.activation_dtype == torch.bfloat16
    assert module.ended == 1
    assert module.prepare_forward(x, allow_non_contiguous=True) is x
    with torch.autocast("cpu", torch.float16):
        module.set_activation_dtype(x)
    assert module.activation_dtype == torch.float16


# What is in use, as tools read it


@pytest.mark.cover(0)
@pytest.mark.compile
@over_modules
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_the_recipe_of_the_region_is_in_use(name: str, recipe: str) -> None:
    """Of a compiled module, too, whose graph writes nothing down; another recipe was in use before."""
    module = make(name)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter)
    chosen = RECIPES[recipe]
    assert chosen is not None
    step(module, sample(), RECIPES["current"])
    for _ in range(2):
        run(module, sample(), chosen, call)
        with mz.autocast(recipe=chosen):
            assert module.fp8_meta["recipe"] == chosen
            found = module.quantizers
            for key, roles in (("scaling_fwd", True), ("scaling_bwd", False)):
                for quantizer, role in zip(found[key], module.get_quantizer_roles(fwd=roles), strict=True):
                    made = chosen.quantizer(role)
                    is_request = isinstance(made, mz.DelayedScalingRequest)
                    assert isinstance(quantizer, mz.Float8Quantizer) if is_request else quantizer == made
    assert counter.frame_count == 1
    assert module.fp8_meta["recipe"] == RECIPES["current"]  # the last that eager code ran with


# Weights that are kept


WORKSPACES = {
    "linear": ["weight"],
    "layernorm_linear": ["weight"],
    "layernorm_mlp": ["fc1_weight", "fc2_weight"],
    "grouped_linear": [f"weight{i}" for i in range(GROUPS)],
}


def keep(name: str, **options: Any) -> tuple[Any, Any]:
    """A module that has run the first of its micro-batches, and a function that runs the next."""
    module, x = make(name, **options), sample()

    def call(first: bool = False) -> torch.Tensor:
        with torch.no_grad():
            return run(module, x, RECIPES["mxfp8"], is_first_microbatch=first)[0]

    call(True)
    return module, call


def double_weights(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 and "norm" not in name else 1.0)


@over_modules
def test_workspaces_are_read_and_cleared(name: str) -> None:
    """As tools do that free memory: they count them, and clear them."""
    module, call = keep(name)
    kept = module._fp8_workspaces
    assert isinstance(kept, Mapping)
    assert list(kept) == WORKSPACES[name]
    assert len(kept) == len(WORKSPACES[name])
    assert all(isinstance(workspace, mz.QuantizedTensorStorage) for workspace in kept.values())
    expected = call()
    double_weights(module)
    assert torch.equal(call(), expected)
    kept.clear()
    assert module._workspaces is None
    assert not kept
    assert not torch.equal(call(), expected)  # quantized again, from the weights that there are now
    assert list(module._fp8_workspaces) == WORKSPACES[name]
    module._fp8_workspaces = {}
    assert len(module._fp8_workspaces) == 0


def test_workspaces_of_split_and_stacked_weights() -> None:
    assert list(keep("linear", parameters_split=("a", "b"))[0]._fp8_workspaces) == ["weight"]
    assert list(keep("grouped_linear", single_grouped_weight=True)[0]._fp8_workspaces) == WORKSPACES["grouped_linear"]


def test_one_workspace_is_dropped() -> None:
    module, call = keep("layernorm_mlp")
    double_weights(module)
    before = module._fp8_workspaces["fc2_weight"]
    del module._fp8_workspaces["fc1_weight"]
    assert list(module._fp8_workspaces) == ["fc2_weight"]
    with pytest.raises(KeyError, match="fc1_weight"):
        module._fp8_workspaces["fc1_weight"]
    call()
    assert list(module._fp8_workspaces) == WORKSPACES["layernorm_mlp"]
    assert module._fp8_workspaces["fc2_weight"] is before


def test_workspaces_are_not_put_in() -> None:
    module, _ = keep("linear")
    kept = module._fp8_workspaces["weight"]
    with pytest.raises(TypeError, match=r"_fp8_workspaces\['weight'\] = .*read or clear them"):
        module._fp8_workspaces["weight"] = kept
    with pytest.raises(TypeError, match=r"set it to \{\}, or clear it"):
        module._fp8_workspaces = {"weight": kept}


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_weight(name: str) -> None:
    """Upstream's form: two results, all arguments by name."""
    fmt = FORMATS[name]
    first, second = (torch.randn(128, 128, dtype=torch.bfloat16) for _ in range(2))
    made, new = quantize_weight(tensor=first, quantizer=fmt.make(), cache=True)
    assert made is new
    assert quantize_weight(tensor=first, quantizer=fmt.make())[1] is None
    codes = made.dequantize()
    assert quantize_weight(tensor=second, quantizer=fmt.make(), workspace=made, update_workspace=False) == (made, None)
    assert torch.equal(made.dequantize(), codes)
    assert quantize_weight(tensor=second, quantizer=fmt.make(), workspace=made, cache=True) == (made, None)
    assert not torch.equal(made.dequantize(), codes)
    held = fmt.make()(first)
    assert quantize_weight(tensor=held, quantizer=fmt.make(), cache=True) == (held, None)
    assert quantize_weight(tensor=first, quantizer=fmt.make(), workspace_dtype=torch.float32)[0].dtype == torch.float32


def test_quantize_weight_refuses() -> None:
    weight, quantizer = torch.randn(32, 32), FORMATS["mxfp8"].make()
    with pytest.raises(ValueError, match="tensor is None: give the weight"):
        quantize_weight(quantizer=quantizer)
    with pytest.raises(ValueError, match="quantizer is None"):
        quantize_weight(tensor=weight)
    with pytest.raises(NotImplementedError, match="fsdp_group: FSDP1 is not supported; leave it None"):
        quantize_weight(tensor=weight, quantizer=quantizer, fsdp_group=object())


def test_what_is_absent_is_said() -> None:
    """Names of upstream's that mean nothing here stand in the docstring, with what is in their place."""
    for name in ("backward_objects", "setup_saved_tensors", "saved_tensor_aliases", "get_weight_workspace"):
        assert name in (base_module.__doc__ or "")


# A module of a user's


class OwnLinear(TransformerEngineBaseModule):
    """A user's module with a forward and a backward of its own, over the quantizers of its slots."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            quantizers = self.quantizers
            return _Own.apply(x, self.weight, quantizers["scaling_fwd"], quantizers["scaling_bwd"][0])


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.weight, ctx.backward = weight, backward
        return forward[0](x).dequantize() @ forward[1](weight).dequantize().t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return ctx.backward(dy).dequantize() @ ctx.weight, None, None, None


def test_a_users_module_has_the_state_of_delayed_scaling() -> None:
    """Made at its first run; new scales at the end of a region, those of gradients at the next run."""
    module = OwnLinear()
    assert "_extra_state" not in module.state_dict()
    for step_number in range(3):
        x = (sample().float() * 2.0**-step_number).requires_grad_()
        with mz.autocast(recipe=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")):
            y = module(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(module.scale_fwd[:2], 448 / torch.stack((x.abs().max(), module.weight.abs().max())).detach())
    assert module.scale_bwd.tolist() == [57344.0, 1.0]
    other = OwnLinear()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.scale_fwd, module.scale_fwd)
    module.prepare_forward(sample(), num_gemms=2)
    assert module.scale_fwd.shape == (6,)


def test_what_a_region_says_of_a_module() -> None:
    layer = mz.Linear(32, 32)
    assert not layer.fp8
    assert not layer.fp8_meta["fp8_checkpoint"]
    with mz.autocast(recipe=mz.recipe.MXFP8BlockScaling()):
        assert layer.fp8
        layer(torch.ones(32, 32))
    assert layer.fp8_meta["fp8_checkpoint"]
    with mz.autocast(False, calibrating=True):
        assert layer.fp8_calibration
