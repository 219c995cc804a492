"""Modules that hold shards of their weights: this module says which shards, and checks that all ranks of the group
agree.

Ranks compare recipe, input and module when a module first runs with its group in eager code, and while a graph is
traced that runs it with something new. None of this is in the graph. Ranks must not differ in what they have compared,
or one would wait for the others: so a rank remembers what all have agreed on, and does not ask for it again.
"""

from typing import Any

import torch
from torch import nn

from mezzotint.comm.agreement import check_agreed, nobody_answers, without_addresses
from mezzotint.comm.groups import check_group, resolve_size, world_size
from mezzotint.functional.tensor_parallel import Parallel
from mezzotint.layer.bind import recipe_for
from mezzotint.layer.norm import split_norm
from mezzotint.layer.parameters import PlaceParameter
from mezzotint.layer.scaling_state import StatefulModule
from mezzotint.recipe import Recipe
from mezzotint.tensor.partition import Split
from mezzotint.tracing import call_untraced, eager_only


class ParallelModule(StatefulModule):
    """A `ParallelModule` has weights, one for each GEMM, that may be split over the ranks of `tp_group`."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_group: Any = None
        self.parallel_mode: str | None = None
        self.tp_size, self.sequence_parallel = 1, False
        self._modes: tuple[str | None, ...] = ()  # one for each GEMM; () if no weight is split
        self._norm_group: Any = None  # the group over which the parameters of a norm are DTensors

    def _init_parallel(self, tp_group: Any, tp_size: int, sequence_parallel: bool, *modes: str | None) -> None:
        """Set the group, its size and sequence parallelism; `modes` has "column", "row" or None for each GEMM."""
        self.tp_group, self.tp_size = tp_group, resolve_size(tp_group, tp_size)
        self.sequence_parallel = bool(sequence_parallel) and self.tp_size > 1
        self._modes = modes if self.tp_size > 1 and any(modes) else ()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of ranks that share the weights. It must have the size that the module was made for."""
        check_group(tp_group, self.tp_size)
        self.tp_group = tp_group
        self._run_status.agreed = frozenset()
        self._share_weights()

    def _share_weights(self) -> None:
        """Give weights that are kept quantized the scales of the whole weight. This is a collective, which all ranks of
        the group must call, if a weight does not know yet that it is a shard."""
        weights: Any = self._weights
        for each in weights:
            each.share(self)

    def _splits_of(self, shard: torch.Tensor) -> tuple[Split, ...]:
        """Return how the weight that FSDP2 gathers from this shard and others is split over tensor-parallel ranks."""
        weights: Any = self._weights
        for each in weights:
            for name in each.weight_names:
                if getattr(self._parameters[name], "_local_tensor", None) is shard:
                    return each.splits(self)
        return ()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._share_weights()

    def split_over(self, tp_group: Any, sequence_parallel: bool, place: PlaceParameter, *modes: str) -> None:
        """Split the weights of a module that has them whole. `modes` has "column" or "row" for each GEMM.
        `place(parameter, dim, stride)` returns the parameter that is split along `dim`, or kept whole if `dim` is None.
        """
        if self.tp_size > 1:
            raise ValueError(f"{type(self).__name__} is split already, over {self.tp_size} ranks: give a whole one")
        weights: Any = self._weights
        if len(modes) != len(weights):
            raise ValueError(
                f"{type(self).__name__} has {len(weights)} weights: it cannot be split {' and '.join(modes)}"
            )
        has_norm = hasattr(self, "layer_norm_weight")
        if has_norm and sequence_parallel and "layer_norm_weight" not in self._parameters:
            raise ValueError("the norm in front is another module: split it with SequenceParallel, and convert after")
        for each, mode in zip(weights, modes, strict=True):  # check all of them before anything changes
            each.check_split(mode, world_size(tp_group))
        self._init_parallel(tp_group, 1, sequence_parallel, *modes)
        for each, mode in zip(weights, modes, strict=True):
            each.split_over(self, mode, self.tp_size, place)
        if has_norm and "layer_norm_weight" in self._parameters:
            split_norm(self, "layer_norm_", tp_group, place)
        if len(weights) == 1:
            self.in_features, self.out_features = weights[0].in_features, weights[0].out_features
            self.parallel_mode = modes[0]
        self._drop_workspaces()

    def _parallel(self, gemm: int) -> Parallel | None:
        """Return how the weight of a GEMM is split, or None if it is whole."""
        mode = self._modes[gemm] if self._modes else None
        return None if mode is None else Parallel(mode, self.tp_group, self.tp_size, self.sequence_parallel)

    def _split_parameters(self) -> dict[str, tuple[int, int]]:
        """Return the module's own parameters that are this rank's shards, except DTensors, which say so themselves: for
        each name the dimension along which it is split, and how many weights it holds, one below the other."""
        found: dict[str, tuple[int, int]] = {}
        weights: Any = self._weights if self.tp_size > 1 else ()
        for each in weights:
            if each.mode is not None and not each.is_placed:
                names = each.weight_names if each.mode == "row" else (*each.weight_names, *each.bias_names)
                found.update(dict.fromkeys(names, (0 if each.mode == "column" else 1, each.stride)))
        return found

    def _sharing_group(self) -> Any:
        """Return the group of ranks that hold the other shards of this module's tensors, or None if it holds them
        whole."""
        return self.tp_group if self._modes else None

    def _check_parallel(self, inp: torch.Tensor) -> None:
        """Check an input with the other ranks that hold the weights, and its tokens."""
        self._check_ranks(inp)
        self._check_tokens(inp)

    def _check_ranks(self, inp: torch.Tensor) -> None:
        """Check, before weights are quantized, that the ranks agree. What can go wrong over ranks is raised here, on
        each of them, before one waits for another. `inp` is what the module, or the chain of operations that it is in,
        is given."""
        if not self._modes:
            return
        if self.tp_group is None:
            raise ValueError(
                f"tp_size is {self.tp_size} and there is no group: give tp_group, or call set_tensor_parallel_group "
                "before the first forward"
            )
        if not _has_agreed(self):
            call_untraced(_compare, self, recipe_for(self), tuple(inp.shape), inp.dtype)

    def _describe(self) -> str:
        """Return a description of what the ranks that share the module's weights must have alike."""
        dtypes = {str(parameter.dtype) for parameter in self.parameters(recurse=False)}
        modes = " and ".join(map(str, self._modes))
        return f"{self} of {', '.join(sorted(dtypes))}, split by {modes}, sequence_parallel={self.sequence_parallel}"

    def _check_tokens(self, inp: torch.Tensor) -> None:
        if not self.sequence_parallel:
            return
        if inp.dim() < 2:
            raise ValueError(
                f"inp has shape {tuple(inp.shape)}: sequence_parallel needs tokens in a dimension of their own"
            )
        if self._modes[0] == "row" and inp.shape[0] % self.tp_size:
            raise ValueError(
                f"inp has shape {tuple(inp.shape)}: sequence_parallel gives each of {self.tp_size} ranks a share of "
                "the first dimension, which they must divide; pad it"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.tp_group)] = self.tp_group  # a copy is in the same group
        return super().__deepcopy__(memo)


@eager_only(in_graph=False)
def _has_agreed(module: ParallelModule) -> bool:
    """Return whether the module has run with its group. What a graph runs it with is compared while it is traced."""
    return bool(module._run_status.agreed)


def _compare(module: ParallelModule, recipe: Recipe | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare with the ranks that share the module's weights, and raise on all of them if they differ. During an export
    nobody answers, so nothing is compared."""
    if nobody_answers(module.tp_group):
        return
    status, given = module._run_status, (without_addresses(recipe), f"{shape} of {dtype}", module._describe())
    if given not in status.agreed:
        check_agreed(module.tp_group, **dict(zip(("recipe", "inp", "module"), given, strict=True)))
        status.agreed |= {given}


def set_groups(module: nn.Module, tp_group: Any) -> None:
    """Set the group of all modules inside one that is made of others."""
    for child in module.modules():
        if child is not module and hasattr(child, "set_tensor_parallel_group"):
            child.set_tensor_parallel_group(tp_group)  # type: ignore[operator]
