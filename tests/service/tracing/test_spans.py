"""Spans of real servers' requests, as a collector gets them."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from expertd import __version__
from expertd.service.engine.steps import StepTimes
from expertd.service.moe.step.stages import Stage
from expertd.service.settings.parts import TracingSettings
from expertd.service.tracing import Rpc, TracedRequest, Tracing
from tests.paths import ROOT
from tests.service.apps import hidden_request, rows, tiny_settings
from tests.service.http.processes import two_processes
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import free_port
from tests.service.tracing.collector import Collector, Span, collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, INTERNAL, ERROR = 2, 1, 2  # numbers of OTLP
PARTS = ["receive", "queue", "step", "answer"]
STAGES = ["copy_in", "router", "sort", "ffn", "combine", "copy_out"]  # of a step on a CPU

pytestmark = pytest.mark.slow


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds
    with collector() as running:
        yield running


def tracing(spans: Collector, ratio: float = 0.0) -> dict[str, Any]:
    return {"tracing": {"endpoint": spans.endpoint, "sample_ratio": ratio}}


def infer(server: ServerProcess, num_tokens: int, *, sampled: bool | None, name: str = "mine") -> int:
    content, length = hidden_request(rows(num_tokens), id=name)
    headers = {"Inference-Header-Content-Length": str(length)}
    if sampled is not None:
        headers |= {"traceparent": f"00-{TRACE}-{SPAN}-0{int(sampled)}", "tracestate": "one=1,two=2"}
    url = f"http://{server.url}/v2/models/tiny/infer"
    return httpx.post(url, content=content, headers=headers, timeout=60, verify=False).status_code


def end_of(server: ServerProcess) -> int:
    """The exit code after SIGTERM."""
    server.terminate()
    return server.process.wait(timeout=60)


def check_parts(server: Span, parts: list[Span]) -> None:
    """Each part is the server span's child, and begins when the one before it ends."""
    assert {part.parent_id for part in parts} == {server.span_id}
    assert {part.trace_id for part in parts} == {server.trace_id}
    assert {part.kind for part in parts} == {INTERNAL}
    assert server.begin == parts[0].begin
    assert server.end == parts[-1].end
    for one, other in pairwise(parts):
        assert one.begin <= one.end
        assert abs(other.begin - one.end) <= 1000


def check_stages(step: Span, stages: list[Span]) -> None:
    """Each stage is the step's child, and begins when the one before it ends; they are most of it."""
    if not stages:
        return
    assert [stage.name for stage in stages] == STAGES
    assert {stage.parent_id for stage in stages} == {step.span_id}
    assert {stage.trace_id for stage in stages} == {step.trace_id}
    assert [stage.attributes for stage in stages] == [{"expertd.clock": "host"}] * len(STAGES)
    assert step.begin <= stages[0].begin
    assert stages[-1].end <= step.end
    for one, other in pairwise(stages):
        assert one.begin < one.end
        assert abs(other.begin - one.end) <= 1000
    outside = (step.end - step.begin) - (stages[-1].end - stages[0].begin)
    assert outside < 5_000_000  # what a busy machine may add to it


