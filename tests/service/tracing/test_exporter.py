"""Spans for a collector that is not there: one line when that begins, and one when it ends."""

import logging
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.service.tracing.test_tracing import traced


class Accepting(BaseHTTPRequestHandler):
    """Takes every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_dead_collector_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")  # for all attempts of a batch
    from expertd.service.tracing.spans import Spans

    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spans = Spans(f"http://127.0.0.1:{port}/v1/traces")
    for _ in range(3):
        spans.add(traced())
        spans._provider.force_flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"spans cannot be exported to http://127.0.0.1:{port}/v1/traces" in caplog.text
    assert len(caplog.records[0].getMessage()) < 400
    with HTTPServer(("127.0.0.1", port), Accepting) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for _ in range(2):
            spans.add(traced())
            spans._provider.force_flush()
        spans.close()
        server.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].getMessage() == f"spans are exported to http://127.0.0.1:{port}/v1/traces again"
