"""Pipelines in a graph: they run below Dynamo, on stand-ins of their operations.

The operations themselves cannot be there, because a graph serves all pipelines of equal configurations. So the graph
guards on each operation's configuration, and hands over what differs: parameters, and what each operation has started
with. All that computes is what eager code runs, too.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mezzotint.layer.plan import PLANS
from mezzotint.ops.config import OperationConfig
from mezzotint.ops.fusion import fuse_for
from mezzotint.ops.pipeline import Pipeline, run_pipeline
from mezzotint.ops.run import Start
from mezzotint.ops.wiring import Wiring
from mezzotint.recipe import Recipe
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tracing import below_dynamo


@dataclass(frozen=True)
class PipelineConfig(GraphConstant):
    """A `PipelineConfig` holds the configurations of a pipeline's operations, and what follows from them."""

    operations: tuple[OperationConfig, ...]
    sources: tuple[tuple[int | str, ...], ...]  # where extra inputs come from: `Wiring.inputs`
    num_extra_inputs: int


class _Pipelines(GraphConstant):
    """The one `_Pipelines` is a constant, so that its method is run while a graph is traced."""

    def of(self, operations: tuple[OperationConfig, ...]) -> PipelineConfig:
        return _pipeline_config(operations)


PIPELINES = _Pipelines()


@lru_cache(maxsize=PLANS)
def _pipeline_config(operations: tuple[OperationConfig, ...]) -> PipelineConfig:
    wiring = Wiring([each.stand_in([torch.empty(0)] * len(each.tensors)) for each in operations])
    return PipelineConfig(operations, tuple(wiring.inputs), wiring.num_caller_inputs)


@below_dynamo
def run_stand_ins(
    config: PipelineConfig,
    recipe: Recipe | None,
    first: int,
    needs_input_grad: bool,
    input_: torch.Tensor,
    extra_inputs: tuple[Any, ...],
    params: tuple[tuple[torch.Tensor, ...], ...],
    starts: tuple[Start | None, ...],
) -> tuple[torch.Tensor, ...]:
    """Run a pipeline on stand-ins that have these parameters, and return the output and the extra outputs. `first` is
    the first operation that needs a gradient, `starts` holds what each operation has started with."""
    ops = [own.stand_in(tensors) for own, tensors in zip(config.operations, params, strict=True)]
    pipeline = Pipeline(
        ops,
        *fuse_for(ops, ops, recipe, first),
        Wiring(ops),
        [{} for _ in ops],
        starts,
        [len(own) for own in params],
        first,
        needs_input_grad,
    )
    return run_pipeline(pipeline, input_, [param for own in params for param in own], extra_inputs)
