"""OperationFuser: it fuses a list of operations and runs it as one pipeline (`pipeline.py`).

Dynamo would walk through all operations of this package, and guard on all that it meets there. So a graph guards on the
name of each operation's configuration instead, and has the pipeline run below Dynamo, on stand-ins that are made from
the configurations (`stand_in.py`). Dynamo walks only through pipelines in which users have a part: operations or
fusions of their own, or keyword arguments of a run.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.layer.base import activation_dtype
from mezzotint.layer.boundary import dequantized
from mezzotint.layer.configured import config_of
from mezzotint.layer.weights import named
from mezzotint.ops.fusion import (
    BACKWARD_FUSIONS,
    FORWARD_BACKWARD_FUSIONS,
    FORWARD_FUSIONS,
    PlacedOperation,
    are_fusions_ours,
    expand,
    fuse_for,
)
from mezzotint.ops.op import BasicOperation, FusibleOperation, enter_pipeline, init_own_state
from mezzotint.ops.pipeline import Pipeline, first_that_needs_grad, run_pipeline
from mezzotint.ops.run import Start
from mezzotint.ops.stand_in import PIPELINES, PipelineConfig, run_stand_ins
from mezzotint.ops.wiring import Wiring
from mezzotint.region import recipe_in_force
from mezzotint.tracing import call_untraced, eager_only, memoized, traced_as

__all__ = ["OperationFuser"]


class OperationFuser:
    """An `OperationFuser` is a pipeline of operations: it is fused for the recipe in force, and again when that
    changes.

    `ops.Sequential` makes one for each run of operations; users need not.

    Args:
        ops: The operations, in order.

    Raises:
        ValueError: If there is none.

    Example:
        >>> import torch
        >>> from mezzotint import ops
        >>> pipeline = ops.OperationFuser([ops.ReLU(), ops.ConstantScale(2.0)])
        >>> torch.equal(pipeline(torch.ones(4)), torch.full((4,), 2.0))
        True
    """

    forward_backward_fusion_functions = FORWARD_BACKWARD_FUSIONS
    forward_fusion_functions = FORWARD_FUSIONS
    backward_fusion_functions = BACKWARD_FUSIONS

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._ops = list(ops)
        self._basic_ops = expand(self._ops)
        if not self._basic_ops:
            raise ValueError("ops is empty: a pipeline needs at least one operation")
        self._wired: Wiring | None = None
        self._fused: Any = None  # the memo of `_groups`
        self._has_run = False
        call_untraced(_enter, tuple(self._basic_ops))
        _check_wiring(self)

    @property
    def _wiring(self) -> Wiring:
        if self._wired is None:
            self._wired = Wiring(self._basic_ops)
        return self._wired

    @property
    def num_extra_inputs(self) -> int:
        """Return how many extra inputs the caller gives."""
        return self._num_extra_inputs(config_in_graph(self._ops, self._basic_ops))

    def _num_extra_inputs(self, config: PipelineConfig | None) -> int:
        return self._wiring.num_caller_inputs if config is None else config.num_extra_inputs

    def maybe_fuse_ops(
        self, is_grad_enabled: bool, recipe: Any, input_: torch.Tensor, extra_inputs: Sequence[Any]
    ) -> tuple[list[PlacedOperation], list[PlacedOperation]]:
        """Return the forward groups, and the backward groups from the end, of a run with these tensors."""
        params = [op._trained() for op in self._basic_ops]
        with torch.set_grad_enabled(is_grad_enabled):
            first = first_that_needs_grad(input_, params, extra_inputs, self._wiring.inputs)
        return self._groups(recipe, first)

    def _groups(self, recipe: Any, first: int) -> tuple[list[PlacedOperation], list[PlacedOperation]]:
        """Return the forward groups, and the backward groups from the end; `first` is the first operation that needs a
        gradient."""
        return memoized(self, "_fused", (recipe, first), lambda: fuse_for(self._ops, self._basic_ops, recipe, first))

    @property
    def _forward_ops(self) -> list[PlacedOperation]:
        """Return the operations of the last forward that eager code ran."""
        return [] if self._fused is None else self._fused[1][0]

    @property
    def _backward_ops(self) -> list[PlacedOperation]:
        """Return the operations of the backward that belongs to the last forward, in the order of forward."""
        return [] if self._fused is None else self._fused[1][1][::-1]

    def __call__(
        self, input: torch.Tensor, *extra_inputs: Any, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """Run the pipeline, and return the output, or (output, *extra outputs). `basic_op_kwargs` holds the keyword
        arguments of each basic operation."""
        config = config_in_graph(self._ops, self._basic_ops)
        wanted = self._num_extra_inputs(config)
        if len(extra_inputs) != wanted:
            raise ValueError(
                f"{len(extra_inputs)} extra inputs were given: {[type(op).__name__ for op in self._basic_ops]} take "
                f"{wanted}"
            )
        if basic_op_kwargs is None:
            basic_op_kwargs = [{} for _ in self._basic_ops]
        elif len(basic_op_kwargs) != len(self._basic_ops):
            raise ValueError(
                f"basic_op_kwargs has {len(basic_op_kwargs)} entries: this pipeline has {len(self._basic_ops)} basic "
                "operations, give a dict for each"
            )
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input is {type(input).__name__}: give a torch.Tensor")
        if config is None or any(basic_op_kwargs):
            return self._run(input, extra_inputs, basic_op_kwargs)
        return self._run_stand_ins(config, _activation(input), extra_inputs)

    def _run_stand_ins(self, config: PipelineConfig, input_: torch.Tensor, extra_inputs: Sequence[Any]) -> Any:
        """Run the pipeline in a graph that holds one call for it."""
        params, extra_inputs = [], list(extra_inputs)
        for op, own, sources in zip(self._basic_ops, config.operations, config.sources, strict=True):
            params.append(tuple([named(op, (name,)) for name in own.tensors]))
            if own.is_parallel:
                op._check_others(input_)
            for index, source in enumerate(sources):
                if not isinstance(source, str):
                    extra_inputs[source] = op._read_extra_input(index, extra_inputs[source])
        first = first_that_needs_grad(input_, params, extra_inputs, config.sources)
        needs_input_grad = torch.is_grad_enabled() and input_.requires_grad
        starts: list[Start | None] = []
        for place, (op, own) in enumerate(zip(self._basic_ops, config.operations, strict=True)):
            has_input_grad = place > first or needs_input_grad
            needs = {"requires_grad": place >= first, "input_requires_grad": has_input_grad}
            starts.append(op._start(**needs) if own.has_quantizers else None)
        given = input_, tuple(extra_inputs), tuple(params), tuple(starts)
        outputs = run_stand_ins(config, recipe_in_force(), first, needs_input_grad, *given)
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, input_: Any, extra_inputs: Sequence[Any], basic_op_kwargs: list[dict[str, Any]]) -> Any:
        self._before_first_run()
        input_ = _activation(input_)
        params = [op._trained() for op in self._basic_ops]
        first = first_that_needs_grad(input_, params, extra_inputs, self._wiring.inputs)
        needs_input_grad = torch.is_grad_enabled() and input_.requires_grad
        recipe = recipe_in_force()
        forward, backward = self._groups(recipe, first)
        # A forward in whole form, as users write it, cannot be in a graph: Dynamo must meet here what ends the graph.
        if torch.compiler.is_dynamo_compiling() and not all(op.is_split for op, _ in forward):
            return FusibleOperation._untraced(self._run, input_, extra_inputs, basic_op_kwargs)
        for op in self._basic_ops:
            op._check_others(input_)
        extra_inputs = self._wiring.read(self._basic_ops, extra_inputs)
        starts = []
        for place, op in enumerate(self._basic_ops):
            op.pre_fuser_forward(requires_grad=place >= first)
            has_input_grad = place > first or needs_input_grad
            given = {"requires_grad": place >= first, "input_requires_grad": has_input_grad, **basic_op_kwargs[place]}
            starts.append(op._start(**given))
        pipeline = Pipeline(
            self._basic_ops,
            forward,
            backward,
            self._wiring,
            basic_op_kwargs,
            starts,
            [len(own) for own in params],
            first,
            needs_input_grad,
        )
        outputs = run_pipeline(pipeline, input_, [param for own in params for param in own], extra_inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _before_first_run(self) -> None:
        if not self._has_run:
            self._has_run = True
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
                call_untraced(init_own_state, op)


def _enter(ops: tuple[BasicOperation, ...]) -> None:
    for op in ops:
        enter_pipeline(op)


@eager_only()
def _check_wiring(fuser: OperationFuser) -> None:
    """Check the channels of a pipeline that is made in eager code."""
    fuser._wiring  # noqa: B018


def _activation(input_: Any) -> torch.Tensor:
    """Return a pipeline's input in high precision, in the dtype of activations."""
    x = dequantized(input_)
    return x.to(activation_dtype(x))


def _prepare(ops: tuple[BasicOperation, ...]) -> None:
    for op in ops:
        op.pre_first_fuser_forward()
        init_own_state(op)


def _find_config(ops: list[FusibleOperation], basic_ops: list[BasicOperation]) -> PipelineConfig | None:
    if not are_fusions_ours() or not all(op._has_stand_in for op in ops):
        return None
    call_untraced(_prepare, tuple(basic_ops))
    return PIPELINES.of(tuple([config_of(op) for op in basic_ops]))


@traced_as(_find_config)
def config_in_graph(ops: list[FusibleOperation], basic_ops: list[BasicOperation]) -> PipelineConfig | None:
    """Return the configuration of a pipeline that a graph runs on stand-ins, or None if Dynamo walks through it. Eager
    code runs the operations themselves."""
    return None


FusibleOperation._fuser_class = OperationFuser
