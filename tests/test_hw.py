"""The table of matrix products and the report on it."""

from collections.abc import Iterator

import pytest
import torch

from mezzotint import hw
from mezzotint.formats import FORMATS, HIGH, KINDS

CAPABILITIES = [None, (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
NEW = (13, 0)  # a PyTorch built with this CUDA has every row


@pytest.mark.parametrize("cc", CAPABILITIES)
def test_every_pair_of_kinds_has_a_backend(cc: tuple[int, int] | None) -> None:
    kinds = (HIGH, *KINDS)
    for kind_a in kinds:
        for kind_b in kinds:
            row = hw.gemm_backend(kind_a, kind_b, cc, NEW)
            assert row.how in ("native", "emulated", "reference")
            assert row.why
            assert (row is hw.REFERENCE) == (cc is None or (cc < (8, 0) and "high" not in (kind_a, kind_b)))


@pytest.mark.parametrize(
    ("kinds", "cc", "cuda", "name"),
    [
        (("high", "high"), (7, 5), NEW, "plain"),
        (("high", "mx"), (9, 0), NEW, "plain"),
        (("nv", "high"), (10, 0), NEW, "plain"),
        (("tensor", "tensor"), (8, 0), NEW, "emulated"),
        (("tensor", "tensor"), (8, 9), NEW, "tensor"),
        (("tensor", "tensor"), (12, 0), NEW, "tensor"),
        (("row", "row"), (8, 9), NEW, "row16"),
        (("row", "row"), (9, 0), NEW, "row"),
        (("row", "row"), (9, 0), (12, 8), "row16"),
        (("row", "row"), (10, 0), NEW, "row16"),
        (("row", "row"), (12, 0), NEW, "row_unit"),
        (("row", "tensor"), (9, 0), NEW, "emulated"),
        (("block1d", "block2d"), (9, 0), NEW, "block"),
        (("block1d", "block2d"), (9, 0), (12, 8), "emulated"),
        (("block2d", "block2d"), (9, 0), NEW, "emulated"),
        (("block1d", "block1d"), (10, 0), NEW, "emulated"),
        (("mx", "mx"), (9, 0), NEW, "emulated"),
        (("mx", "mx"), (10, 0), NEW, "mx"),
        (("nv", "nv"), (10, 3), NEW, "nv"),
        (("nv", "mx"), (10, 0), NEW, "emulated"),
        (("mx", "mx"), None, NEW, "reference"),
    ],
)
def test_choice(kinds: tuple[str, str], cc: tuple[int, int] | None, cuda: tuple[int, int], name: str) -> None:
    assert hw.gemm_backend(*kinds, cc, cuda).name == name


@pytest.mark.parametrize("cc", CAPABILITIES)
def test_report_has_every_operation_once(cc: tuple[int, int] | None) -> None:
    rows = hw.report(cc, NEW)
    keys = [(row.format, row.operation) for row in rows]
    assert len(keys) == len(set(keys)) == 4 * len(FORMATS) + 3
    assert {row.device for row in rows} == {"cpu" if cc is None else f"sm_{cc[0]}{cc[1]}"}
    how = {row.how for row in rows}
    assert how == {"reference"} if cc is None else how <= {"native", "emulated", "reference"}


def test_report_of_a_hopper() -> None:
    how = {(row.format, row.operation): row.how for row in hw.report((9, 0), NEW)}
    assert {how[name, "fprop"] for name in ("float8", "float8_rowwise", "float8_block")} == {"native"}
    assert {how[name, "wgrad"] for name in ("mxfp8", "nvfp4")} == {"emulated"}


def test_report_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: None)
    assert {row.device for row in hw.report()} == {"cpu"}
    # Asked about a GPU it answers for a PyTorch that has everything, not for the one without CUDA that runs here.
    assert next(row for row in hw.report((9, 0)) if row.format == "float8_block").how == "native"


def test_report_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hw, "cuda_version", lambda: (12, 8))
    hw.gemm_backend.cache_clear()
    how = {(row.format, row.operation): row.how for row in hw.report()}
    hw.gemm_backend.cache_clear()
    assert how["float8", "fprop"] == "native"
    assert how["float8_block", "fprop"] == "emulated"


def test_what_was_never_run_says_so() -> None:
    for row in hw.gemm_backends():
        tried_on = ("reference", "plain", "emulated", "tensor", "row", "block")
        assert ("not run on real hardware" in row.why) == (row.name not in tried_on)


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("name", ["high_precision", *FORMATS])
def test_every_format_is_available(name: str, cc: tuple[int, int] | None) -> None:
    runs, reason = hw.available(name, cc)
    assert runs
    assert ("cpu" if cc is None else "sm_") in reason


def test_an_unknown_format_is_not() -> None:
    runs, reason = hw.available("int4")
    assert not runs
    assert "int4" in reason
    assert "mxfp8" in reason


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("name", ["high_precision", *FORMATS])
def test_native_is_what_every_product_is(name: str, cc: tuple[int, int] | None) -> None:
    runs, reason = hw.available(name, cc, native=True, cuda=NEW)
    ways = [row.how for row in hw.report(cc, NEW) if row.format == name and row.operation != "quantize"]
    assert runs == (set(ways) == {"native"})
    assert runs == ("native products" not in reason)  # that it needs, or that no GPU has


def test_what_a_native_product_needs() -> None:
    assert hw.available("mxfp8", (9, 0), native=True, cuda=NEW) == (
        False,
        "emulated on sm_90: exact values in BF16, BF16 tensor cores; native products need an NVIDIA GPU of compute "
        "capability 10.0 with CUDA 12.8",
    )
    _, reason = hw.available("float8_block", (10, 0), native=True, cuda=NEW)
    assert reason.endswith("compute capability 9.0 (below 10.0) with CUDA 12.9")


@pytest.fixture
def fresh_capability() -> Iterator[None]:
    hw.capability.cache_clear()
    hw.has_triton_kernels.cache_clear()
    yield
    hw.capability.cache_clear()
    hw.has_triton_kernels.cache_clear()


def test_an_amd_gpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch, fresh_capability: None) -> None:
    """PyTorch calls it a CUDA device, and gives it a capability: that of an MI300 reads as Hopper's."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    assert hw.capability() is None
    assert not hw.has_triton_kernels()
    assert {(row.device, row.how) for row in hw.report()} == {("rocm", "reference")}
    assert hw.available("float8") == (True, "reference on rocm: plain torch in FP32, the specification")
    assert not hw.available("float8", native=True)[0]


def test_cuda_version() -> None:
    assert len(hw.cuda_version()) == 2
