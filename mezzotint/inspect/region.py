"""inspect: this region around a training step looks at what its modules quantize.

On an inspected step each module of the model has probes (`functional/observation.py`), which make its configuration
another value. In compiled code the guard that exists already then chooses a second graph, in which each tensor is
compared with its quantized copy. On all other steps a module is what it is without an inspector.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzotint.comm.groups import is_initialized, rank_in
from mezzotint.functional.observation import Probe, Probes
from mezzotint.inspect.figures import COUNTED, MEASURED
from mezzotint.inspect.reading import SeenTensor, read_probes
from mezzotint.inspect.store import Store
from mezzotint.inspect.trials import trials_of
from mezzotint.kernels.statistics import CELLS, ROWS, empty_statistics
from mezzotint.layer.base import Layer
from mezzotint.layer.names import join_path, plain_path

WATCHED_ROLES = ("input", "weight", "grad_output")
STATS = ("count", *MEASURED, *COUNTED, "exponents", "map")


class inspect:
    """This region goes around each training step, forward and backward; at certain steps it says what quantization did
    to the tensors of the model.

    The names of tensors are such as "layers.3.mlp.fc1.weight": the path of the module, the linear in it if it has
    several, and "input", "weight" or "grad_output". A weight that is kept quantized has no original to compare with,
    and is left out. The attribute `last` has what was seen in the last inspected step.

    Args:
        model: The model whose modules are watched.
        every: After how many steps one is inspected. The default is 50.
        tensors: A pattern, or several, for the names of the tensors that are inspected. The default "*" means all.
        stats: The names of the figures that are written, which `mezzotint.inspect.figures` defines, with "exponents"
            for histograms and "map" for a coarse map of each tensor. The default is all of them.
        out: The folder to which figures are written, or None (the default) to write nothing.
        what_if: Whether every tensor is also tried in the formats of all recipes that need no state. The default is
            False.
        tensorboard: Whether scalars are written for TensorBoard as well. The default is False.
        check_finite: Whether FloatingPointError is raised at the end of an inspected step in which a tensor had NaN or
            an infinity. The default is False.
        group: The process group over whose ranks figures are taken; they hold the same modules. None means all ranks.
        step: The number of the first step. The default is 0.

    Raises:
        TypeError: If `model` is no module.
        ValueError: If `every` is not positive, or there is no such figure.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> model = torch.nn.Sequential(mz.Linear(64, 64, device="cpu"))
        >>> inspector = mz.inspect(model, every=1)
        >>> with inspector, mz.autocast("mxfp8"):
        ...     model(torch.randn(32, 64)).sum().backward()
        >>> sorted(seen.name for seen in inspector.last)
        ['0.grad_output', '0.input', '0.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        tensors: str | Iterable[str] = "*",
        stats: Iterable[str] = STATS,
        out: str | Path | None = None,
        what_if: bool = False,
        tensorboard: bool = False,
        check_finite: bool = False,
        group: Any = None,
        step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"inspect(model) got {type(model).__name__}: give an nn.Module")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"inspect(every={every!r}): give a number of steps, 1 or more")
        self.stats = (stats,) if isinstance(stats, str) else tuple(stats)
        unknown = [name for name in self.stats if name not in STATS]
        if unknown:
            raise ValueError(f"inspect(stats) got {unknown}: there are {', '.join(STATS)}")
        self.every, self.step, self.what_if, self.check_finite = every, step, what_if, check_finite
        self.group = group
        self.last: list[SeenTensor] = []
        self._watched = _find_watched(model, (tensors,) if isinstance(tensors, str) else tuple(tensors))
        self._is_open = False
        is_writer = out is not None and (not is_initialized() or rank_in(group) == 0)
        self._store = Store(Path(out), self.stats, tensorboard) if is_writer and out is not None else None

    @property
    def is_inspected(self) -> bool:
        """Return whether the current step, or the next one if none has begun, is inspected."""
        return self.step % self.every == 0

    def __enter__(self) -> "inspect":
        if self._is_open:
            raise RuntimeError("this inspector is entered already: leave it at the end of each step")
        if self.is_inspected:
            self._watch()
        self._is_open = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._is_open = False
        if self.is_inspected:
            for module in self._modules:
                module._probes = None
            if kind is None:
                self._read()
        if kind is None:
            self.step += 1

    def _watch(self) -> None:
        """Give each module its probes, emptied. They are made once, because graphs hold on to them."""
        for each in self._watched:
            if each.probe is None:
                each.probe = _make_probe(each, self.what_if)
        tables = [table for probe in self._probes for table in (probe.table, probe.tried) if table is not None]
        kinds = {(table.shape, table.device) for table in tables}
        fresh = {(shape, device): empty_statistics(tuple(shape), device) for shape, device in kinds}
        if tables:
            torch._foreach_copy_(tables, [fresh[table.shape, table.device] for table in tables])
        for module in self._modules:
            found = {(each.gemm, each.role): each.probe for each in self._watched if each.layer is module}
            gemms = range(module.num_gemms)
            module._probes = tuple([Probes(*[found.get((gemm, role)) for role in WATCHED_ROLES]) for gemm in gemms])

    def _read(self) -> None:
        """Take what was seen, write it, and, with `check_finite`, raise FloatingPointError if it is not finite."""
        names = [(each.name, each.name.removesuffix(f".{each.role}"), each.role) for each in self._watched]
        trials = [trials_of(each.role)[0] if self.what_if else () for each in self._watched]
        self.last = read_probes(names, self._probes, trials, self.group)
        if self._store is not None:
            self._store.write(self.step, self.last)
        if self.check_finite:
            check_finite(self.last, self.step)

    @property
    def _probes(self) -> list[Probe]:
        return [each.probe for each in self._watched if each.probe is not None]

    @property
    def _modules(self) -> list[Layer]:
        return list(dict.fromkeys(each.layer for each in self._watched))


