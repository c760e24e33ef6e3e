"""Runs docker-compose.yml for real, and looks at all of its services: `python -m deploy.compose_check`.

Needs an engine and the image expertd:cpu. With `--stand-ins BASE`, the image of a Debian with Python, it puts
Debian's Prometheus, and a server of the files that Grafana would read, in the place of images that cannot be
pulled. Prints each check; exits with 1 at the first that fails.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 120
_PROMETHEUS = """FROM {base}
RUN command -v prometheus || {{ apt-get update && apt-get install -y --no-install-recommends prometheus; }}
ENTRYPOINT ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
_GRAFANA = """FROM {base}
ENTRYPOINT ["python3", "-m", "http.server", "3000", "--directory", "/etc/grafana"]
"""
_WRITABLE = "import os; print(os.getuid(), *(os.access(p, os.W_OK) for p in ('.', '/var/cache/expertd')))"


class Compose:
    """One way to start the services."""

    def __init__(self, command: list[str], files: list[str], environment: dict[str, str]) -> None:
        self._command = [*command, *(part for file in files for part in ("-f", file))]
        self._environment = {**os.environ, "COMPOSE_PROJECT_NAME": "expertd-check", **environment}

    def run(self, *arguments: str) -> str:
        """The output of one Compose command."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            got = f"{done.returncode}: {done.stderr[-2000:]}"
            raise RuntimeError(f"compose {' '.join(arguments)}: expected exit code 0, got {got}")
        return done.stdout

    @contextmanager
    def up(self) -> Iterator[None]:
        """The services, which are removed with their volumes afterwards."""
        try:
            self.run("up", "-d", "--no-build")
            yield
        except Exception:
            print(self.run("logs", "--no-color", "--tail=50"))
            raise
        finally:
            self.run("down", "--volumes", "--timeout", "60")


def check_services(compose: Compose, has_grafana: bool) -> None:
    """The server answers, Prometheus reads it and knows the rules, Grafana has the dashboard."""
    with compose.up():
        _wait("expertd: ready", lambda: _get(8000, "/v2/health/ready") is not None)
        _infer("demo", 512)
        identity = compose.run("exec", "-T", "expertd", "python", "-c", _WRITABLE).split()
        _expect("expertd: uid; writes to its folder, to the cache", identity, ["10001", "False", "True"])
        _wait("prometheus: scrapes expertd", lambda: _value('up{job="expertd"}') == 1)
        _wait("prometheus: has counted the request", lambda: (_value("expertd_requests_total") or 0) >= 1)
        rules = [rule for group in _prometheus("rules")["groups"] for rule in group["rules"]]
        _expect(f"prometheus: health of {len(rules)} rules", {rule["health"] for rule in rules}, {"ok"})
        path = "/api/dashboards/uid/expertd" if has_grafana else "/dashboards/expertd.json"
        _wait(f"grafana: answers {path}", lambda: _get(3000, path) is not None)
        (container,) = compose.run("ps", "-q", "expertd").split()
        compose.run("stop", "--timeout", "60", "expertd")
        inspect = ["docker", "inspect", "--format", "{{.State.ExitCode}}", container]
        _expect("expertd: exit code after SIGTERM", int(subprocess.check_output(inspect)), 0)


def check_ranks(compose: Compose, num_ranks: int) -> None:
    """The server has its ranks, and answers."""
    with compose.up():
        _wait("expertd: ready", lambda: _get(8000, "/v2/health/ready") is not None)
        _infer("demo", 512)
        lines = (_get(8000, "/metrics") or b"").decode().splitlines()
        ups = [line for line in lines if line.startswith("expertd_rank_up{") and line.endswith(" 1.0")]
        _expect("expertd: ranks", len(ups), num_ranks)


def _get(port: int, path: str) -> bytes | None:
    """The body of a 200; None for anything else."""
    return _call(port, "GET", path, None)


def _call(port: int, method: str, path: str, body: str | None) -> bytes | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        return content if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _infer(model: str, hidden_size: int) -> None:
    tensor: dict[str, Any] = {"name": "hidden_states", "datatype": "FP32", "shape": [1, hidden_size]}
    body = json.dumps({"inputs": [{**tensor, "data": [0.5] * hidden_size}]})
    answer = json.loads(_call(8000, "POST", f"/v2/models/{model}/infer", body) or b"{}")
    _expect("expertd: answers", [output["shape"] for output in answer.get("outputs", [])], [[1, hidden_size]])


def _value(query: str) -> float | None:
    """The first value of a vector that Prometheus has."""
    found = _prometheus("query?" + urllib.parse.urlencode({"query": query})).get("result")
    return float(found[0]["value"][1]) if found else None


def _prometheus(call: str) -> dict[str, Any]:
    """What Prometheus answers; nothing while it starts."""
    content = _get(9090, f"/api/v1/{call}")
    data: dict[str, Any] = json.loads(content)["data"] if content else {}
    return data


def _wait(what: str, condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > _SECONDS:
            raise RuntimeError(f"{what}: expected within {_SECONDS} s, got nothing")
        time.sleep(0.5)
    print(f"ok  {what} ({time.monotonic() - start:.1f} s)", flush=True)


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise RuntimeError(f"{what}: expected {expected}, got {got}")
    print(f"ok  {what}: {got}", flush=True)


def _build(tag: str, dockerfile: str) -> str:
    command = ["docker", "build", "-q", "--network=host", "-t", tag, "-"]
    subprocess.run(command, input=dockerfile.encode(), check=True)
    return tag


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description="Runs docker-compose.yml, and looks at its services.")
    parser.add_argument("--stand-ins", metavar="BASE", help="image from which stand-ins are built")
    parser.add_argument("--compose", default="docker compose", help="the command (default: docker compose)")
    arguments = parser.parse_args()
    environment = {}
    if arguments.stand_ins:
        environment = {
            "PROMETHEUS_IMAGE": _build("local/prometheus", _PROMETHEUS.format(base=arguments.stand_ins)),
            "GRAFANA_IMAGE": _build("local/grafana", _GRAFANA.format(base=arguments.stand_ins)),
        }
    command, main_file = arguments.compose.split(), "docker-compose.yml"
    try:
        print("docker-compose.yml")
        check_services(Compose(command, [main_file], environment), not arguments.stand_ins)
        print("two ranks in one container")
        two_ranks = {**environment, "CONFIG": "configs/demo-2ranks.yaml"}
        check_ranks(Compose(command, [main_file], two_ranks), 2)
        print("two nodes, deploy/compose/nodes.yml")
        check_ranks(Compose(command, [main_file, "deploy/compose/nodes.yml"], environment), 2)
    except RuntimeError as error:
        print(f"failed  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
