"""Quantize: this operation makes x a quantized tensor, or the gradient, or both."""

from typing import Any

from mezzotint.layer.configured import config_of
from mezzotint.layer.delayed_run import delayed_of, start_delayed
from mezzotint.layer.plan import guard_on_factory
from mezzotint.layer.run import RunSettings
from mezzotint.layer.scaling_state import note_recipe
from mezzotint.ops.context import OperationContext
from mezzotint.ops.op import BasicOperation
from mezzotint.ops.quantizing import quantized
from mezzotint.ops.run import Run, Start
from mezzotint.recipe import choose_recipe
from mezzotint.region import current_state, recipe_in_force
from mezzotint.tensor.storage import QuantizedTensorStorage


class Quantize(BasicOperation):
    """This operation quantizes x as the recipe in force quantizes inputs.

    Without a recipe, and for what is quantized already, it is the identity.

    Args:
        forward: Whether x is quantized. The default is True.
        backward: Whether the gradient of x is quantized, as the recipe quantizes gradients. The default is False.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> quantize = mz.ops.Quantize()
        >>> with mz.autocast("mxfp8"):
        ...     y = quantize(torch.randn(32, 32))
        >>> isinstance(y, mz.MXFP8Tensor)
        True
    """

    _takes_run = True
    _keywords = ()
    _READS = ("_quantize_forward", "_quantize_backward")

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward, self._quantize_backward = forward, backward
        self._end_init()

    def num_quantizers(self, mode: str) -> int:
        return int(self._quantize_forward if mode == "forward" else self._quantize_backward)

    def _input_quantizer(self, run: Any) -> Any:
        return None  # this operation quantizes itself, in all directions of the recipe

    def _grad_output_quantizer(self, run: Any) -> Any:
        return None

    def _start(self, *, requires_grad: bool, input_requires_grad: bool, **kwargs: Any) -> Start | None:
        self._check_keywords(kwargs)
        config = config_of(self)
        recipe = choose_recipe(recipe_in_force(), config)
        if recipe is None or not config.has_quantizers:
            return None
        note_recipe(self, recipe)
        name = "" if recipe.answers_once() else self._name
        if not recipe.answers_once():
            guard_on_factory(config, recipe, name)
        plan = config.quantize_plan(recipe, name, self._quantize_forward, self._quantize_backward)
        if plan.request is None:
            return Start(plan)
        call = start_delayed(self, config, RunSettings(plan), current_state())
        return Start(plan, delayed_of(self, call))

    def op_forward_compute(self, input_: Any, *, run: Run | None, **given: Any) -> tuple[Any, tuple[Any, ...]]:
        quantizer = None if run is None else run.quantizer(0, "input", run.plan.quantizers[0].input)
        return _quantized(input_, quantizer), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: tuple[Any, ...], *, run: Run | None, **given: Any
    ) -> None:
        quantizer = None if run is None else run.quantizer(0, "grad_output", run.plan.quantizers[0].grad_output)
        ctx.quantizer = quantizer

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        return _quantized(grad_output, ctx.quantizer), ()

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"


def _quantized(x: Any, quantizer: Any) -> Any:
    return x if quantizer is None or isinstance(x, QuantizedTensorStorage) else quantized(x, quantizer)
