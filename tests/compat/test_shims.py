"""Names that are there for those who come from Transformer Engine: they work, warn, or say what to do instead."""

import importlib
import sys

import pytest
import torch

import mezzotint as mz


@pytest.mark.parametrize("name", ["fp8", "float8_tensor"])
def test_former_modules_warn_and_give_the_same_objects(name: str) -> None:
    sys.modules.pop(f"mezzotint.compat.{name}", None)
    with pytest.warns(DeprecationWarning, match=f"mezzotint.compat.{name} is deprecated"):
        module = importlib.import_module(f"mezzotint.compat.{name}")
    for exported in module.__all__:
        assert getattr(module, exported) is not None
        if hasattr(mz, exported):
            assert getattr(module, exported) is getattr(mz, exported)


def test_userbuffers() -> None:
    assert [mode.name for mode in mz.UserBufferQuantizationMode] == ["NONE", "FP8"]
    with pytest.raises(NotImplementedError, match="functional"):
        mz.initialize_ub([128, 64], 2, quantization_modes=[mz.UserBufferQuantizationMode.FP8])
    mz.destroy_ub()


def test_onnx_export() -> None:
    with mz.onnx_export():
        pass
    with pytest.raises(NotImplementedError, match=r"torch\.export"), mz.onnx_export(enabled=True):
        pass


def test_cudnn_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert mz.get_cudnn_version() == (0, 0, 0)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for number, version in ((91002, (9, 10, 2)), (90100, (9, 1, 0)), (8902, (8, 9, 2)), (None, (0, 0, 0))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert mz.get_cudnn_version() == version
