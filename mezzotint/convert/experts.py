"""This module converts experts whose weights lie in 3-D parameters, as transformers 5 has them
(`transformers.integrations.moe`).

Such a module has `gate_up_proj` (or `up_proj`) and `down_proj`, (experts, out, in) or, if `is_transposed`, (experts,
in, out), and says by attributes what is between them. Converted, it is the same object with another class, whose
products are those of `grouped_mm`. Without a recipe it runs as it did. The library itself is never imported.
"""

from typing import Any

import torch
from torch import nn

from mezzotint.convert.modules import Converted, converted_class
from mezzotint.layer.base import settings_of_run
from mezzotint.layer.names import Named
from mezzotint.layer.names import join_path as join_path
from mezzotint.module.grouped_mm import multiply_groups, sizes_of
from mezzotint.recipe import RULED_TENSORS, QuantizerRequest, QuantizerRole, Recipe
from mezzotint.region import RunStatus, current_state

TRANSFORMERS_MOE = "transformers.integrations.moe"
_ADDED = ("recipe", "_name", "_is_named", "_run_status")


def is_experts(module: Any) -> bool:
    """Return whether a module's forward is the one that the library puts in the place of a module's own, or ours."""
    forward = type(module).forward
    return (
        isinstance(module, ConvertedExperts) or getattr(forward, "__globals__", {}).get("__name__") == TRANSFORMERS_MOE
    )


def projections(module: Any) -> tuple[str, str]:
    """Return the names of a module's weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class ConvertedExperts(Converted, Named):
    """These experts run each product under `recipe`, or as the region around them says if it is None."""

    _mezzotint_label = "grouped_mm"
    name: Any = ""  # no property here: the module may have a `name` of its own
    recipe: Recipe | None
    _run_status: RunStatus

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Apply the experts to hidden_states (tokens, hidden), given the experts of each token and their weights
        (tokens, k); the result is (tokens, hidden)."""
        recipe = self._recipe_of_run()
        if recipe is None:
            return self._mezzotint_theirs.forward(self, hidden_states, top_k_index, top_k_weights)
        up, down = projections(self)
        num_tokens, num_choices = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        ends = torch.searchsorted(chosen[order], torch.arange(self.num_experts, device=chosen.device), right=True)
        splits = sizes_of(ends, chosen.shape[0])
        x = self._multiply(up, hidden_states[order // num_choices], splits, recipe)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = self._multiply(down, x, splits, recipe)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        x = (x * top_k_weights.reshape(-1)[order][:, None])[torch.argsort(order)]
        return x.view(num_tokens, num_choices, -1).sum(1).to(hidden_states.dtype)

    def _multiply(self: Any, name: str, x: torch.Tensor, splits: tuple[int, ...], recipe: Recipe) -> torch.Tensor:
        weight = getattr(self, name)
        weight = weight.transpose(1, 2) if self.is_transposed else weight
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return multiply_groups(x, weight, splits, bias, recipe, join_path(self._name, name))

    def _linear_names(self) -> tuple[str, ...]:
        return projections(self)

    def _recipe_of_run(self) -> Recipe | None:
        if self.recipe is not None:
            return self.recipe.frozen()
        state = current_state()
        recipe = state.recipe if state.enabled else None
        return settings_of_run(self._run_status, recipe, state)[0]

    def _mezzotint_forget(self) -> None:
        for name in _ADDED:
            del vars(self)[name]

    def extra_repr(self: Any) -> str:
        recipe = "" if self.recipe is None else f"recipe={type(self.recipe).__name__}"
        return ", ".join(part for part in (self._mezzotint_theirs.extra_repr(self), recipe) if part)


def convert_experts(module: Any, recipe: Recipe | None) -> None:
    """Convert a module of experts in place."""
    module.recipe, module._name, module._is_named, module._run_status = recipe, "", False, RunStatus()
    module.__class__ = converted_class(ConvertedExperts, module.__class__)


def why_not_experts(module: Any, fqn: str, recipe: Recipe | None) -> str | None:
    """Return why these experts cannot be converted, or None if they can."""
    if "forward" in vars(module):
        return "has a forward of its own"
    for name in projections(module):
        weight = module._parameters.get(name)
        if type(weight) is not nn.Parameter or weight.dim() != 3:
            return f"{name} is a {type(weight).__name__}: convert first, then quantize or shard"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are shared out over ranks by transformers"
    taken = sorted(vars(module).keys() & {*_ADDED})
    if taken:
        return f"has attributes that ours need: {', '.join(taken)}"
    if recipe is None:
        return None
    for name in projections(module):
        for tensor_type in RULED_TENSORS:
            role = QuantizerRole("grouped_linear", tensor_type, join_path(fqn, name))
            if isinstance(recipe.quantizer(role), QuantizerRequest):
                return (
                    f"{type(recipe).__name__} keeps scales from step to step, for which experts in one parameter have "
                    "no place: use a recipe without state"
                )
    return None


def sizes_of_experts(module: Any) -> list[tuple[int, int]]:
    """Return (in, out) of each of the module's products."""
    shapes = [getattr(module, name).shape[1:] for name in projections(module)]
    return [(a, b) if module.is_transposed else (b, a) for a, b in shapes]
