"""Takes spans by OTLP over HTTP, as OpenTelemetry's collector does, which neither Debian nor PyPI has.

It reads the messages with the official `opentelemetry-proto`.
"""

import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.service.waiting import wait_for


@dataclass(frozen=True)
class Span:
    """A span as it was sent; ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    begin: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """A collector that runs."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.received: list[Span] = []

    def wait(self, count: int) -> list[Span]:
        """The spans, in the order in which they begin, once `count` have arrived; no more come soon."""
        wait_for(lambda: len(self.received) >= count, f"{count} spans")
        time.sleep(0.2)
        assert len(self.received) == count, [span.name for span in self.received]
        return sorted(self.received, key=lambda span: span.begin)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector that runs within the block, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            made.received += _spans(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        made = Collector(server.server_port)
        Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


def _spans(request: Any) -> Iterator[Span]:
    for resource in request.resource_spans:
        about = _values(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code,
                    _values(span.attributes),
                    about,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
