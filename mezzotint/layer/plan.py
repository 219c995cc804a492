"""The plan of a module's run: its configuration, the recipe in force and the gradients that are needed decide it.

    config = LayerConfig(…)                       a module has one, and a new one when an attribute of it is assigned
    plan = config.plan(recipe, name, dtype, …)    looked up; resolved when it is asked for the first time

Both are constants of a graph: the compiler guards on the configuration and on the recipe, by `==`, and looks up the
plan while it traces. So modules of one configuration share their graphs.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from mezzotint.functional.linear import LinearQuantizers, Needs, Numerics
from mezzotint.functional.norm import NormOptions
from mezzotint.functional.tensor_parallel import Parallel, gathers, splits_of
from mezzotint.layer.names import join_path
from mezzotint.layer.unpacking import unpack_operands
from mezzotint.recipe import (
    FORWARD_TENSORS,
    RULED_TENSORS,
    CustomRecipe,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    Rules,
)
from mezzotint.region import RegionOptions
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.partition import needs_whole_amaxes
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tracing import traced_as

NO_QUANTIZERS = LinearQuantizers(None, None, None)
PLANS = 4096  # the number of plans that are kept; those that were used last stay


@dataclass(frozen=True)
class Plan(GraphConstant):
    """A `Plan` says what one run of a module does, for each of its GEMMs."""

    quantizers: tuple[LinearQuantizers, ...]
    needs: tuple[Needs, ...]
    numerics: tuple[Numerics, ...]
    request: DelayedScalingRequest | None  # the state that its quantizers need
    has_backward: bool
    parallels: tuple[Parallel | None, ...]
    saves_original_input: bool  # a linear keeps its unquantized input, and backward quantizes it
    weights_again: tuple[Quantizer | None, ...]  # backward quantizes a weight again with it; None: it reads forward's
    inputs_again: tuple[Quantizer | None, ...]  # backward quantizes an input again with it; None: it reads forward's
    compresses: bool  # the input of the activation is held in FP8 blocks
    is_inspected: bool = False  # an inspector compares tensors with their quantized copies
    checks_finite: bool = False  # values that are not finite are counted when a tensor is quantized
    repeats: bool = False  # the form of the tensors decides which calls a run makes
    shared_input: Quantizer | None = None  # of the copy of the input that linears hold together (`shared_input.py`)

    def quantizes_again(self) -> bool:
        """Return whether backward quantizes again what forward has quantized."""
        return self.saves_original_input or any(self.weights_again) or any(self.inputs_again)


@dataclass(frozen=True)
class NormInFront(GraphConstant):
    """A `NormInFront` describes the norm in front of a module's GEMMs, and whether its output is an output of the
    module."""

    options: NormOptions
    is_returned: bool
    is_gathered: bool  # it is returned for the tokens of all ranks


@dataclass(frozen=True)
class LayerConfig(GraphConstant):
    """A `LayerConfig` holds what a module was made with: its plans, and what its forward does around them, depend on
    nothing else of the module."""

    module_type: str = ""
    gemm_names: tuple[str, ...] = ()  # the part of each GEMM's name behind the module's own
    saves_original_input: bool = False
    parallels: tuple[Parallel | None, ...] = ()  # how the weight of each GEMM is split
    is_parallel: bool = False  # one of them is split
    in_features: int = 0
    weight_names: tuple[tuple[str, ...], ...] = ()  # for each GEMM: one, or its parts; () if they are no parameters
    bias_names: tuple[tuple[str, ...], ...] = ()
    accumulates: bool = False  # weight gradients go elsewhere than to autograd
    return_bias: bool = False
    return_layernorm_output: bool = False
    gathers_norm: bool = False
    norm: NormOptions | None = None
    activation: str = ""
    activation_params: tuple[float, ...] = ()
    recomputes: bool = False  # backward runs norm, fc1 and activation of a `LayerNormMLP` again
    makes_again: bool = False  # backward quantizes inputs again if the memory mode says so
    is_grouped: bool = False  # each GEMM has a group of rows, and one product serves all groups
    memory: str | None = None  # the module's own memory mode; None: the region's
    is_inspected: bool = False
    ruled: tuple[tuple[Rules, Recipe | None], ...] = ()  # what each `Rules` that it was bound to gives it

    def under(self, rules: Rules) -> Recipe | None:
        """Return the recipe that the module was bound to by these rules (`bind.py`)."""
        for known, recipe in self.ruled:
            if known is rules or known == rules:
                return recipe
        raise ValueError(
            f"a module ({self.module_type}) runs in a region with Rules that it was not bound to: call "
            "mezzotint.bind_rules(model, rules) once, when the model is made, so that each module knows its name"
        )

    def plan(
        self,
        recipe: Recipe | None,
        name: str,
        dtype: torch.dtype,
        needs: tuple[Needs, ...],
        keeps_weights: bool,
        options: RegionOptions,
    ) -> Plan:
        """Return the plan of a run under this recipe, or in high precision if it is None.

        `name` is the module's if the recipe may go by it, else "", so that modules of other names have the same plan.
        `keeps_weights` says that the quantized weights serve other microbatches too. `options` are the region's.
        """
        is_kept = recipe is None or recipe.answers_once()
        return (_kept_plan if is_kept else _resolve)(self, recipe, name, dtype, needs, keeps_weights, options)

    def state_plan(self, request: DelayedScalingRequest | None, quantizers: tuple[LinearQuantizers, ...] = ()) -> Plan:
        """Return the plan of an operation without GEMMs: it holds delayed scaling's state, and quantizers unless the
        operation decides on them itself."""
        return Plan(
            quantizers=quantizers,
            needs=(),
            numerics=(),
            request=request,
            has_backward=True,
            parallels=(),
            saves_original_input=False,
            weights_again=(),
            inputs_again=(),
            compresses=False,
        )

    def role(self, name: str, gemm: int, tensor_type: str) -> QuantizerRole:
        """Return what a recipe is told about a tensor of the module of this name."""
        return QuantizerRole(self.module_type, tensor_type, join_path(name, self.gemm_names[gemm]))


def _resolve(
    config: LayerConfig,
    recipe: Recipe | None,
    name: str,
    dtype: torch.dtype,
    needs: tuple[Needs, ...],
    keeps_weights: bool,
    options: RegionOptions,
) -> Plan:
    quantizers: tuple[LinearQuantizers, ...] = (NO_QUANTIZERS,) * len(needs)
    nothing: tuple[Quantizer | None, ...] = (None,) * len(needs)
    weights, inputs, request = nothing, nothing, None
    is_lean = (config.memory or options.memory) != "default"
    if recipe is not None:
        quantizers, request = _resolve_quantizers(config, recipe, name, needs)
        if not keeps_weights:
            weights = tuple([_weight_again(config, gemm, each.weight) for gemm, each in enumerate(quantizers)])
        if config.makes_again and is_lean:
            inputs = tuple([_input_again(config, gemm, each.input) for gemm, each in enumerate(quantizers)])
        if config.is_grouped:  # of all groups, or of none
            weights, inputs = weights if all(weights) else nothing, inputs if all(inputs) else nothing
        quantizers = tuple(map(_without_columns, quantizers, weights, inputs))
        # Only single products may read what is unpacked: operations, which make no inputs again, hand it on.
        is_read = config.is_inspected or options.checks_finite or recipe.override() is not None
        if config.makes_again and not (is_read or config.is_grouped or any(config.parallels)):
            each = [unpack_operands(*own, keeps_weights) for own in zip(quantizers, weights, inputs, strict=True)]
            quantizers, weights, inputs = map(tuple, zip(*each, strict=True))
    repeats = _repeats(config, recipe, quantizers, request, options)
    return Plan(
        quantizers=quantizers,
        needs=needs,
        numerics=tuple([resolve_numerics(recipe, gemm, dtype) for gemm in range(len(needs))]),
        request=request,
        has_backward=any(need.input or need.weight or need.bias for need in needs),
        parallels=config.parallels,
        saves_original_input=config.saves_original_input,
        weights_again=weights,
        inputs_again=inputs,
        compresses=(config.memory or options.memory) == "compressed" and any(inputs),
        is_inspected=config.is_inspected and recipe is not None,
        checks_finite=options.checks_finite and recipe is not None,
        repeats=repeats,
        shared_input=_shared_input(config, quantizers) if repeats else None,
    )


def _repeats(
    config: LayerConfig,
    recipe: Recipe | None,
    quantizers: tuple[LinearQuantizers, ...],
    request: DelayedScalingRequest | None,
    options: RegionOptions,
) -> bool:
    """Return whether the form of the tensors decides which calls a run makes. A user's own code may decide otherwise,
    and runs that ask other ranks or look at values do."""
    if any(config.parallels) or config.is_inspected or options.checks_finite:
        return False
    if recipe is not None and not recipe.answers_once():
        return False
    each = [one for own in quantizers for one in (own.input, own.weight, own.grad_output) if one is not None]
    is_own = any(one.is_custom() or not one._is_value() for one in each)
    return not (is_own or (request is not None and request.has_own_rule()))


def _shared_input(config: LayerConfig, quantizers: tuple[LinearQuantizers, ...]) -> Quantizer | None:
    """Return the quantizer of the copy of its input that a linear holds for backward. Return None if another linear
    that reads the same tensor cannot hold it, too: if it keeps none, or quantizes by a scale or random numbers of its
    own."""
    if config.norm is not None or not config.makes_again or config.is_grouped:  # its input comes from itself
        return None
    quantizer = quantizers[0].input
    if quantizer is None or not quantizer.columnwise_usage:
        return None
    if quantizer.takes_scale() or not quantizer.is_requantization_safe():
        return None
    return _columns_of(quantizer)


@lru_cache(maxsize=PLANS)
def _columns_of(quantizer: Quantizer) -> Quantizer:
    """Return the quantizer of the column-wise copy; for equal ones it is the very same object, which is fast to
    compare."""
    return quantizer.with_usage(rowwise=False, columnwise=True)


def _weight_again(config: LayerConfig, gemm: int, quantizer: Quantizer | None) -> Quantizer | None:
    """Return the quantizer with which backward quantizes a weight again. Return None if backward reads what forward
    made: if the weight is put together for each run, or could not be quantized as forward did."""
    is_parameter = config.is_grouped or (bool(config.weight_names) and len(config.weight_names[gemm]) == 1)
    return _again(config, gemm, "weight", quantizer) if is_parameter else None


def _input_again(config: LayerConfig, gemm: int, quantizer: Quantizer | None) -> Quantizer | None:
    """Return the quantizer with which backward quantizes an input again, or None if it reads what forward made."""
    return None if gathers(config.parallels[gemm], "input") else _again(config, gemm, "input", quantizer)


def _again(config: LayerConfig, gemm: int, tensor_type: str, quantizer: Quantizer | None) -> Quantizer | None:
    """Return the quantizer that makes the column-wise copy of a tensor in backward. Return None if other ranks would be
    asked again, if the quantizer would make something else, or if nobody reads that copy."""
    if quantizer is None or config.recomputes:
        return None
    if any(needs_whole_amaxes(quantizer, split.dim) for split in splits_of(config.parallels[gemm], tensor_type)):
        return None
    if quantizer.is_custom() or not quantizer.columnwise_usage or not quantizer.is_requantization_safe():
        return None
    return quantizer.with_usage(rowwise=False, columnwise=True)


def _without_columns(quantizers: LinearQuantizers, weight: Quantizer | None, x: Quantizer | None) -> LinearQuantizers:
    """Return the quantizers of a GEMM without the column-wise copies that backward makes again."""
    if weight is not None and quantizers.weight is not None:
        quantizers = replace(quantizers, weight=quantizers.weight.with_usage(rowwise=True, columnwise=False))
    if x is not None and quantizers.input is not None:
        quantizers = replace(quantizers, input=quantizers.input.with_usage(rowwise=True, columnwise=False))
    return quantizers


_kept_plan = lru_cache(maxsize=PLANS)(_resolve)


def _walk_through_factory(config: LayerConfig, recipe: Recipe, name: str) -> None:
    if isinstance(recipe, CustomRecipe):
        for gemm in range(len(config.gemm_names)):
            for tensor_type in ("input", "weight", "grad_output"):
                recipe.qfactory(config.role(name, gemm, tensor_type))


@traced_as(_walk_through_factory)
def guard_on_factory(config: LayerConfig, recipe: Recipe, name: str) -> None:
    """Have a graph guard on all that a factory reads, by tracing through it: when its answer changes, there is another
    graph. Eager code asks it anyway."""


def plan_anew(
    config: LayerConfig,
    recipe: Recipe,
    name: str,
    dtype: torch.dtype,
    needs: tuple[Needs, ...],
    keeps_weights: bool,
    options: RegionOptions,
) -> Plan:
    """Return the plan under a recipe that is asked at each run."""
    guard_on_factory(config, recipe, name)
    return config.plan(recipe, name, dtype, needs, keeps_weights, options)


def _resolve_quantizers(
    config: LayerConfig, recipe: Recipe, name: str, needs: tuple[Needs, ...]
) -> tuple[tuple[LinearQuantizers, ...], DelayedScalingRequest | None]:
    """Return quantizers that make only the directions which are read, and the state that they need."""
    request: DelayedScalingRequest | None = None
    found: list[LinearQuantizers] = []
    for gemm, need in enumerate(needs):
        recipes = _recipes_of(recipe, gemm)
        if not recipes:
            found.append(NO_QUANTIZERS)
            continue
        override, keeps_wgrad = recipes[0].override(), recipes[0].keeps_wgrad()
        saves_input = config.saves_original_input or keeps_wgrad
        made: list[Quantizer | None] = []
        for tensor_type, rowwise, columnwise in (
            ("input", True, need.weight and override is None and not saves_input),
            ("weight", True, need.input and override is None),
            ("grad_output", need.input or config.is_inspected, need.weight and not keeps_wgrad),
        ):
            if tensor_type == "grad_output" and (override is not None or not (need.input or columnwise)):
                made.append(None)
                continue
            role = config.role(name, gemm, tensor_type)
            own = recipe.of(gemm, tensor_type)
            quantizer = IdentityQuantizer() if own is None else own.quantizer(role)
            if isinstance(quantizer, QuantizerRequest):
                asked = delayed_request(quantizer)
                if request is not None and asked != request:
                    raise ValueError(
                        f"{role} asks for {asked}, another tensor of the module for "
                        f"{request}: the requests of one module must be equal"
                    )
                request = asked
                quantizer = asked.scaled_quantizer(tensor_type in FORWARD_TENSORS)
            made.append(quantizer.with_usage(rowwise=rowwise, columnwise=columnwise))
        found.append(LinearQuantizers(made[0], made[1], made[2]))
    return tuple(found), request


def _recipes_of(recipe: Recipe, gemm: int) -> list[Recipe]:
    """Return the recipes of one GEMM's tensors; the list is empty if it computes in high precision."""
    found = [recipe.of(gemm, tensor_type) for tensor_type in RULED_TENSORS]
    return [each for each in found if each is not None]


