"""Traffic for tests that look at what a server says of it."""

import threading

import httpx

from tests.service.apps import hidden_request, rows
from tests.service.processes import ServerProcess


class Load:
    """Requests to "tiny" on servers, some of them refused, from a thread of its own, until the block ends."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self._urls = [f"http://{server.url}/v2/models/tiny/infer" for server in servers]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        requests = [hidden_request(rows(tokens)) for tokens in (1, 2, 8)]
        with httpx.Client(timeout=60, verify=False) as client:
            while not self._end.wait(0.05):
                for url in self._urls:
                    for body, length in requests:
                        head = {"Inference-Header-Content-Length": str(length)}
                        assert client.post(url, content=body, headers=head).status_code == 200
                    assert client.post(url, content=b"{").status_code == 400
