"""What the files of the contract suite share."""

from typing import Any

import pytest

from mezzotint import QuantizedTensorStorage
from tests.quantizer_formats import USAGES

over_usages = pytest.mark.parametrize(("rowwise", "columnwise"), USAGES, ids=["rowwise", "columnwise", "both"])
over_internal = pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])


def described(quantized: QuantizedTensorStorage) -> dict[str, Any]:
    """Buffer → shape, dtype and device. All are contiguous."""
    assert all(buffer.is_contiguous() for _, buffer in quantized._buffers())
    return {name: (tuple(b.shape), b.dtype, b.device.type) for name, b in quantized._buffers()}
