"""The page, in a real browser: it loads, draws, reacts to clicks, and has no error in its console."""

import base64
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mezzotint as mz
from mezzotint.inspect.page import COLUMNS, WORST, gather_figures, in_columns, page_data, write_page

CHROMIUM = shutil.which("chromium")


def write_run(folder: Path, steps: int = 3) -> Path:
    """A model of two modules, looked at in each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(mz.LayerNormMLP(64, 128), mz.Linear(64, 64)).bfloat16()
    inspector = mz.inspect(model, every=1, out=folder, what_if=True)
    for _ in range(steps):
        with inspector, mz.autocast("nvfp4"):
            model(torch.randn(64, 64).bfloat16()).float().square().mean().backward()
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def test_columns_are_even() -> None:
    assert in_columns([0, 50, 100]) == [[0], [50], [100]]
    made = in_columns(range(2000))
    assert len(made) == COLUMNS
    assert {len(column) for column in made} == {3, 4}
    assert [step for column in made for step in column] == list(range(2000))


def test_a_column_shows_the_worst() -> None:
    """More steps than columns; a tensor that is not there at each of them; one that was written twice."""
    records = [
        {"step": step, "tensor": name, "module": "m", "role": "input", "snr_db": step + bonus, "underflow": step / 1e4}
        for step in range(2 * COLUMNS)
        for name, bonus in (("a", 0.0), ("b", 0.5))
        if name == "a" or step % 2
    ]
    records.append({**records[0], "snr_db": 9.0, "posinf": 2})
    tensors, steps = gather_figures(records)
    made = page_data(tensors, steps, {"step": None, "tensors": {}}, "x")
    found = {
        name: np.frombuffer(base64.b64decode(text), "<f4").reshape(2, COLUMNS) for name, text in made["figures"].items()
    }
    assert found.keys() == WORST.keys()
    assert found["snr_db"][0, :3].tolist() == [1.0, 2.0, 4.0]  # of step 0 the last line counts: 9
    assert found["snr_db"][1, :2].tolist() == [1.5, 3.5]
    assert found["underflow"][0, 1] == np.float32(3e-4)
    assert math.isnan(found["mse"][0, 0])
    assert found["nonfinite"][0, :2].tolist() == [2.0, 0.0]
    assert made["columns"][:2] == [[0, 1], [2, 3]]


def test_a_name_cannot_end_the_script(tmp_path: Path) -> None:
    record = {"step": 0, "tensor": "</script><b>", "module": "</script><b>", "role": "input", "snr_db": 1.0}
    (tmp_path / "figures.jsonl").write_text(json.dumps(record) + "\n")
    write_page(tmp_path, tmp_path / "page.html", "</script>")
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 2
    assert "http" not in text.replace("http://www.w3.org", "")  # no network


def test_no_record(tmp_path: Path) -> None:
    (tmp_path / "figures.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no record: inspect at least one step"):
        write_page(tmp_path, tmp_path / "page.html", "x")


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no browser: apt install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright, which drives it")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def colours(page: Any, selector: str) -> int:
    """How many colours a canvas has."""
    return page.evaluate(
        """selector => {
            const canvas = document.querySelector(selector), pen = canvas.getContext("2d");
            const raw = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return new Set(raw).size;
        }""",
        selector,
    )


def test_in_a_browser(browser: Any, run_folder: Path, tmp_path: Path) -> None:
    write_page(run_folder, tmp_path / "page.html", "runs/x")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tmp_path / 'page.html'}")
    page.wait_for_selector("body[data-ready=yes]")
    assert page.title() == "runs/x"
    assert page.locator("#about").inner_text() == "9 tensors, 3 columns of steps"
    assert page.locator("canvas.heat").count() == 3
    assert all(colours(page, f"canvas.heat[data-role={role}]") > 3 for role in ("input", "weight", "grad_output"))
    assert page.locator("#worst li").count() == 9

    page.locator("canvas.heat[data-role=weight]").click(position={"x": 100, "y": 5})  # the first row
    assert page.locator("#detail .name").inner_text() == "0.fc1.weight"
    assert page.locator("#what-if tr").count() == 8
    assert all(colours(page, f"#{canvas}") > 2 for canvas in ("series", "exponents", "block-map"))

    page.locator("#worst a").first.click()
    worst = page.locator("#worst a").first.inner_text()
    assert page.locator("#detail .name").inner_text() == worst
    page.click("button[data-figure=underflow]")
    assert page.locator("#worst-title").inner_text() == "Worst ten by became zero, step 2"
    page.fill("#filter", "fc2")
    assert page.locator("#worst li").count() == 3
    page.fill("#filter", "there is none")
    assert page.locator("canvas.heat").count() == 0
    page.set_viewport_size({"width": 700, "height": 900})
    assert errors == []
    assert [url for url in asked if not url.startswith("file:")] == []
