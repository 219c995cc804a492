"""`onnx_export` is Transformer Engine's switch to code that ONNX can be exported from. Here a program that
`torch.export` made is rewritten instead (`mezzotint.dynamo.decompositions`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Do nothing if `enabled` is False, and raise an error that says how to export if it is True.

    Args:
        enabled: Whether Transformer Engine's mode for ONNX is asked for, which does not exist here. The default is
            False.

    Raises:
        NotImplementedError: If `enabled` is True.

    Example:
        >>> import mezzotint as mz
        >>> with mz.onnx_export(enabled=False):
        ...     pass
    """
    if enabled:
        raise NotImplementedError(
            "onnx_export(enabled=True): there is no such mode. Export a program, program = torch.export.export(model, "
            "args).run_decompositions(mezzotint.dynamo.decompositions()). In high precision torch.onnx.export(program, "
            "dynamo=True) takes it. In a recipe ONNX has no operators for it: torch.export.save and AOTInductor write "
            "it so that PyTorch runs it without this package (docs/serving.md)"
        )
    yield


def is_in_onnx_export_mode() -> bool:
    """Return False, since there is no such mode."""
    return False


def assert_warmed_up(module: Any) -> None:
    """Do nothing: a module exports without having run before."""
