"""The base of the linear-like modules: it puts upstream's interface over `layer/`, and makes what a forward returns."""

from collections.abc import Sequence
from typing import Any

import torch

from mezzotint.compat.base_module import UpstreamNames, quantize_weight
from mezzotint.functional.delayed import take
from mezzotint.kernels.float8 import float8_amax
from mezzotint.layer.base import Layer, activation_dtype
from mezzotint.layer.bind import of_module, recipe_for
from mezzotint.layer.delayed_run import await_update, grad_state_of
from mezzotint.layer.plan import LayerConfig
from mezzotint.layer.run import RunSettings, scale_of
from mezzotint.layer.scaling_state import grow_history, use_history
from mezzotint.quantization import reduction_groups
from mezzotint.recipe import BACKWARD_TENSORS, FORWARD_TENSORS, QuantizerRole, Recipe
from mezzotint.region import current_state
from mezzotint.tensor.float8 import Float8Quantizer
from mezzotint.tensor.quantizer import Quantizer
from mezzotint.tensor.storage import QuantizedTensorStorage

__all__ = ["TransformerEngineBaseModule", "quantize_weight"]


class TransformerEngineBaseModule(UpstreamNames, Layer):
    """The base of the linear-like modules, which adds upstream's methods and properties to `Layer`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.return_bias = False
        self.return_layernorm_output, self.return_layernorm_output_gathered = False, False
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None

    # State

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the state of the recipe in force before the first forward. `num_gemms` is for a user's own module that
        has not said how many GEMMs it has."""
        if not self._has_state() or (not self._weights and num_gemms != self.num_gemms):
            self._init_state(num_gemms, self._parameter_device())
        recipe = of_module(self, current_state().recipe)
        if recipe is not None:
            self.init_fp8_meta_tensors(recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Make the state that a recipe needs: a history that is long enough."""
        self._recipe = recipe = recipe.frozen()
        if not self._has_state():
            self._init_state(self.num_gemms, self._parameter_device())
        request = self._request_of(recipe)
        if request is None:
            self._run_status.request = None
        else:
            grow_history(self, request.amax_history_len)
            use_history(self, request)

    def _prepare_delayed(self) -> None:
        """Prepare delayed scaling for a forward of a user's own module, whose quantizers enter amaxes themselves.
        Forward scales are updated at the end of the region; those of gradients now, because nobody says when the
        backward of such a module is over."""
        request, state = self._request, current_state()
        if request is not None and state.enabled:
            groups = reduction_groups(request, state.group, self._sharing_group())
            await_update(self, groups, state)
            if torch.is_grad_enabled():
                take(grad_state_of(self, request, groups, False), self.amax_history_fwd)

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        """Set `activation_dtype` to the dtype in which a forward with this input computes."""
        self.activation_dtype = activation_dtype(inp)

    @property
    def quantizers(self) -> dict[str, list[Quantizer]]:
        """Return the quantizers of the recipe in use, slot by slot, for "scaling_fwd" and "scaling_bwd"; {} without a
        recipe."""
        recipe = self._recipe_in_use()
        if recipe is None:
            return {}
        return {
            key: [self._live_quantizer(recipe, gemm, kind) for gemm in range(self.num_gemms) for kind in types]
            for key, types in (("scaling_fwd", FORWARD_TENSORS), ("scaling_bwd", BACKWARD_TENSORS))
        }

    def _boundary_quantizer(self, gemm: int, tensor_type: str, call: RunSettings | None = None) -> Quantizer:
        """Return the row-wise quantizer of a tensor that leaves the module quantized.

        A recomputation (`call`) uses the scale of the first run and writes no state.
        """
        recipe = recipe_for(self)
        if recipe is None or recipe.of(gemm, tensor_type) is None:
            raise ValueError("fp8_output and fp8_grad need a recipe: call the module inside autocast(recipe=...)")
        quantizer = self._live_quantizer(recipe, gemm, tensor_type)
        if call is not None and call.scales is not None and not call.records and isinstance(quantizer, Float8Quantizer):
            scale = scale_of(call.scales, gemm, tensor_type)
            quantizer = Float8Quantizer(scale, torch.zeros_like(scale), quantizer.dtype)
        return quantizer.with_usage(rowwise=True, columnwise=False)

    # Roles

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Return the role of the module's output, set by someone who knows what reads it; None means the module's own
        role."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role = role

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role = role

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int | None = None) -> list[QuantizerRole]:
        """Return the roles of the module's tensors, slot by slot."""
        types = FORWARD_TENSORS if fwd else BACKWARD_TENSORS
        roles = [self._role(gemm, kind) for gemm in range(self.num_gemms) for kind in types]
        return roles if num_quantizers is None else roles[:num_quantizers]

    def _role(self, gemm: int, tensor_type: str) -> QuantizerRole:
        if tensor_type == "output" and gemm == self.num_gemms - 1 and self._output_role is not None:
            return self._output_role
        if tensor_type == "grad_input" and gemm == 0 and self._grad_input_role is not None:
            return self._grad_input_role
        return super()._role(gemm, tensor_type)

    # What forward returns

    def _calibrate(self, inputs: Sequence[Any], weights: Sequence[Any]) -> None:
        """Write the amaxes of each GEMM's input and weight to the history, in a run that computes in high precision."""
        with torch.no_grad():
            for tensor_type, tensors in (("input", inputs), ("weight", weights)):
                for gemm, tensor in enumerate(tensors):
                    seen = scale_of(self.amax_history_fwd[0], gemm, tensor_type)
                    is_held = isinstance(tensor, QuantizedTensorStorage)
                    seen.copy_(float8_amax(tensor.dequantize() if is_held else tensor.detach()))

    def _config_fields(self) -> dict[str, Any]:
        return {
            **super()._config_fields(),
            "return_bias": self.return_bias,
            "return_layernorm_output": self.return_layernorm_output,
            "gathers_norm": self.return_layernorm_output_gathered,
        }


def outputs_of(
    config: LayerConfig, y: Any, bias: torch.Tensor | None, dtype: torch.dtype, norm_out: Any, residual: Any
) -> Any:
    """Return what forward returns: y, or (y[, bias][, norm's output][, residual]), as the module was asked to."""
    outputs: list[Any] = [y]
    if config.return_bias:
        outputs.append(None if bias is None else bias.to(dtype))
    if config.return_layernorm_output:
        outputs.append(norm_out)
    if residual is not None:
        outputs.append(residual)
    return y if len(outputs) == 1 else tuple(outputs)
