"""Takes the picture of the server's page, docs/images/page.png.

    python -m tools.page_picture [FILE]    # needs playwright, and Chromium or CHROMIUM=PATH

Serves the demo model, asks one question in the page, and takes a picture of the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from jax_q4k import models
from jax_q4k.models.server import app
from jax_q4k.models.server.run import config_of

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"

QUESTION = "What did Elizabeth say to Mr. Darcy?"
#: Sampling parameters that give a readable answer of this small model.
PARAMETERS = {"temperature": 0.6, "min_p": 0.05, "seed": 5, "max_tokens": 142}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serves the demo model; yields the page's address."""
    with models.Engine(models.load("demo"), max_rows=1) as engine:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config_of(app(engine, name="tiny-austen.Q4_K_M")))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def take(file: Path) -> None:
    """Writes the picture to a file."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    stored = json.dumps(json.dumps({"parameters": PARAMETERS}))
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 750}, color_scheme="light")
        page.add_init_script(f"localStorage.setItem('jax-q4k:/:settings', {stored})")
        page.goto(url)
        page.get_by_text("context of").wait_for()
        page.get_by_label("Message", exact=True).fill(QUESTION)
        page.keyboard.press("Enter")
        page.get_by_text("prompt tokens").wait_for()
        page.get_by_label("Regenerate").click()  # times of a browser that has shown a page before
        page.get_by_text("cached").wait_for()
        page.mouse.move(600, 500)
        file.parent.mkdir(exist_ok=True)
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]) if sys.argv[1:] else PICTURE)
