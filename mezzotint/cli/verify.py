"""`mezzotint verify` checks, bit by bit, whether an export is what a run, or another checkpoint, becomes."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from mezzotint.recipe import Recipe
from mezzotint.serving.published import MODEL_CONFIG, PublishedFolder, read_json_object
from mezzotint.serving.verify import TensorCheck, open_second, verify_folders, verify_source
from mezzotint.trainer.console import CommandError, make_console, make_table
from mezzotint.trainer.progress import progress_bar
from mezzotint.trainer.publishing import source_of

SHOWN = 20  # rows of the table; --json has all


def run_verify(first: str, second: str, as_json: bool) -> int:
    """Run the command that `app.py` describes, and return its exit status."""
    try:
        folder = open_second(Path(second))
        with progress_bar("comparing") as progress:
            how, checks = _compare(Path(first), folder, progress)
            found = list(checks)
    except ValueError as error:
        raise CommandError(str(error), 1) from None
    differing = [check for check in found if not check.is_equal]
    if as_json:
        report = {"first": first, "second": second, "how": how, "is_equal": not differing, "tensors": len(found)}
        print(json.dumps({**report, "differing": [asdict(check) for check in differing]}, indent=1))
    else:
        _show(how, found, differing)
    return 1 if differing else 0


def _compare(
    first: Path, folder: PublishedFolder, progress: Callable[[int, int], None]
) -> tuple[str, Iterable[TensorCheck]]:
    """Return in words how the two are compared, and the result for each tensor."""
    if folder.scheme is None or _is_published(first):
        return "tensors as they are", verify_folders(open_second(first), folder, progress)
    source, trained = source_of(first)
    recipe = trained if trained is not None and _trains(trained, folder) else None
    how = "weights quantized as the export says" if recipe is None else f"weights quantized as {type(recipe).__name__}"
    return how, verify_source(source, folder, recipe, progress)


def _is_published(path: Path) -> bool:
    """Return whether a folder is in a published format itself."""
    if not (path / MODEL_CONFIG).exists() or (path / "checkpoints").is_dir():
        return False
    return open_second(path).scheme is not None if "model_type" in read_json_object(path / MODEL_CONFIG) else False


def _trains(recipe: Recipe, folder: PublishedFolder) -> bool:
    """Return whether a recipe quantizes weights to the format of an export."""
    assert folder.scheme is not None
    try:
        folder.scheme.quantizer_of(recipe, "")
    except ValueError:
        return False
    return True


def _show(how: str, found: list[TensorCheck], differing: list[TensorCheck]) -> None:
    console = make_console()
    if differing:
        table = make_table(
            "tensors that differ",
            {"tensor": "left", "differing": "right", "of": "right", "first at": "left", "largest error": "right"},
        )
        for check in differing[:SHOWN]:
            error = f"{check.largest_error:.3g}"
            row = (str(check.differing), str(check.elements), str(list(check.first or ())), error)
            table.add_row(check.name, *(("", "", check.problem, "") if check.problem else row))
        console.print(table)
        if len(differing) > SHOWN:
            console.print(f"and {len(differing) - SHOWN} more; --json has all of them", highlight=False)
    counts = f"{len(found) - len(differing)} of {len(found)} tensors are equal bit by bit"
    console.print(f"{counts} ({how})", highlight=False, soft_wrap=True)
