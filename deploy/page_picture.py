"""Takes the picture of the page: `python -m deploy.page_picture docs/page.png`, while `make serve` runs.

It sends the demo layer tokens whose experts change, and looks at the page with Debian's Chromium meanwhile.
"""

import argparse
import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

_HIDDEN = 512  # of the demo layer
_CALLERS = 3
_TOPIC_SECONDS = 37
_COLOURS = 256
_SIZES, _SHARES = (1, 4, 16, 64, 128), (0.4, 0.25, 0.2, 0.1, 0.05)


def send(url: str, number: int, end: threading.Event) -> None:
    """Send tokens around one of some topics after the other, and a few requests that are refused."""
    topics = np.random.default_rng(5).standard_normal((6, _HIDDEN)).astype(np.float32)
    random, began = np.random.default_rng(number), time.monotonic()
    infer = f"{url}v2/models/demo/infer"
    with httpx.Client(headers={"Inference-Header-Content-Length": "0"}, timeout=60) as client:
        while not end.is_set():
            seconds = time.monotonic() - began
            topic = topics[int(seconds / _TOPIC_SECONDS) % len(topics)] * abs(np.sin(seconds / 50))
            rows = (
                random.standard_normal((random.choice(_SIZES, p=_SHARES), _HIDDEN), dtype=np.float32) + topic
            )
            client.post(infer, content=rows.astype(np.float32).tobytes()).raise_for_status()
            if random.random() < 0.001:
                client.post(infer, content=bytes(_HIDDEN))
            if random.random() < 0.0005:
                client.post(f"{url}v2/models/none/infer", content=b"")
            pause = 0.004 + 0.02 * (1 + np.sin(seconds / 20 + number)) * random.random()
            end.wait(float(pause))


def picture(url: str, seconds: float) -> bytes:
    """A PNG of the whole page, open for this many seconds."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        time.sleep(seconds)
        page.get_by_role("button", name="Send").click()
        page.locator("#routing svg").wait_for()
        page.mouse.move(0, 0)
        png = page.screenshot(full_page=True)
        browser.close()
    return png


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Callers of the server at `url`, as long as the block runs."""
    end = threading.Event()
    callers = [threading.Thread(target=send, args=(url, number, end)) for number in range(_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        end.set()
        for caller in callers:
            caller.join()


def save(png: bytes, path: Path) -> None:
    """Write a PNG with few colours, half as large so."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS, kmeans=8, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    """Write the picture; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a picture of a server's page under traffic.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="of a server of the demo layer")
    parser.add_argument("--seconds", type=float, default=310, help="for which the page is watched")
    given = parser.parse_args(arguments)
    with traffic(given.url):
        png = picture(given.url, given.seconds)
    save(png, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