@pytest.mark.parametrize("kind", ["one process", "several"])
def test_a_request_has_a_span_for_each_part_of_its_time(kind: str, spans: Collector, tmp_path: Path) -> None:
    make = tiny_settings if kind == "one process" else two_processes
    with server_process(make(**tracing(spans)), tmp_path) as running:
        assert infer(running, 2, sampled=False) == 200
        assert infer(running, 2, sampled=None) == 200  # the ratio is 0
        begin = time.time_ns()
        assert infer(running, 3, sampled=True) == 200
        end = time.time_ns()
        found = spans.wait(5 + (len(STAGES) if kind == "one process" else 0))
        server, *others = sorted(found, key=lambda span: span.kind != SERVER)
        port = int(running.url.rpartition(":")[2])
    assert (server.trace_id, server.parent_id, server.trace_state) == (TRACE, SPAN, "one=1,two=2")
    assert (server.name, server.kind, server.status) == ("POST /v2/models/{model}/infer", SERVER, 0)
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v2/models/{model}/infer",
        "http.response.status_code": 200,
        "url.path": "/v2/models/tiny/infer",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": port,
        "expertd.model": "tiny",
        "expertd.tokens": 3,
        "expertd.request_id": "mine",
    }
    assert server.resource["service.name"] == "expertd"
    assert server.resource["service.version"] == __version__
    assert begin < server.begin < server.end < end + 10**7  # the client may have its answer before
    parts = sorted((span for span in others if span.name in PARTS), key=lambda span: PARTS.index(span.name))
    assert [part.name for part in parts] == PARTS
    check_parts(server, parts)
    known = {"expertd.step.tokens": 3} if kind == "one process" else {}
    assert [part.attributes for part in parts] == [{}, {}, known, {}]
    assert parts[2].end > parts[2].begin
    check_stages(parts[2], [span for span in others if span not in parts])


def ending(times: StepTimes | None, status: int, reason: str | None, rpc: Rpc | None) -> TracedRequest:
    return TracedRequest(
        started=5.0,
        ended=5.5,
        context=None,
        times=times,
        rpc=rpc,
        headers=[(b"host", b"[::1]:80")],
        is_tls=True,
        model="tiny",
        request_id=None,
        tokens=None,
        status=status,
        reason=reason,
    )


def test_requests_may_end_in_other_ways(spans: Collector) -> None:
    tracing = Tracing(TracingSettings(endpoint=spans.endpoint))
    tracing.start()
    rpc = Rpc("a.Service/Infer", [], lambda status, reason: f"{status} {reason}")
    tracing.add(ending(StepTimes(5.1, None, 5.4, 0), 503, "queue_timeout", None))
    tracing.add(ending(StepTimes(5.1, 5.2, 9.9, 0), 499, "client_gone", None))
    tracing.add(ending(None, 400, "invalid_request", rpc))
    tracing.stop()
    found = spans.wait(3 + 3 + 4)
    of = {span.attributes["expertd.refusal"]: span for span in found if span.kind == SERVER}
    parts: dict[str, dict[str, Span]] = {span.span_id: {} for span in of.values()}
    for span in found:
        if span.kind == INTERNAL:
            parts[span.parent_id][span.name] = span
    late, gone, wrong = (of[name] for name in ("queue_timeout", "client_gone", "invalid_request"))
    assert list(parts[late.span_id]) == ["receive", "queue", "answer"]
    assert list(parts[gone.span_id]) == PARTS
    assert list(parts[wrong.span_id]) == []
    queue = parts[late.span_id]["queue"]
    assert abs(queue.end - queue.begin - 300_000_000) < 1000
    assert {span.end - span.begin for span in of.values()} == {500_000_000}
    assert parts[gone.span_id]["step"].end == parts[gone.span_id]["answer"].end == gone.end
    ends = [(span.status, span.attributes.get("error.type")) for span in (late, gone, wrong)]
    assert ends == [(ERROR, "queue_timeout"), (ERROR, "client_gone"), (0, None)]
    assert "http.response.status_code" not in gone.attributes
    assert late.attributes["url.scheme"] == "https"
    assert (late.attributes["server.address"], late.attributes["server.port"]) == ("::1", 80)
    assert wrong.name == "a.Service/Infer"
    assert wrong.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "a.Service/Infer",
        "rpc.response.status_code": "400 invalid_request",
        "expertd.model": "tiny",
        "expertd.refusal": "invalid_request",
    }


class GpuStep:
    """A step whose stages were timed by a GPU."""

    clock: ClassVar[str] = "gpu"

    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def stages(self) -> Sequence[Stage]:
        return self._stages


