"""Constructors and methods of modules have the names, the order and the defaults of upstream."""

import inspect
from typing import Any

import pytest

import mezzotint as mz
from mezzotint.module.base import TransformerEngineBaseModule

EMPTY = inspect.Parameter.empty
UB = ["ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]


def signature(text: str, **defaults: Any) -> list[tuple[str, Any]]:
    """Names in order; a default is None unless it is said."""
    return [(name, defaults.get(name)) for name in text.split()]


CONSTRUCTORS: dict[type, list[tuple[str, Any]]] = {
    mz.Linear: signature(
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
        "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type save_original_input name dtype memory",
        in_features=EMPTY,
        out_features=EMPTY,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        return_bias=False,
        delay_wgrad_compute=False,
        save_original_input=False,
        **dict.fromkeys(UB, False),
    ),
    mz.LayerNormLinear: signature(
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker init_method bias normalization return_bias params_dtype parallel_mode "
        "return_layernorm_output return_layernorm_output_gathered parameters_split zero_centered_gamma device "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type name dtype memory",
        in_features=EMPTY,
        out_features=EMPTY,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        zero_centered_gamma=False,
        delay_wgrad_compute=False,
        **dict.fromkeys(UB, False),
    ),
    mz.LayerNormMLP: signature(
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group tp_size "
        "init_method bias normalization activation activation_params output_layer_init_method "
        "fuse_wgrad_accumulation params_dtype return_layernorm_output return_layernorm_output_gathered seq_length "
        "micro_batch_size set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type checkpoint dtype memory",
        hidden_size=EMPTY,
        ffn_hidden_size=EMPTY,
        eps=1e-5,
        sequence_parallel=False,
        return_bias=False,
        tp_size=1,
        bias=True,
        normalization="LayerNorm",
        activation="gelu",
        fuse_wgrad_accumulation=False,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        set_parallel_mode=False,
        zero_centered_gamma=False,
        delay_wgrad_compute=False,
        checkpoint=False,
        **dict.fromkeys(UB, False),
    ),
    mz.GroupedLinear: signature(
        "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device "
        "ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute save_original_input single_grouped_weight "
        "single_grouped_bias name use_grouped_tensor dtype memory",
        num_gemms=EMPTY,
        in_features=EMPTY,
        out_features=EMPTY,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_size=1,
        bias=True,
        return_bias=False,
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
    ),
    mz.LayerNorm: signature(
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size kwargs",
        eps=1e-5,
        zero_centered_gamma=False,
        kwargs=EMPTY,
    ),
    mz.RMSNorm: signature(
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size kwargs",
        eps=1e-5,
        zero_centered_gamma=False,
        kwargs=EMPTY,
    ),
    mz.Fp8Padding: signature("num_gemms align_size", num_gemms=EMPTY),
    mz.Fp8Unpadding: signature("num_gemms align_size", num_gemms=EMPTY),
    TransformerEngineBaseModule: signature("name"),
}
METHODS: dict[Any, list[tuple[str, Any]]] = {
    mz.Linear.forward: signature("inp is_first_microbatch fp8_output fp8_grad", fp8_output=False, fp8_grad=False),
    mz.LayerNormLinear.forward: signature(
        "inp is_first_microbatch fp8_output fp8_grad", fp8_output=False, fp8_grad=False
    ),
    mz.LayerNormMLP.forward: signature("inp is_first_microbatch"),
    mz.GroupedLinear.forward: signature("inp m_splits is_first_microbatch out dgrad_out", m_splits=EMPTY),
    mz.Fp8Padding.forward: signature("inp m_splits", m_splits=EMPTY),
    mz.Fp8Unpadding.forward: signature("inp m_splits", m_splits=EMPTY),
    TransformerEngineBaseModule.adjust_amax_history_length: signature("length fwd", length=EMPTY),
    TransformerEngineBaseModule.get_quantizer_roles: signature("fwd num_quantizers", fwd=EMPTY),
    TransformerEngineBaseModule.init_fp8_meta_tensors: signature("recipe", recipe=EMPTY),
    TransformerEngineBaseModule.get_fp8_meta_tensors: [],
    TransformerEngineBaseModule.reset_fp8_meta_tensors: signature("fp8_meta_tensors"),
    TransformerEngineBaseModule.get_extra_state: [],
    TransformerEngineBaseModule.set_extra_state: signature("state", state=EMPTY),
    TransformerEngineBaseModule.set_tensor_parallel_group: signature("tp_group", tp_group=EMPTY),
    TransformerEngineBaseModule.init_fp8_metadata: signature("num_gemms", num_gemms=1),
    TransformerEngineBaseModule.reset_parameters: signature("defer_init", defer_init=False),
    TransformerEngineBaseModule.register_wgrad_accumulation_and_reduce_hooks: signature(
        "wgrad_accumulation_and_reduce_hook", wgrad_accumulation_and_reduce_hook=EMPTY
    ),
    TransformerEngineBaseModule.need_backward_dw: [],
    TransformerEngineBaseModule.backward_dw: [],
}


@pytest.mark.parametrize("cls", CONSTRUCTORS, ids=lambda cls: cls.__name__)
def test_constructor(cls: type) -> None:
    assert [(p.name, p.default) for p in inspect.signature(cls).parameters.values()] == CONSTRUCTORS[cls]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_method(method: Any) -> None:
    """What is ours alone is private, and given by name."""
    _, *rest = inspect.signature(method).parameters.values()
    rest = [p for p in rest if not (p.name.startswith("_") and p.kind is p.KEYWORD_ONLY)]
    expected = METHODS[method]
    if method.__name__ == "forward":
        expected = [("inp", EMPTY), *expected[1:]]
    assert [(p.name, p.default) for p in rest] == expected
