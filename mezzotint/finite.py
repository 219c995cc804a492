"""autocast(check_finite=True): values that are not finite are counted where they are quantized, and reported at the
end.

A module that runs in such a region has counters, one for each tensor that it quantizes, which its run adds to on the
device (`functional/observation.py`). The end of the region reads the counters of all modules that ran in it: this is
the only time that the host waits.
"""

from typing import Any

import torch

from mezzotint.functional.observation import Probe, Probes
from mezzotint.kernels.statistics import NONFINITE
from mezzotint.region import Pending, State, current_state
from mezzotint.tracing import lasting, traced_as


def make_counters(module: Any) -> None:
    """Give a module its counters, on the device of its parameters. They are made once: graphs hold on to them."""
    device, held = module.scale_fwd.device, module._counters
    if held is not None and held[0].input.counts.device == device:
        return

    def make() -> Probe:
        return Probe(None, counts=torch.zeros(len(NONFINITE), dtype=torch.int64, device=device))

    with lasting():
        module._counters = tuple([Probes(make(), make(), make()) for _ in range(module.num_gemms)])


def _refuse_graph() -> None:
    raise RuntimeError(
        "autocast(check_finite=True) inside of a compiled function: its end reads what was counted, which a graph "
        "cannot. Enter it outside of torch.compile"
    )


@traced_as(_refuse_graph)
def begin_check() -> None:
    """Begin a region that checks. Inside of a compiled function this raises RuntimeError."""


def await_check(module: Any, state: State) -> None:
    """Have the counters of a module read at the end of the region."""
    if state.depth > 0 and not module._run_status.is_counted:
        module._run_status.is_counted = True
        state.counted = Pending(module, (), state.counted)


def end_check(raises: bool) -> None:
    """End a region that checks: read and clear the counters of the modules that ran in it.

    If some are not 0, and it `raises`, raise a FloatingPointError that names the first tensor, in the order of forward
    and then of backward.
    """
    state = current_state()
    waiting, state.counted = state.counted, None
    modules: list[Any] = []
    while waiting is not None:
        waiting.module._run_status.is_counted = False
        modules.insert(0, waiting.module)
        waiting = waiting.before
    step, state.num_checked = state.num_checked, state.num_checked + 1
    gemms = [(module, gemm, probes) for module in modules for gemm, probes in enumerate(module._counters)]
    named = [(m, gemm, role, getattr(probes, role).counts) for m, gemm, probes in gemms for role in ("input", "weight")]
    named += [(m, gemm, "grad_output", probes.grad_output.counts) for m, gemm, probes in reversed(gemms)]
    found: list[str] = []
    devices = {counts.device for *_, counts in named}
    seen = {device: iter(_read_and_clear([c for *_, c in named if c.device == device])) for device in devices}
    for module, gemm, role, counts in named:
        numbers = next(seen[counts.device])
        if any(numbers):
            found.append(_describe(module, gemm, role, numbers))
    if found and raises:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        late = " (or the backward of the step before it, which ran outside of the region)" if step else ""
        where = f"step {step}{late if 'grad_output' in found[0] else ''}"
        raise FloatingPointError(f"{where} has values that are not finite: {found[0]}{more}")


def _read_and_clear(counts: list[torch.Tensor]) -> list[list[int]]:
    with torch.no_grad():
        numbers = torch.stack(counts).tolist()
        torch._foreach_zero_(counts)
    return numbers


def _describe(module: Any, gemm: int, role: str, numbers: list[int]) -> str:
    name = module._role(gemm, role).name or f"a {type(module).__name__} without a name (name_modules gives it one)"
    counts = ", ".join([f"{number} {kind}" for number, kind in zip(numbers, NONFINITE, strict=True) if number])
    return f"{role} of {name} ({counts})"
