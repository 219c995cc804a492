"""`onnx_export`: Transformer Engine's switch to code that ONNX can be exported from. Modules export as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Nothing when off; refused when on."""
    if enabled:
        raise NotImplementedError(
            "onnx_export(enabled=True): quantized products have no form in ONNX here. Export with torch.export, which "
            "takes modules whole, in every recipe; or unconvert() the model and export that to ONNX in high precision"
        )
    yield


def is_in_onnx_export_mode() -> bool:
    """False: there is no such mode."""
    return False


def assert_warmed_up(module: Any) -> None:
    """Do nothing: a module exports without having run before."""