def test_stages_lie_within_their_step(spans: Collector) -> None:
    """Whatever a GPU's clock says; the step ends no sooner than they do, and a gap between them stays."""
    tracing = Tracing(TracingSettings(endpoint=spans.endpoint))
    tracing.start()
    request = ending(StepTimes(5.1, 5.2, 5.3, 7), 200, None, None)
    first = GpuStep(Stage("copy_in", 5.19, 5.21), Stage("sort", 5.22, 5.31))
    retry = GpuStep(Stage("sort", 5.32, 5.40), Stage("combine", 5.40, 5.6), Stage("copy_out", 5.6, 5.7))
    request.timed = [first, retry]
    tracing.add(request)
    tracing.stop()
    found = spans.wait(5 + 4)
    (server,) = (span for span in found if span.kind == SERVER)
    parts = sorted((span for span in found if span.name in PARTS), key=lambda span: PARTS.index(span.name))
    check_parts(server, parts)
    step = parts[2]
    assert step.end == server.end, "the last stage ends after the answer"
    children = [span for span in found if span.parent_id == step.span_id]
    assert {(*span.attributes.items(),) for span in children} == {(("expertd.clock", "gpu"),)}
    assert [span.name for span in children] == ["copy_in", "sort", "sort", "combine"]

    def ms(nanoseconds: int) -> int:
        return round((nanoseconds - step.begin) / 1e6)

    times = [(ms(span.begin), ms(span.end)) for span in children]
    assert times == [(0, 10), (20, 110), (120, 200), (200, 300)]


def test_what_is_left_is_exported_at_the_end(spans: Collector, tmp_path: Path) -> None:
    with server_process(tiny_settings(**tracing(spans, 1.0)), tmp_path) as running:
        assert infer(running, 65, sampled=None, name="large") == 400
        assert infer(running, 1, sampled=None) == 200
        assert end_of(running) == 0
    refused, *rest = spans.wait(6 + len(STAGES))
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["expertd.refusal"] == "too_many_tokens"
    assert refused.attributes["expertd.request_id"] == "large"
    assert refused.status == 0  # the caller's mistake
    assert refused.parent_id == ""
    assert {span.trace_id for span in rest} == {rest[0].trace_id} != {refused.trace_id}


@pytest.mark.thorough  # it is waited for at the end, for seconds
def test_a_collector_that_is_not_there_delays_nothing(tmp_path: Path) -> None:
    settings = tiny_settings(tracing={"endpoint": "http://127.0.0.1:9/v1/traces", "sample_ratio": 1.0})
    with server_process(settings, tmp_path) as running:
        assert infer(running, 1, sampled=None) == 200
        assert end_of(running) == 0
    assert "spans were not exported to http://127.0.0.1:9/v1/traces within 3 s" in running.log()


def test_a_dead_collector_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.75")  # less than until a second attempt
    from expertd.service.tracing.spans import Spans

    caplog.set_level(logging.INFO)
    port = free_port()
    spans = Spans(f"http://127.0.0.1:{port}/v1/traces")
    request = ending(StepTimes(5.1, 5.2, 5.3, 7), 200, None, None)
    for _ in range(3):
        spans.add(request)
        spans._provider.force_flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"spans cannot be exported to http://127.0.0.1:{port}/v1/traces" in caplog.text
    assert len(caplog.records[0].getMessage()) < 400
    with collector(port):
        for _ in range(2):
            spans.add(request)
            spans._provider.force_flush()
        spans.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].getMessage() == f"spans are exported to http://127.0.0.1:{port}/v1/traces again"


def test_nothing_is_imported_without_an_endpoint() -> None:
    program = """
import json, sys
from expertd.service.http import worker  # with all that makes requests' spans
from expertd.service.settings.parts import TracingSettings
from expertd.service.tracing import Tracing, tracing_of
assert tracing_of(TracingSettings()) is None
Tracing(TracingSettings(endpoint="http://127.0.0.1:9/"))  # it is imported at `start`
parts = ("opentelemetry.sdk", "opentelemetry.exporter", "requests", "google.protobuf")
print(json.dumps([name for name in sys.modules if name.startswith(parts)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
