"""A user's own quantizer and product in modules."""

import copy
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint.custom_recipes.gemm import GEMMType, MMParams
from mezzotint.recipe import CustomRecipe, QuantizerRole
from mezzotint.region import current_state
from tests.module.cases import with_main_grad
from tests.recipes import IN, OUT, gradient, make, sample, step
from tests.recipes import STATE as BUFFERS


class Int8Storage(mz.QuantizedTensorStorage):
    """Rows, and columns transposed, each with its scale."""

    _FLATTEN_TENSOR_BUFFERS = (("data", "data"), ("scale", "scale"), ("data_t", "data_t"), ("scale_t", "scale_t"))
    _VALUES = (("_quantizer", "quantizer", None),)
    _ROWWISE = ("data", "scale")
    _COLUMNWISE = ("data_t", "scale_t")

    def _logical_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape) if self.data is not None else tuple(self.data_t.shape[::-1])


class Int8Quantizer(mz.Quantizer):
    custom = True

    def __init__(self, calls: list[dict[str, Any]], levels: int = 127) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.calls, self.levels = calls, levels

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Int8Storage:
        row = self.codes(tensor) if self.rowwise_usage else (None, None)
        column = self.codes(tensor.t()) if self.columnwise_usage else (None, None)
        fields = {"data": row[0], "scale": row[1], "data_t": column[0], "scale_t": column[1], "quantizer": self}
        return Int8Storage(fake_dtype=tensor.dtype, **fields)

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / self.levels
        return (x.float() / scale).round().to(torch.int8), scale

    def qgemm(
        self,
        qx: torch.Tensor,
        qw: torch.Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: torch.Tensor,
        sw: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gemm_type: Any,
        qresult_x: Any,
        qresult_w: Any,
    ) -> torch.Tensor:
        self.calls.append({k: v for k, v in locals().items() if k not in ("self", "__class__")})
        y = (qx.float() @ qw.float().t()) * sx * sw.t()
        return (y if bias is None else y + bias.float()).to(out_dtype)


class PlainStorage(mz.QuantizedTensorStorage):
    """Declares no buffers, and says itself what is saved for backward."""

    custom = True

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def prepare_for_saving(self) -> Any:
        tensors = [self.data, self.scale, self.data_t, self.scale_t]
        self.data = self.scale = self.data_t = self.scale_t = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        self.data, self.scale, self.data_t, self.scale_t = tensors[:4]
        return tensors[4:]

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        pass


class PlainQuantizer(Int8Quantizer):
    """As Int8Quantizer, but for what it makes."""

    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        (data, scale), (data_t, scale_t) = self.codes(tensor), self.codes(tensor.t())
        return PlainStorage(
            data=data, scale=scale, data_t=data_t, scale_t=scale_t, _dtype=tensor.dtype, _quantizer=self
        )


def test_storages_that_declare_nothing() -> None:
    """They are saved for backward as they say, and can be read twice."""
    module, x = make("linear"), sample()
    expected = step(module, x, own_recipe([]))
    quantizers = {kind: PlainQuantizer([], 127 - i) for i, kind in enumerate(("input", "weight", "grad_output"))}
    got = step(module, x, CustomRecipe(lambda role: quantizers[role.tensor_type]))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    leaf = sample().requires_grad_()
    with mz.autocast(recipe=CustomRecipe(lambda role: quantizers[role.tensor_type])):
        y = module(leaf)
    twice = [torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)


def own_recipe(calls: list[dict[str, Any]]) -> CustomRecipe:
    quantizers = {kind: Int8Quantizer(calls, 127 - i) for i, kind in enumerate(("input", "weight", "grad_output"))}
    return CustomRecipe(lambda role: quantizers[role.tensor_type])


def test_own_attributes_are_kept() -> None:
    """What a user's quantizer is made of is its own affair."""
    made = Int8Quantizer([], 99).with_usage(columnwise=False)
    assert made.levels == 99
    assert made.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize(
    "make", [lambda: mz.Linear(IN, OUT, device="cpu"), lambda: mz.ops.Linear(IN, OUT, device="cpu")]
)
def test_own_objects_are_no_parameters(make: Any) -> None:
    message = (
        r"Int8Quantizer.quantize of weight gave Int8Storage, which is no tensor .* outside of quantized_model_init"
    )
    with mz.quantized_model_init(recipe=own_recipe([])), pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("bias", [True, False])
