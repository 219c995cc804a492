"""`verify` checks whether one checkpoint is what another one becomes, tensor by tensor and bit by bit.

Weights in high precision are quantized again, on the CPU, as the export says that they were. The tensors of two exports
are compared as they are. One weight is in memory at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzotint.recipe import Recipe
from mezzotint.serving.codes import tensor_of
from mezzotint.serving.export import PlannedWeight, plain_parts, plan_weights, published_weight
from mezzotint.serving.published import PublishedFolder
from mezzotint.serving.source import WeightSource
from mezzotint.tensor.quantizer import Quantizer

PIECE = 2**22  # elements that are compared at once


@dataclass(frozen=True)
class TensorCheck:
    """A `TensorCheck` is the result of comparing one published tensor."""

    name: str
    elements: int
    differing: int = 0
    first: tuple[int, ...] | None = None  # the index of the first element that differs
    largest_error: float = 0.0  # of the weight's values, or of the tensor's own
    problem: str | None = None  # why it could not be compared

    @property
    def is_equal(self) -> bool:
        return self.problem is None and self.differing == 0


def verify_source(
    source: WeightSource,
    folder: PublishedFolder,
    recipe: Recipe | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[TensorCheck]:
    """Compare an export with what its source becomes, quantized by `recipe` or, without one, as
    the export says that it was."""
    scheme = folder.scheme
    if scheme is None:
        raise ValueError(f"{folder.path} is not quantized: give an export as the second")
    quantizer = folder.quantizer() if recipe is None else scheme.quantizer_of(recipe, "")
    requantized = set(folder.manifest.requantized if folder.manifest else ())
    planned = plan_weights(source, scheme, recipe, requantize=True)
    seen: set[str] = set()
    for number, each in enumerate(planned, 1):
        names = [part.name for part in each.mapped.parts]
        own: Quantizer | None = quantizer if recipe is None and source.is_on_disk else each.quantizer or quantizer
        if not all(folder.is_quantized(name) for name in names):
            own = None
        again = PlannedWeight(each.mapped, own, any(name in requantized for name in names))
        for name, wanted, scheme_name in _expected(source, again, folder):
            seen.add(name)
            yield _compare(name, wanted, folder, scheme_name, quantizer)
        if progress is not None:
            progress(number, len(planned))
    for name in sorted(folder.reader.places.keys() - seen):
        yield TensorCheck(name, 0, problem="is only in the second")


def _expected(
    source: WeightSource, planned: PlannedWeight, folder: PublishedFolder
) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield the published tensors of a weight: name, value, and the name of the weight whose codes it is part of."""
    scheme = folder.scheme
    assert scheme is not None
    if planned.quantizer is None:
        with torch.no_grad():
            for name, value in plain_parts(planned.mapped, source.weight(planned.mapped)):
                place = folder.reader.places.get(name)
                yield name, value if place is None else value.to(place.spec.dtype), None
        return
    for part, tensors in published_weight(source, planned, scheme):
        tensors.pop("amax", None)
        for suffix, tensor in tensors.items():
            yield scheme.tensor_name(part.name, suffix), tensor, part.name if suffix == scheme.suffixes[0] else None


def verify_folders(
    first: PublishedFolder, second: PublishedFolder, progress: Callable[[int, int], None] | None = None
) -> Iterator[TensorCheck]:
    """Compare the tensors of two checkpoints as they are."""
    names = list(dict.fromkeys([*first.reader.places, *second.reader.places]))
    for number, name in enumerate(names, 1):
        if name not in first.reader.places:
            yield TensorCheck(name, 0, problem="is only in the second")
        else:
            yield _compare(name, first.reader.read(name), second, None, None)
        if progress is not None:
            progress(number, len(names))


def _compare(
    name: str, wanted: torch.Tensor, folder: PublishedFolder, weight: str | None, quantizer: Quantizer | None
) -> TensorCheck:
    if name not in folder.reader.places:
        return TensorCheck(name, wanted.numel(), problem="is only in the first")
    found = folder.reader.read(name)
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        shapes = f"{wanted.dtype} {tuple(wanted.shape)}, the second {found.dtype} {tuple(found.shape)}"
        return TensorCheck(name, wanted.numel(), problem=f"the first has {shapes}")
    if torch.equal(_bits(found), _bits(wanted)):
        return TensorCheck(name, found.numel())
    count, first = 0, 0
    for start, here, there in _pieces(_bits(wanted), _bits(found)):
        places = (here != there).nonzero()
        if len(places) and not count:
            first = start + int(places[0])
        count += len(places)
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), found.shape)) if found.dim() else ()
    return TensorCheck(name, found.numel(), count, place, _error(wanted, found, folder, weight, quantizer))


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield both in pieces, each with its offset: comparing them whole would take several times their memory."""
    for start in range(0, a.numel(), PIECE):
        yield start, a.reshape(-1)[start : start + PIECE], b.reshape(-1)[start : start + PIECE]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, so that NaN equals itself and 0 is not -0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(kinds[tensor.dtype.itemsize])


def _error(
    wanted: torch.Tensor, found: torch.Tensor, folder: PublishedFolder, weight: str | None, quantizer: Quantizer | None
) -> float:
    """Return the largest difference of values: of codes under the second's scales, else of the numbers themselves."""
    if weight is None or quantizer is None or folder.scheme is None or folder.scheme.is_for_experts:
        return _largest(wanted, found)
    values = []
    for codes in (wanted, found):
        tensors: dict[str, Any] = {**folder.tensors(weight), folder.scheme.suffixes[0]: codes}
        made = folder.scheme.codes(tensors, quantizer)
        values.append(tensor_of(made, quantizer.with_usage(columnwise=False), torch.float32).dequantize())
    return _largest(*values)


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, or infinity if it is not a number."""
    errors = [(x.double() - y.double()).abs().nan_to_num(torch.inf).max() for _, x, y in _pieces(a, b)]
    return float(max(errors))


def open_second(path: Path) -> PublishedFolder:
    """Return an export that is to be checked; its hashes are not, because finding what is
    wrong is what `verify` is for."""
    return PublishedFolder(path, check_hashes=False)
