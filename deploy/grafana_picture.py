"""Takes a picture of Grafana's dashboard: `python -m deploy.grafana_picture docs/grafana.png`.

Runs while `docker compose up` does: it sends the demo layer tokens, and has Debian's Chromium open the
dashboard that Compose gives Grafana, until the panels show the last minutes.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from deploy.page_picture import save, traffic

ROOT = Path(__file__).resolve().parents[1]
_DASHBOARD = ROOT / "configs" / "grafana" / "dashboards" / "expertd.json"
_WIDTH = 1600
_ROW, _MARGIN = 38, 120  # pixels: of a row of the dashboard's grid, and around the grid
_REFRESH_SECONDS = 5


def page_of(url: str, dashboard: dict[str, Any], minutes: int) -> tuple[str, int]:
    """The address of the dashboard without menus, and the height in which all panels are visible."""
    query = f"orgId=1&from=now-{minutes}m&to=now&refresh={_REFRESH_SECONDS}s&kiosk"
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    height = _ROW * max(place["y"] + place["h"] for place in places) + _MARGIN
    return f"{url.rstrip('/')}/d/{dashboard['uid']}?{query}", height


def picture(url: str, height: int, title: str, seconds: float) -> bytes:
    """A PNG of the page, which has to show `title`, after this many seconds."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": height})
        page.goto(url)
        page.get_by_text(title, exact=True).first.wait_for()
        time.sleep(seconds)
        png = page.screenshot()
        browser.close()
    return png


def main(arguments: list[str] | None = None) -> int:
    """Write the picture; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="of a server of the demo layer")
    parser.add_argument("--grafana", default="http://127.0.0.1:3000/")
    parser.add_argument("--seconds", type=float, default=310, help="of traffic, before the picture")
    given = parser.parse_args(arguments)
    dashboard = json.loads(_DASHBOARD.read_text())
    address, height = page_of(given.grafana, dashboard, max(1, round(given.seconds / 60)))
    with traffic(given.url):
        png = picture(address, height, dashboard["panels"][0]["title"], given.seconds)
    save(png, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