def test_own_quantizer_multiplies(bias: bool) -> None:
    """All three products go to it, with the operands of that product, and what it gives is what comes out."""
    calls: list[dict[str, Any]] = []
    module, x = make("linear", bias=bias), sample()
    got = step(module, x, own_recipe(calls))
    y = got["output"].clone().requires_grad_()
    gradient(y).backward()
    dy, weight = y.grad, module.weight.detach()
    assert dy is not None
    (x_r, x_c), (w_r, w_c), (g_r, g_c) = (
        (Int8Quantizer([], 127 - i).codes(t), Int8Quantizer([], 127 - i).codes(t.t()))
        for i, t in enumerate((x, weight, dy))
    )
    expected = [
        (GEMMType.FPROP, x_r, w_r, (40, OUT), module.bias if bias else None, False),
        (GEMMType.DGRAD, g_r, w_c, (40, IN), None, True),
        (GEMMType.WGRAD, g_c, x_c, (OUT, IN), None, True),
    ]
    assert [call["gemm_type"] for call in calls] == [GEMMType.FPROP, GEMMType.DGRAD, GEMMType.WGRAD]
    for call, (_, left, right, shape, added, split) in zip(calls, expected, strict=True):
        for key, wanted in (("qx", left[0]), ("sx", left[1]), ("qw", right[0]), ("sw", right[1])):
            assert torch.equal(call[key], wanted), key
        assert (call["qx"].shape[0], call["qw"].shape[0]) == shape
        assert call["out_dtype"] == torch.bfloat16
        assert call["m_params"] == MMParams(out_dtype=torch.bfloat16, use_split_accumulator=split)
        assert isinstance(call["qresult_x"], Int8Storage)
        assert isinstance(call["qresult_w"], Int8Storage)
        assert added is call["bias"] or torch.equal(added, call["bias"])
    for key, (left, right, extra) in {
        "output": (x_r, w_r, module.bias),
        "input": (g_r, w_c, None),
        "weight": (g_c, x_c, None),
    }.items():
        product = (left[0].float() @ right[0].float().t()) * left[1] * right[1].t()
        product = product + extra.detach().float() if bias and extra is not None else product
        assert torch.equal(got[key], product.bfloat16()), key


@pytest.mark.parametrize("name", ["layernorm_linear", "layernorm_mlp"])
def test_own_quantizer_in_other_modules(name: str) -> None:
    calls: list[dict[str, Any]] = []
    got, plain = step(make(name), sample(), own_recipe(calls)), step(make(name), sample(), None)
    kinds = [call["gemm_type"] for call in calls]
    gemms = 2 if name == "layernorm_mlp" else 1
    assert kinds == [GEMMType.FPROP] * gemms + [GEMMType.DGRAD, GEMMType.WGRAD] * gemms
    for key, value in plain.items():
        if key not in BUFFERS:
            assert (got[key].float() - value.float()).norm() <= 0.05 * value.float().norm(), key


def test_own_quantizer_in_groups() -> None:
    calls: list[dict[str, Any]] = []
    with mz.autocast(recipe=own_recipe(calls)):
        make("grouped_linear")(sample(), [10, 10, 20]).float().sum().backward()
    assert calls


def test_own_quantizer_adds_to_main_grad() -> None:
    calls: list[dict[str, Any]] = []
    plain = step(make("linear"), sample(), own_recipe([]))["weight"]
    module = with_main_grad("linear", 100.0)
    step(module, sample(), own_recipe(calls))
    assert calls[-1]["out_dtype"] == torch.float32
    torch.testing.assert_close(module.weight.main_grad - 100, plain.float(), rtol=0.02, atol=0.02)


def test_own_quantizer_keeps_weights() -> None:
    calls: list[dict[str, Any]] = []
    module, recipe = make("linear"), own_recipe(calls)
    first = step(module, sample(), recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(step(module, sample(), recipe, is_first_microbatch=False)["output"], first["output"])


def test_own_quantizer_updates_kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that lets them be updated goes to the quantizer that made them."""
    flags: list[torch.Tensor] = []

    def update(self: Any, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor) -> None:
        flags.append(noop_flag)
        dst.data, dst.scale = self.codes(src)

    monkeypatch.setattr(Int8Quantizer, "update_quantized", update)
    flag = torch.zeros(1)
    monkeypatch.setattr(current_state(), "skip_weight_update", flag)
    module, recipe = make("linear"), own_recipe([])
    step(module, sample(), recipe, is_first_microbatch=False)
    with torch.no_grad():
        module.weight.mul_(2)
    got = step(module, sample(), recipe, is_first_microbatch=False)["output"]
    assert torch.equal(got, step(copy.deepcopy(module), sample(), recipe)["output"])
    assert len(flags) == 1
    assert flags[0] is flag


def test_one_own_operand_is_not_enough() -> None:
    """There is no product of it with another format."""

    def factory(role: QuantizerRole) -> Any:
        return Int8Quantizer([]) if role.tensor_type == "input" else mz.MXFP8Quantizer()

    with pytest.raises(NotImplementedError, match="Int8Storage is no operand of a GEMM"):
        step(make("linear"), sample(), CustomRecipe(factory))
    assert current_state().depth == 0
