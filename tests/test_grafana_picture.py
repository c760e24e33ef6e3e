"""`deploy.grafana_picture` on a page that stands in for Grafana, which is not to be had here."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image

from deploy import grafana_picture
from tests.paths import ROOT

DASHBOARD = json.loads((ROOT / "configs/grafana/dashboards/expertd.json").read_text())


@pytest.fixture
def grafana() -> Iterator[tuple[str, list[str]]]:
    """A server that has a dashboard of one title, and the paths that it was asked for."""
    paths: list[str] = []
    title = DASHBOARD["panels"][0]["title"]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"<body style='background: #123456'><h1>{title}</h1>".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", paths
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_dashboard_is_taken_in_full(
    grafana: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grafana_picture, "traffic", lambda _: nullcontext())
    url, paths = grafana
    file = tmp_path / "grafana.png"
    assert grafana_picture.main([str(file), "--grafana", url, "--seconds", "0.1"]) == 0
    assert paths[0].startswith(f"/d/{DASHBOARD['uid']}?orgId=1&from=now-1m&to=now&")
    with Image.open(file) as image:
        assert image.size == (1600, grafana_picture.page_of(url, DASHBOARD, 1)[1])
        assert image.convert("RGB").getpixel((800, image.height - 5)) == (0x12, 0x34, 0x56)


def test_all_panels_are_visible() -> None:
    address, height = grafana_picture.page_of("http://127.0.0.1:3000/", DASHBOARD, 5)
    assert address.startswith("http://127.0.0.1:3000/d/expertd?")
    lowest = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in DASHBOARD["panels"])
    assert height > 38 * lowest
