"""`lanes_caller` over HTTP: a connection for each slot, with tensors in the requests' bodies."""

import json
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.http_caller import Connection, infer_request
from benchmarks.serving.lanes_caller import WARM_REQUESTS, pause, window


def repeat(connection: Connection, request: bytes, end: float, between: float) -> list[tuple[int, int]]:
    """Send a request until `end`, each after a pause; when each was sent and answered, in nanoseconds."""
    stamps: list[tuple[int, int]] = []
    while time.perf_counter() < end:
        sent = time.perf_counter_ns()
        connection.call(request)
        stamps.append((sent, time.perf_counter_ns()))
        pause(between)
    return stamps


def results(
    connections: list[Connection], request: bytes, given: dict[str, Any], start: float, end: float
) -> dict[str, Any]:
    """What happened between these times of `time.perf_counter`."""
    stamps: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda c=connection: stamps.extend(repeat(c, request, end, given["pause"])))
        for connection in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_time = [stamp for stamp in stamps if start <= stamp[1] / 1e9 <= end]
    return {
        "stamps": [stamp for stamp in in_time if start <= stamp[0] / 1e9],
        "answered": len(in_time),
    }


def main() -> None:
    """Measure until stdin ends."""
    for line in sys.stdin:
        given = json.loads(line)
        port = urlsplit(given["url"]).port
        assert port is not None
        request = infer_request(given["model"], given["tokens"], given["hidden_size"])
        connections = [Connection(port) for _ in range(given["slots"])]
        for _ in range(WARM_REQUESTS // given["slots"]):
            for connection in connections:
                connection.call(request)
        print(json.dumps("ready"), flush=True)
        print(json.dumps(results(connections, request, given, *window())), flush=True)
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    main()
