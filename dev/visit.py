"""This program visits every page of the built site in Chromium, at the width of a desk and of a phone.

    python -m dev.visit [SITE]       site/ by default; exit code 1 if a page has a fault

A fault is an error in the console, an answer that is none, a picture that does not load, a request to anywhere but the
site itself, a block of code that is shown as text, or a page that is wider than the window.
"""

import functools
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (1280, 400)
BROKEN = "[...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
UNREAD = (
    "[...document.querySelectorAll('article p')].map(each => each.textContent).filter(each => each.includes('```'))"
)
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"


class Quiet(SimpleHTTPRequestHandler):
    """This handler serves files and writes no log."""

    def log_message(self, *args: Any) -> None:
        """Do nothing."""


def serve(site: Path) -> str:
    """Serve a folder until the program ends, and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def find_pages(site: Path) -> list[str]:
    """Return the paths of all pages, "" for the first one."""
    return sorted(page.parent.relative_to(site).as_posix().strip(".") for page in site.rglob("index.html"))


def visit(browser: Any, base: str, pages: list[str], width: int) -> list[str]:
    """Visit pages in a window of a width, and return a line for each fault."""
    faults: list[str] = []
    seen: list[str] = []
    window = browser.new_page(viewport={"width": width, "height": 900})
    window.on("console", lambda said: seen.append(said.text) if said.type == "error" else None)
    window.on("pageerror", lambda error: seen.append(str(error)))
    window.on("response", lambda got: seen.append(f"{got.status} {got.url}") if got.status >= 400 else None)
    window.on("request", lambda asked: seen.append(asked.url) if is_elsewhere(asked.url, base) else None)
    for page in pages:
        seen.clear()
        window.goto(f"{base}{page}", wait_until="networkidle")
        seen += [f"does not load: {source}" for source in window.evaluate(BROKEN)]
        seen += [f"is not shown as code: {text[:60]!r}" for text in window.evaluate(UNREAD)]
        if (beyond := window.evaluate(TOO_WIDE)) > 0:
            seen.append(f"is {beyond} pixels too wide")
        faults += [f"/{page} at {width}: {fault}" for fault in seen]
    window.close()
    return faults


def is_elsewhere(url: str, base: str) -> bool:
    """Return whether a request leaves the site."""
    return not url.startswith((base, "data:", "blob:"))


def main() -> None:
    """Visit all pages, and exit with 1 if there are faults."""
    from playwright.sync_api import sync_playwright

    site = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    pages, base = find_pages(site), serve(site)
    if not pages:
        sys.exit(f"{site} has no pages: build them by `make site`")
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path  # the latter is Playwright's own
        if not Path(path).exists():
            print("There is no Chromium here, so the pages were not visited: install Debian's chromium to do so.")
            return
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        faults = [fault for width in WIDTHS for fault in visit(browser, base, pages, width)]
        browser.close()
    print("\n".join([*faults, f"{len(pages)} pages at {len(WIDTHS)} widths, {len(faults)} faults"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
