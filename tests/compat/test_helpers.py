"""Helpers of Transformer Engine's that programs import, each against a formula of its own."""

import math
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

import mezzotint as mz
from mezzotint import recipe
from mezzotint.attention.kv_cache import PagedKVCacheManager
from mezzotint.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from mezzotint.compat import attention_shapes, constants, context_parallel, extra_state, graph, jit, ops_common, utils
from mezzotint.compat.base_module import get_dummy_wgrad, get_workspace
from mezzotint.compat.debug_state import TEDebugState, set_weight_tensor_tp_group_reduce
from mezzotint.moe.router import fused_topk_with_score_function

CU_SEQLENS = torch.tensor([0, 8, 24, 32], dtype=torch.int32)


# Packed sequences for context parallelism


def test_partitioned_indices() -> None:
    """Rank r of 2 has the chunks r and 3 − r of each sequence."""
    first = context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 32, 2, 0)
    second = context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 32, 2, 1)
    assert first.tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23, 24, 25, 30, 31]
    assert sorted(first.tolist() + second.tolist()) == list(range(32))
    assert first.dtype == torch.int32
    with pytest.raises(ValueError, match="multiple of 2 · world_size, 6"):
        context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 32, 3, 0)
    with pytest.raises(ValueError, match="total_tokens is 36"):
        context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 36, 2, 0)
    with pytest.raises(ValueError, match="rank is 2"):
        context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 32, 2, 2)


