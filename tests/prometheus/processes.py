"""A real Prometheus with this project's configuration, and what it scrapes."""

import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from expertd.layout import Layout
from expertd.service.moe.request import StepResult
from expertd_client import ExpertClient
from expertd_client.metrics import PoolCollector
from tests.paths import ROOT
from tests.service.apps import rows
from tests.service.engine.all_metrics import everything
from tests.service.sockets import free_port
from tests.service.waiting import wait_for

CONFIGS = ROOT / "configs" / "prometheus"
DASHBOARD = ROOT / "configs" / "grafana" / "dashboards" / "expertd.json"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus")
Sample = tuple[dict[str, str], float]


class Prometheus:
    """A running one."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._ready_url = f"http://127.0.0.1:{port}/-/ready"  # 503 before

    def query(self, expression: str) -> list[Sample]:
        """The vector that an expression has now."""
        found = self._get("query", query=expression)
        assert found["resultType"] == "vector", expression
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def is_up(self, num_targets: int) -> bool:
        """Whether all targets have been scraped."""
        try:
            is_ready = httpx.get(self._ready_url, timeout=60, verify=False).status_code == 200
        except httpx.TransportError:
            return False
        return is_ready and sum(value for _, value in self.query("up")) == num_targets

    def alerts(self) -> set[str]:
        """The alerts that are pending or firing."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"]}

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/{path}", params=parameters, timeout=60, verify=False)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]


@contextmanager
def prometheus(targets: Sequence[str], directory: Path) -> Iterator[Prometheus]:
    """One that scrapes `targets` twice a second, with the rules of configs/prometheus/."""
    config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(CONFIGS / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        running = Prometheus(port)
        wait_for(lambda: running.is_up(len(targets)), "Prometheus has scraped every target")
        yield running
    finally:
        process.kill()
        process.wait()


@contextmanager
def exporter(registry: CollectorRegistry, before_scrape: Callable[[], object]) -> Iterator[str]:
    """The address of a registry's /metrics."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            before_scrape()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def gpu_exporter() -> Iterator[str]:
    """The address of /metrics as of a server on a GPU: a step ends before each scrape."""
    metrics = everything()

    def end_a_step() -> None:
        step = StepResult([], Layout.CONTIGUOUS, 8, partial(np.array, [4, 4, 8, 0]), 100e-6)
        metrics.step_done("tiny", step, [20e-6])

    with exporter(metrics.registry, end_a_step) as address:
        yield address


@contextmanager
def caller_exporter(urls: Sequence[str]) -> Iterator[str]:
    """The address of /metrics of a pool's caller: a call ends before each scrape."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    with ExpertClient(urls) as client:
        call = partial(client.infer, "tiny", rows(2))
        with exporter(registry, call) as address:
            yield address


def promtool(*arguments: object) -> str:
    """What promtool says."""
    command = ["promtool", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of a file in configs/prometheus/."""
    groups = yaml.safe_load((CONFIGS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panel_expressions() -> list[str]:
    """The expressions of the dashboard; $instance is still to be replaced."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [expr.replace("$__rate_interval", "10s") for expr in targets]


def selectors(expression: str) -> list[str]:
    """The series that an expression reads."""
    return re.findall(r"\b(?:(?:expertd|process)_\w+|expertd:[\w:]+|up\b)(?:\{[^}]*\})?", expression)
