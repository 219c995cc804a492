"""One run of an operation that quantizes: what it finds before autograd begins, and what it holds until backward ends.

An operation is started first: it reads the region and its own state. What it finds is a `Start`, of nothing but
constants and tensors, which in a graph go into the function that runs the pipeline. There a `Run` is made of them.
"""

from typing import Any, NamedTuple

from mezzotint.functional.autograd import begin_backward, end_backward
from mezzotint.functional.observation import Probes
from mezzotint.layer.plan import Plan
from mezzotint.layer.run import Delayed, KeptWeights, grad_state, with_copies
from mezzotint.ops.quantizing import DelayedQuantizer
from mezzotint.recipe import FORWARD_TENSORS, slot


class Start(NamedTuple):
    """A `Start` holds the plan of one run, and the tensors outside of the operation that the run reads and writes."""

    plan: Plan
    delayed: Delayed | None = None
    kept: KeptWeights | None = None  # weights that are kept quantized for other microbatches
    wgrads: tuple[tuple[Any, ...], ...] | None = None  # fields of `WeightGrad`, if gradients do not go to autograd
    probes: tuple[Probes, ...] | None = None
    given: tuple[Any, ...] = ()  # tensors of the caller that take results


class Run:
    """A `Run` holds the plan of one run and delayed scaling's state, whose scales are copies that backward can read."""

    __slots__ = ("delayed", "grad_state", "plan")

    def __init__(self, start: Start) -> None:
        self.plan = start.plan
        self.delayed = with_copies(start.delayed)
        self.grad_state = grad_state(start.plan, self.delayed)

    def quantizer(self, gemm: int, tensor_type: str, value: Any) -> Any:
        """Return the quantizer `value` of a tensor. If it takes a scale, return it as a `DelayedQuantizer` with the
        scale of this run, and with the place that its amax goes to."""
        if value is None or not value.takes_scale():
            return value
        state, place = self.delayed, slot(gemm, tensor_type)
        assert state is not None
        if tensor_type in FORWARD_TENSORS:
            return DelayedQuantizer(value, state.scales, place, state.entered_history())
        return DelayedQuantizer(value, state.grad_scales, place, state.history_bwd, self.grad_state)

    def begin_backward(self) -> None:
        """Prepare delayed scaling for the amaxes that the operation's backward is going to enter."""
        begin_backward(self.grad_state)

    def end_backward(self) -> None:
        """End the operation's backward: delayed scaling updates its scales if this was the last one."""
        if self.grad_state is not None:
            end_backward(self.grad_state)
