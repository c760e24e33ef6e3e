"""A process that takes spans by OTLP over HTTP: `python -m tests.service.tracing.collector FILE`.

It stands in for OpenTelemetry's collector, which neither Debian nor PyPI has: it reads the messages with the
official `opentelemetry-proto`, and writes each span, with its resource, as a line of JSON to FILE. Its first
line of output is its port.
"""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.paths import ROOT
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

    def __init__(self, file: Path, port: int) -> None:
        self._file = file
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"

    def spans(self) -> list[Span]:
        """All that have arrived, in the order in which they begin."""
        lines = self._file.read_text().splitlines()
        return sorted((Span(**json.loads(line)) for line in lines), key=lambda span: span.begin)

    def wait(self, count: int) -> list[Span]:
        """The spans, once `count` have arrived; no more come within a moment."""
        wait_for(lambda: len(self.spans()) >= count, f"{count} spans")
        time.sleep(0.2)
        spans = self.spans()
        assert len(spans) == count, [span.name for span in spans]
        return spans


@contextmanager
def collector(folder: Path) -> Iterator[Collector]:
    """A collector that runs within the block."""
    file = folder / "spans.jsonl"
    file.touch()
    command = [sys.executable, "-m", "tests.service.tracing.collector", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield Collector(file, int(process.stdout.readline()))
        finally:
            process.terminate()


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


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        with Path(sys.argv[1]).open("a") as file:
            for span in _spans(ExportTraceServiceRequest.FromString(body)):
                print(json.dumps(vars(span)), file=file)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    """Serve until the process is ended."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
