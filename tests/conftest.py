"""What holds for every test.

* A test marked `gpu` is deselected, not skipped, on a machine without a CUDA GPU.
* A skipped test is a failed test, unless its reason starts with one of `ALLOWED_SKIPS`: a skip that nobody
  looks at hides that something is no longer tested.
* A test marked `compile` starts and ends with a fresh compiler state.
* Of a test marked `cover` some cases are `slow`, and some are left out: see `pairs.py`.
* Hypothesis draws the same examples every time.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

from tests.pairs import cover
from tests.spared import spare_measurements, spare_seeds

ALLOWED_SKIPS: tuple[str, ...] = ("no browser: ",)  # Chromium is a package of the system, which pip cannot install

# The workers of a test run fill the machine: a pool of compilers beside each only takes time to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")

spare_seeds()


def _thin_products(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `cover(n, most)` mark cases slow that are not needed for every combination of n values of
    parameters, and leave out those that are not needed for every combination of `most`, if it is given."""
    left_out: set[pytest.Item] = set()
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cover") is not None:
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    for functions in by_test.values():
        mark = functions[0].get_closest_marker("cover")
        assert mark is not None
        # The id of each `parametrize`; a private name, that pytest 8 and 9 have.
        cases = [tuple(function.callspec._idlist) for function in functions]
        strength, *most = mark.args
        there = cover(cases, *most) if most else {*range(len(cases))}
        left_out |= {function for index, function in enumerate(functions) if index not in there}
        known = sorted(there)
        kept = {known[index] for index in cover([cases[index] for index in known], strength)}
        for index in there - kept:
            functions[index].add_marker("slow")
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _thin_products(config, items)
    if torch.cuda.is_available():
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Have the garbage collector leave out what now stays to the end, 25,000 tests and PyTorch, and run more seldom: it
    took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


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
        spare_measurements()
        _reset_dynamo()
    yield
    if is_compile_test:
        _reset_dynamo()


@pytest.fixture(autouse=True)
def _no_recorded_runs() -> Iterator[None]:
    """A test may replace what a recorded run would call."""
    yield
    rerun = sys.modules.get("mezzotint.layer.rerun")
    if rerun is not None:
        rerun.RECORDED_RUNS.clear()