def check_finite(seen: Sequence[SeenTensor], step: int) -> None:
    """Raise FloatingPointError if a tensor has NaN or an infinity, or got one when it was quantized."""
    odd = [each for each in seen if each.figures.nonfinite or each.figures.broken]
    if not odd:
        return
    told = "; ".join([_told(each) for each in odd[:5]])
    more = f"; and {len(odd) - 5} tensors more" if len(odd) > 5 else ""
    raise FloatingPointError(f"step {step} has values that are not finite: {told}{more}")


def _told(seen: SeenTensor) -> str:
    counts = [f"{getattr(seen.figures, name)} {name}" for name in COUNTED if getattr(seen.figures, name)]
    return f"{seen.role} of {seen.module or 'the module'} ({', '.join(counts)})"


@dataclass(slots=True)
class _Watched:
    """A `_Watched` is one tensor: the role that it has in one of a layer's GEMMs."""

    name: str
    layer: Layer
    gemm: int
    role: str
    probe: Probe | None = None


def _find_watched(model: nn.Module, patterns: Sequence[str]) -> list[_Watched]:
    """Return the tensors whose names match one of the patterns; raise ValueError if a pattern matches none."""
    tensors = list(_name_tensors(model))
    for pattern in patterns:
        if not any(fnmatchcase(each.name, pattern) for each in tensors):
            known = ", ".join([each.name for each in tensors[:3]]) or "none: no module of it is Mezzotint's"
            raise ValueError(f"inspect(tensors={pattern!r}) matches no tensor of the model; its tensors are {known}, …")
    return [each for each in tensors if any(fnmatchcase(each.name, pattern) for pattern in patterns)]


def _name_tensors(model: nn.Module) -> Iterator[_Watched]:
    for path, module in model.named_modules():
        if not isinstance(module, Layer) or not module._weights:
            continue
        for gemm in range(module.num_gemms):
            linear = join_path(plain_path(path), module._inner_name(gemm))
            for role in WATCHED_ROLES:
                yield _Watched(join_path(linear, role), module, gemm, role)


def _make_probe(watched: _Watched, what_if: bool) -> Probe:
    device = next(watched.layer.parameters()).device
    table = empty_statistics((ROWS, CELLS), device)
    if not what_if:
        return Probe(table)
    names, others = trials_of(watched.role)
    return Probe(table, empty_statistics((ROWS, len(names)), device), others)