def resolve_numerics(recipe: Recipe | None, gemm: int, dtype: torch.dtype) -> Numerics:
    """Return how the three products of a GEMM compute. Without a recipe that is high precision: a weight that is kept
    quantized is dequantized, to the same values forward and backward. With several recipes, each must allow fast
    accumulation."""
    recipes = [] if recipe is None else _recipes_of(recipe, gemm)
    if not recipes:
        return Numerics(
            dtype=dtype, fast_fprop=False, fast_dgrad=False, fast_wgrad=False, override="dequantized", keeps_wgrad=False
        )
    fast_fprop, fast_dgrad, fast_wgrad = map(all, zip(*[each.products() for each in recipes], strict=True))
    return Numerics(
        dtype=dtype,
        fast_fprop=fast_fprop,
        fast_dgrad=fast_dgrad,
        fast_wgrad=fast_wgrad,
        override=recipes[0].override(),
        keeps_wgrad=recipes[0].keeps_wgrad(),
    )


def delayed_request(request: Any) -> DelayedScalingRequest:
    """Return the request if modules can keep state for it, and raise otherwise."""
    if not isinstance(request, DelayedScalingRequest):
        raise TypeError(
            f"a quantizer request is {type(request).__name__}: modules keep state for DelayedScalingRequest"
        )
    return request
