"""A rolling update as Kubernetes makes it with this chart: of two server processes, under a pool's calls.

Pods have addresses of their own on the loopback interface, and a name that gives them as the headless
Service does.
"""

import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertd_client import ExpertClient
from tests.chart.rendering import (
    NAMESPACE,
    Helm,
    Object,
    container,
    data,
    environment,
    headless,
    one,
    templates,
)
from tests.service.apps import MODEL, tiny_settings
from tests.service.processes import EXPERTD, clean_environment, started
from tests.service.sockets import free_port
from tests.service.waiting import wait_for
from tests.soak.reference import samples
from tests.test_container import arguments_of

LAYER = str(MODEL["name"])
VALUES = {
    "insecure": True,
    "gpus": 0,
    "replicas": 2,
    "settings": {
        "backend": "reference",
        "models": [MODEL],
        "shutdown_delay_seconds": 1,  # by default longer, for callers without a pool
    },
}


class Pod:
    """A server as its pod runs it, at an address of its own."""

    def __init__(self, objects: list[Object], address: str, port: int, folder: Path) -> None:
        self.address, self.url = address, f"http://{address}:{port}"
        self.is_in_service = False  # as of the last probe, unless it is being deleted
        (self._template,) = templates(objects)
        self._log = folder / f"{address}.log"
        config = folder / "config.yaml"
        config.write_text(data(objects, "config.yaml"))
        variables = {
            **environment(self._template),
            "EXPERTD_CONFIG": str(config),
            "XDG_RUNTIME_DIR": str(folder),
        }
        command: list[str | Path] = [EXPERTD, "serve", "--host", address, "--port", str(port)]
        with self._log.open("wb") as stderr:
            self._process = started(command, stderr, clean_environment(**variables))

    def probe(self) -> bool:
        """Whether it is ready."""
        assert self._process.poll() is None, self._log.read_text()
        path = container(self._template)["readinessProbe"]["httpGet"]["path"]
        try:
            self.is_in_service = self._get(path).status_code == 200
        except httpx.ConnectError:  # it does not listen yet
            self.is_in_service = False
        return self.is_in_service

    def has_answered(self) -> bool:
        """A call."""
        stats = self._get(f"/v2/models/{LAYER}/stats").json()
        return bool(stats["model_stats"][0]["inference_count"])

    def delete(self) -> None:
        """End it by SIGTERM; it has to be done with all calls before SIGKILL would follow."""
        assert container(self._template).get("lifecycle") is None, "a preStop would come first"
        assert not arguments_of("STOPSIGNAL"), "expected an image that is stopped by SIGTERM"
        self.is_in_service = False
        self._process.terminate()
        seconds = self._template["spec"]["terminationGracePeriodSeconds"]
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = self.kill()
        assert code == 0, (
            f"expected a drain within {seconds} s, got exit code {code}: {self._log.read_text()}"
        )

    def kill(self) -> int:
        """End it at once."""
        self._process.kill()
        return self._process.wait()

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, verify=False)


class Cluster:
    """The chart's StatefulSet and its headless Service."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self._objects, self._folder = objects, folder
        self._service = headless(objects)
        self._addresses = (f"127.57.0.{number}" for number in range(1, 255))
        self._port = free_port()
        self.pods: list[Pod] = []

    @property
    def url(self) -> str:
        """What callers with a pool have: the pods' port is another one here."""
        return f"dns:{self._name}:{self._port}"

    def create(self) -> None:
        """As many pods as the chart says, all at once; wait until they are ready."""
        for _ in range(one(self._objects, "StatefulSet")["spec"]["replicas"]):
            self.pods.append(self._new_pod())
        for pod in self.pods:
            wait_for(pod.probe, "the pod is ready")

    def replace(self, number: int) -> None:
        """Delete a pod, and wait until a new one is ready in its place."""
        self.pods[number].delete()
        self.pods[number] = self._new_pod()
        wait_for(self.pods[number].probe, "the new pod is ready")

    @contextmanager
    def names(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Have this process look up the Service's name as pods do."""
        look_up = socket.getaddrinfo

        def looked_up(host: Any, port: Any, *arguments: Any, **options: Any) -> list[Any]:
            if host != self._name:
                return look_up(host, port, *arguments, **options)
            places = [(address, port) for address in self._published()]
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in places]

        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", looked_up)
            yield

    def close(self) -> None:
        """End all servers."""
        for pod in self.pods:
            pod.kill()

    @property
    def _name(self) -> str:
        return f"{self._service['metadata']['name']}.{NAMESPACE}.svc"

    def _published(self) -> list[str]:
        has_all = self._service["spec"].get("publishNotReadyAddresses", False)
        return [pod.address for pod in self.pods if has_all or pod.is_in_service]

    def _new_pod(self) -> Pod:
        return Pod(self._objects, next(self._addresses), self._port, self._folder)


class Load:
    """Calls of several threads by each of two clients, one after the other, until the end."""

    def __init__(self, url: str) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.clients = [ExpertClient(url, transport="http", timeout=60) for _ in range(2)]
        self._samples = samples(tiny_settings(), count=1, sizes={1: 1, 16: 1})
        self._lock, self._is_over = threading.Lock(), False
        self._threads = [threading.Thread(target=self._call, args=(client,)) for client in 2 * self.clients]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
        for client in self.clients:
            client.close()

    def know(self, pods: list[Pod]) -> bool:
        """Whether the clients call these servers, and no others."""
        known = {pod.url: "up" for pod in pods}
        return all({each.url: each.state for each in client.servers()} == known for client in self.clients)

    def _call(self, client: ExpertClient) -> None:
        for sample in cycle(self._samples):
            if self._is_over:
                return
            try:
                is_right = sample.is_right(client.infer(LAYER, *sample.arguments))
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self.counts["right" if is_right else "wrong"] += 1


@pytest.mark.thorough  # server processes for 7 seconds
def test_a_rolling_update_under_load_loses_no_call(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(helm.render(VALUES), tmp_path)
    try:
        cluster.create()
        old = list(cluster.pods)
        with cluster.names(monkeypatch), Load(cluster.url) as load:
            for pod in cluster.pods:
                wait_for(pod.has_answered, "each server gets calls")
            for number in reversed(range(len(cluster.pods))):
                cluster.replace(number)
                # What `minReadySeconds` is for.
                wait_for(partial(load.know, cluster.pods), "callers know the new server")
            for pod in cluster.pods:
                wait_for(pod.has_answered, "each new server gets calls")
    finally:
        cluster.close()
    assert not set(old) & set(cluster.pods)
    assert load.errors == []
    assert load.counts.keys() == {"right"}
