"""What holds for every test.

* A test marked `gpu` is deselected, not skipped, on a machine without a CUDA GPU.
* A skipped test is a failed test, unless its reason starts with one of `ALLOWED_SKIPS`: a skip that nobody
  looks at hides that something is no longer tested.
* A test marked `compile` starts and ends with a fresh compiler state.
* Hypothesis draws the same examples every time.
"""

import sys
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

ALLOWED_SKIPS: tuple[str, ...] = ()

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip whose reason is not allowed into a failure. An expected failure (xfail) is no skip."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped: {reason!r}. A skip counts as a failure here. Make the test run, "
            "mark it `gpu` if it needs a GPU, or add the start of its reason to ALLOWED_SKIPS in "
            "tests/conftest.py."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report


def _reset_dynamo() -> None:
    dynamo = sys.modules.get("torch._dynamo")  # never imported, then there is no state to reset
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    is_compile_test = request.node.get_closest_marker("compile") is not None
    if is_compile_test:
        _reset_dynamo()
    yield
    if is_compile_test:
        _reset_dynamo()