def test_rank_order_and_back() -> None:
    x = torch.randn(3, 32, 5)
    ordered = context_parallel.thd_sequence_order_to_cp_rank_order(x, CU_SEQLENS, 2, 1)
    assert torch.equal(ordered[:, :4], x[:, [0, 1, 6, 7]])
    assert torch.equal(context_parallel.thd_cp_rank_order_to_sequence_order(ordered, CU_SEQLENS, 2, 1), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding(dtype: torch.dtype) -> None:
    tokens, bounds = torch.arange(1, 8), torch.tensor([0, 3, 3, 7], dtype=dtype)
    ids, labels, padded = context_parallel.pad_thd_sequences_for_cp(tokens[None], tokens + 10, bounds, 4, 99, -1)
    assert ids.tolist() == [1, 2, 3, 99, 4, 5, 6, 7]
    assert labels.tolist() == [11, 12, 13, -1, 14, 15, 16, 17]
    assert padded.tolist() == [0, 4, 4, 8]
    assert padded.dtype == dtype
    assert context_parallel.generate_positional_ids_for_cp(bounds, 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_batch_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(32)
    assert context_parallel.get_batch_on_this_cp_rank(CU_SEQLENS, x, None, x) == (x, None, x)
    monkeypatch.setattr(context_parallel, "world_size", lambda group: 2)
    monkeypatch.setattr(context_parallel, "rank_in", lambda group: 1)
    ids, labels, positions = context_parallel.get_batch_on_this_cp_rank(CU_SEQLENS, x[None], None, x)
    want = context_parallel.thd_get_partitioned_indices(CU_SEQLENS, 32, 2, 1)
    assert ids is not None
    assert positions is not None
    assert torch.equal(ids[0], want.long())
    assert torch.equal(positions, want.long())
    assert labels is None
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        context_parallel.get_batch_on_this_cp_rank(CU_SEQLENS, x[:4], None, None)
    with pytest.raises(NotImplementedError, match="bshd"):
        context_parallel.get_batch_on_this_cp_rank(CU_SEQLENS, x, None, None, qvk_format="bshd")


# Constants


def test_constants() -> None:
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)
    assert constants.FP8FwdTensorIdx.GEMM2_WEIGHT == 4
    assert constants.FP8BwdTensorIdx.GRAD_INPUT3 == 5
    assert constants.dist_group_type is torch.distributed.ProcessGroup
    assert constants.TE_DType_To_Torch[constants.TE_DType[torch.bfloat16]] is torch.bfloat16
    assert len(set(constants.QKVLayouts)) == 25
    assert constants.GemmParallelModes == ("row", "column", None)


# Utilities


def test_gated_weights_in_blocks() -> None:
    """Along the first dimension: rows of a weight, elements of a bias."""
    a, b = torch.arange(4), torch.arange(10, 14)
    mixed = utils.interleave_glu_tensor(torch.cat([a, b]), interleave_size=2)
    assert mixed.tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    weight = torch.randn(8, 3)
    assert torch.equal(mz.interleave_glu_tensor(tensor=weight, interleave_size=2)[2:4], weight[4:6])
    assert torch.equal(mz.deinterleave_glu_tensor(mz.interleave_glu_tensor(weight, 2), 2), weight)
    with pytest.raises(ValueError, match="interleave_size is 3: the first dimension, 8"):
        mz.interleave_glu_tensor(weight, 3)


def test_gated_weights_go_with_the_operation() -> None:
    """A weight in blocks in front of an operation that takes its input in blocks: the same output."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16), torch.randn(64, 16)
    want = mz.ops.SwiGLU()(x @ weight.t())
    mixed = mz.interleave_glu_tensor(weight, 8)
    assert torch.equal(mz.ops.SwiGLU(glu_interleave_size=8)(x @ mixed.t()), want)


def test_initialisation() -> None:
    x = torch.empty(200, 200)
    torch.manual_seed(0)
    assert utils.init_method_normal(0.5)(x).std().item() == pytest.approx(0.5, rel=0.02)
    assert utils.scaled_init_method_normal(0.5, 8)(x).std().item() == pytest.approx(0.125, rel=0.02)
    assert utils.get_default_init_method()(x).std().item() == pytest.approx(0.023, rel=0.02)
    assert (utils.init_method_constant(3.0)(x) == 3).all()


def test_sizes() -> None:
    assert (utils.divide(12, 4), utils.ceil_div(13, 4), utils.round_up_to_nearest_multiple(13, 4)) == (3, 4, 16)
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        utils.divide(13, 4)
    assert utils.check_dim_for_fp8_exec(torch.empty(8, 16))
    utils.assert_dim_for_fp8_exec(torch.empty(2, 4, 16))
    with pytest.raises(ValueError, match="multiple of 8"):
        utils.assert_dim_for_fp8_exec(torch.empty(4, 16))


def test_tensors() -> None:
    x = torch.arange(12.0).view(2, 6)
    parts = utils.split_tensor_along_dim(x, 1, 3, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert [part.shape for part in utils.SplitAlongDim.apply(x, 0, 1, True)] == [(6,), (6,)]
    assert utils.combine_tensors([x, x], 1).shape == (2, 2, 6)
    assert utils.noop_cat([x]) is x
    assert utils.cast_if_needed(x, torch.float32) is x
    assert utils.cast_if_needed(None, torch.float32) is None
    assert not utils.requires_grad(x, None)
    kept = torch.ones(4)
    utils.clear_tensor_data(kept, None)
    assert kept.numel() == 0
    with pytest.raises(ValueError, match="the tensor is a view"):
        utils.safely_set_viewless_tensor_data(x[0], torch.ones(6))
    assert utils.make_weak_ref({"a": [x, None, 3]}) == {"a": [x, None, 3]}
    ones = utils.get_cached_ones_tensor(3, torch.float32, torch.device("cpu"))
    assert ones is utils.get_cached_ones_tensor(3, torch.float32, torch.device("cpu"))


def test_devices_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert utils.devices_match("cpu", torch.device("cpu"))
    assert not utils.devices_match("cpu", "cuda")
    assert utils.canonicalize_dtype(None) is torch.get_default_dtype()
    assert utils.canonicalize_device("cpu") == torch.device("cpu")
    utils.validate_rng_states_func(lambda: _Tracker())
    with pytest.raises(TypeError, match=r"without get_states\(\)"):
        utils.validate_rng_states_func(lambda: object())
    with pytest.raises(ValueError, match="no context manager"):
        utils.validate_ctx_manager(lambda: 3)  # type: ignore[arg-type, return-value]
    utils.print_rank_0("here")
    assert capsys.readouterr().out == "here\n"
    with utils.get_nvtx_range_context("x"):
        utils.nvtx_range_push("y")
        utils.nvtx_range_pop()
    assert utils.torch_version() >= (2, 11)


class _Tracker(mz.CudaRNGStatesTracker):
    def fork(self, name: str = "model-parallel-rng") -> Any:
        return torch.no_grad()


def test_operations_of_ones_own() -> None:
    x = mz.Float8CurrentScalingQuantizer(mz.DType.kFloat8E4M3)(torch.ones(16, 16))
    assert ops_common.is_quantized_tensor(x)
    assert torch.equal(ops_common.maybe_dequantize(x, torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16))
    assert ops_common.maybe_autocast_dtype(device_type="cpu", default_dtype=torch.float16) is torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_common.maybe_autocast_dtype(device_type="cpu") is torch.bfloat16


# Fused functions


def test_gelu_and_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(4, 8, dtype=torch.float64)
    y = torch.nn.functional.gelu(x + bias, approximate="tanh")
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    torch.testing.assert_close(jit.bias_gelu_fused(x, bias), y, rtol=1e-6, atol=1e-7)
    found = jit.bgrad_dgelu_fused(dy, x, bias)
    torch.testing.assert_close(found, (dbias, dx), rtol=1e-6, atol=1e-7)
    none, alone = jit.bgrad_dgelu_fused(dy, x + bias, None)
    assert none is None
    torch.testing.assert_close(alone, dx, rtol=1e-6, atol=1e-7)


def test_l2_normalisation_and_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    y = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    dy = torch.randn(4, 8)
    (dx,) = torch.autograd.grad(y, x, dy)
    made, reciprocal = jit.l2normalization_fwd_fused(x, 1e-6)
    torch.testing.assert_close(made, y)
    torch.testing.assert_close(jit.l2normalization_fused(x, 1e-6), y)
    torch.testing.assert_close(jit.l2normalization_backward_fused(dy, x, reciprocal, 1e-6), dx)


def test_bias_dropout_add() -> None:
    x, bias, residual = torch.ones(1000), torch.ones(1000), torch.full((1000,), 3.0)
    assert (jit.bias_dropout_add_fused_inference(x, bias, residual, 0.5) == 5).all()
    assert set(jit.bias_dropout_add_fused_train(x, bias, residual, 0.5).tolist()) == {3.0, 7.0}
    assert (jit.get_bias_dropout_add(False)(x, bias, residual, 0.5) == 5).all()
    jit.set_jit_fusion_options()
    jit.warmup_jit_bias_gelu_all_dtypes(8, 8, 1)
    assert jit.no_torch_dynamo()(len) is len


@pytest.mark.compile
def test_jit_fuser_compiles_when_it_is_called() -> None:
    calls = []

    @jit.jit_fuser
    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x * 2

    assert calls == []
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))


# Attention


def test_lengths_from_masks_and_back() -> None:
    mask = torch.tensor([[False, False, True, True], [False, False, False, True]]).view(2, 1, 1, 4)
    bounds, indices = attention_shapes.get_cu_seqlens_and_indices(mask)
    assert bounds.tolist() == [0, 2, 5]
    assert indices.tolist() == [0, 1, 4, 5, 6] == attention_shapes.get_indices(4, bounds).tolist()
    assert torch.equal(attention_shapes.get_padding_mask(2, bounds, max_seqlen_q=4), mask)  # type: ignore[arg-type]
    assert attention_shapes.get_full_cu_seqlens(3, 4, "cpu").tolist() == [0, 4, 8, 12]
    packed = torch.arange(1.0, 6.0)[:, None]
    padded = attention_shapes.convert_thd_to_bshd(packed, bounds, 2, 4)
    assert padded[..., 0].tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert torch.equal(attention_shapes.convert_bshd_to_thd(padded, bounds, 5), packed)


def test_formats_and_windows() -> None:
    assert attention_shapes.get_qkv_format("sbh3d") == ("sbhd", "sbhd", "sbhd")
    paged = "paged_kv_thd_bshd_bshd"
    assert attention_shapes.get_qkv_format(paged, object()) == ("thd_2bshd", "thd", "bshd")
    assert attention_shapes.check_set_window_size("causal") == (-1, 0)
    assert attention_shapes.check_set_window_size("padding_causal", (4, 4)) == (4, 0)
    assert attention_shapes.check_set_window_size("no_mask", (-1, 0)) == (-1, -1)
    with pytest.raises(ValueError, match="window_size"):
        attention_shapes.check_set_window_size("no_mask", (-2, 3))


def test_names_on_attention() -> None:
    attention = mz.DotProductAttention(2, 16, name="core")
    roles = attention.get_quantizer_roles(fwd=True, num_quantizers=9)
    assert [role.tensor_type for role in roles] == ["qkv"] * 3 + [""] * 3 + ["s"] * 3
    assert roles[3].name == "core.dpa_output"
    with mz.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert attention.fp8_meta["recipe"] == recipe.MXFP8BlockScaling()
    assert not attention.fp8
    assert attention.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    attention.init_fp8_metadata(3)


def test_packed_rotary_embedding() -> None:
    """ "thd" is each sequence on its own."""
    torch.manual_seed(0)
    qkv = torch.randn(24, 2, 3 * 8)
    freqs = mz.RotaryPositionEmbedding(8)(16)
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32)
    split = [8, 8, 8]
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, split, "thd", None, False, bounds)
    for start, end in ((0, 10), (10, 24)):
        one = qkv[start:end, None]
        want = apply_fused_qkv_rotary_pos_emb(one, freqs, freqs, split, "sbhd")
        for found, each in zip((q, k, v), want, strict=True):
            torch.testing.assert_close(found[start:end], each[:, 0])
    wide = torch.randn(24, 2, 8 + 8 + 4)
    q, k, v = apply_fused_qkv_rotary_pos_emb(wide, freqs, freqs, [8, 8, 4], "thd", cu_seqlens=bounds)
    torch.testing.assert_close(k, apply_rotary_pos_emb(wide[..., 8:16], freqs, "thd", cu_seqlens=bounds))
    assert torch.equal(v, wide[..., 16:])


def test_pages() -> None:
    pages = PagedKVCacheManager(8, 4, 1, 4, torch.float32, 3, 16)
    pages.pre_step(OrderedDict([(7, 5), (9, 4)]))
    assert pages.get_sequence_count() == 2
    assert pages.get_sequence_lengths() == [5, 4]
    assert pages.get_page_count(7) == 2
    assert pages.get_page_list(9) == [2]
    assert pages.get_page_table([9, 7]).tolist() == [[2, 0, 0, 0], [0, 1, 0, 0]]
    assert pages.has_free_page()


def test_pages_by_hand() -> None:
    pages = PagedKVCacheManager(4, 4, 1, 4, torch.float32, 3, 12, device=torch.device("cpu"))
    pages.allocate_memory(0)
    pages.allocate_sequence(5, 7)
    pages.allocate_page(6)
    assert pages.allocated_pages == {5: [0, 1], 6: [2]}
    assert pages.pre_step(OrderedDict([(6, 4), (5, 2)])) == {6: 4, 5: 2}
    assert pages.page_table.tolist() == [[2, 0, 0], [0, 1, 0], [0, 0, 0]]  # what they had is enough
    pages.allocate_sequence(5, 12)
    assert pages.get_page_list(5) == [0, 1, 3]
    with pytest.raises(ValueError, match=r"sequence 5 has 3 pages of 4 tokens.*larger max_seqlen"):
        pages.allocate_page(5)
    with pytest.raises(RuntimeError, match="sequence 6 needs a page, and none of 4 is free"):
        pages.allocate_page(6)
    for buffer in pages.cache[0]:
        buffer.fill_(1.0)
    pages.deallocate_sequence(5)
    assert (pages.free_pages, pages.sequences) == ([0, 1, 3], {6: 4})
    assert [bool(page.any()) for page in pages.cache[0][0]] == [False, False, True, False]
    with pytest.raises(KeyError, match="sequence 5 is not in the cache, which has"):
        pages.deallocate_sequence(5)


# Debugging, graphs, recomputation, offloading


def test_the_debugging_tool_is_off() -> None:
    TEDebugState.initialize()
    assert not TEDebugState.debug_enabled
    first = TEDebugState.get_layer_count()
    assert TEDebugState.get_layer_count() == first + 1
    set_weight_tensor_tp_group_reduce(True)
    assert TEDebugState.get_iteration() == 0


def test_graph_hooks() -> None:
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    graph.set_capture_end()
    assert not graph.is_graph_capturing()


def test_state_of_delayed_scaling_is_saved_and_restored() -> None:
    model = torch.nn.Sequential(mz.Linear(32, 32), torch.nn.ReLU(), mz.LayerNormMLP(32, 64))
    delayed = recipe.DelayedScaling(amax_history_len=4)
    saved = graph.save_fp8_tensors([model], delayed)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with mz.autocast(recipe=delayed):
        model(torch.randn(16, 32)).sum().backward()
    assert any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    graph.restore_fp8_tensors([model], saved)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert graph.save_fp8_tensors([model], recipe.MXFP8BlockScaling()) is None
    graph.restore_fp8_tensors([model], None)
    with pytest.raises(RuntimeError, match="of 2 modules, modules has 1"):
        graph.restore_fp8_tensors([model[0]], saved)


def test_dummy_gradients_and_workspaces() -> None:
    first = get_dummy_wgrad([3, 4], torch.bfloat16, zero=True)
    assert first.shape == (3, 4)
    assert not first.any()
    assert first.data_ptr() == get_dummy_wgrad([3, 4], torch.bfloat16).data_ptr()
    assert get_workspace().numel() == 0


def test_offloading_that_is_off() -> None:
    context, sync = mz.get_cpu_offload_context(False, 0, 0, True, True)
    x = torch.ones(3)
    with context:
        assert sync(x) is x


def test_modules_keep_the_name_of_a_userbuffer() -> None:
    for made in (mz.Linear(8, 8, ub_name="qkv"), mz.LayerNormLinear(8, 8, ub_name="qkv")):
        assert made.ub_name == "qkv"
    assert mz.GroupedLinear(2, 8, 8).ub_name is None


def test_keywords() -> None:
    chain = mz.ops.Sequential(mz.ops.GELU())
    chain.insert(idx=0, module=mz.ops.ReLU())
    assert isinstance(chain.pop(idx=0), mz.ops.ReLU)
    mz.ops.ScaledSReLU(activation_recompute_in_mlp=True)
    options = (2, False, None, None, None, "sigmoid", None)
    with pytest.raises(NotImplementedError, match="qb_histogram is given"):
        fused_topk_with_score_function(torch.ones(2, 4), *options, qb_histogram=torch.zeros(4))


# Pickled state


class _Hostile:
    def __reduce__(self) -> Any:
        return math.floor, (1.5,)


def test_pickled_state_is_looked_at_and_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = extra_state.should_load_extra_state_pickle
    monkeypatch.delenv(extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV, raising=False)
    assert not load(b"", "Linear")
    assert not load(pickle.dumps({}), "Linear")
    assert not load(pickle.dumps({"recipe": recipe.MXFP8BlockScaling(), "extra_fp8_variables": {}}), "Linear")
    refused: list[bytes] = [
        pickle.dumps({"recipe": recipe.DelayedScaling(), "extra_fp8_variables": {}}),
        pickle.dumps({"recipe": recipe.CustomRecipe(mz.custom_recipes.mxfp8_factory), "scale_fwd": 1.0}),
        pickle.dumps({"scale_fwd": [1.0]}),
        pickle.dumps(_Hostile()),
        b"\x80\x04no pickle",
    ]
    for data in refused:
        with pytest.raises(RuntimeError, match="Refusing to load pickled extra state for Linear"):
            load(data, "Linear")
    monkeypatch.setenv(extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV, "1")
    assert all(load(data, "Linear") for data in refused)


def test_what_recipes_leave_in_a_checkpoint() -> None:
    policy = extra_state.CheckpointExtraStatePolicy
    assert extra_state.recipe_extra_state_policy(recipe.DelayedScaling()) is policy.STATEFUL_FP8_DELAYED_SCALING
    assert extra_state.is_stateless_recipe(recipe.NVFP4BlockScaling())
    for made in recipe.RECIPES.values():
        assert any(key[1] == made.__name__ for key in extra_state._RECIPE_POLICIES), made
