"""A caller of a server over HTTP in a process of its own: one event loop for all connections.

It costs less processor time than `http_caller`, which matters where server and caller share two cores. The
request is built once; every answer's status is checked. Latency is from the first byte sent to the last byte
received.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import uvloop

WARM_UP_SECONDS = 0.5


def infer_request(tokens: int, hidden_size: int, datatype: str) -> bytes:
    """A whole binary request of random numbers, FP32 or BF16, to the model "moe"."""
    rows = np.random.default_rng(0).standard_normal((tokens, hidden_size), dtype=np.float32)
    data = (rows if datatype == "FP32" else (rows.view(np.uint32) >> 16).astype(np.uint16)).tobytes()
    tensor = {"name": "hidden_states", "shape": [tokens, hidden_size], "datatype": datatype}
    inputs = [{**tensor, "parameters": {"binary_data_size": len(data)}}]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    head = (
        "POST /v2/models/moe/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + len(data)}\r\n\r\n"
    )
    return head.encode() + text + data


class Caller(asyncio.BufferedProtocol):
    """One connection in a closed loop until `end`; calls `answered` with the seconds of each answer."""

    def __init__(self, request: bytes, end: float, answered: Callable[[float], None]) -> None:
        self._request, self._end, self._answered = request, end, answered
        self._buffer = memoryview(bytearray(1 << 20))
        self._head = b""
        self._left = 0  # bytes of the answer's body
        self._sent = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._left:
            self._left -= nbytes
        else:
            self._head += self._buffer[:nbytes]
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            lines = head.lower().split(b"\r\n")
            if b" 200 " not in lines[0]:
                self.done.set_exception(RuntimeError(self._head.decode("latin-1")))
                self._transport.abort()
                return
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self._head, self._left = b"", length - len(rest)
        if not self._left:
            self._next()

    def _next(self) -> None:
        now = time.perf_counter()
        self._answered(now - self._sent)
        if now < self._end:
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)


async def run(port: int, request: bytes, connections: int, seconds: float) -> list[float]:
    """Latencies in seconds of a closed loop over `connections`, after a warm-up."""
    latencies: list[float] = []
    begin = time.perf_counter() + WARM_UP_SECONDS

    def answered(latency: float) -> None:
        if time.perf_counter() - latency >= begin:
            latencies.append(latency)

    loop = asyncio.get_running_loop()

    def caller() -> Caller:
        return Caller(request, begin + seconds, answered)

    made = [await loop.create_connection(caller, "127.0.0.1", port) for _ in range(connections)]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    return latencies


def main() -> None:
    """Reads {port, tokens, hidden_size, datatype, connections, seconds} from stdin; prints JSON."""
    given = json.load(sys.stdin)
    request = infer_request(given["tokens"], given["hidden_size"], given["datatype"])
    seconds: float = given["seconds"]
    latencies = sorted(uvloop.run(run(given["port"], request, given["connections"], seconds)))
    if not latencies:
        raise RuntimeError(f"expected answers within {seconds} s, got none")
    p50, p99 = (1e3 * latencies[int(part * len(latencies))] for part in (0.5, 0.99))
    print(json.dumps({"rps": len(latencies) / seconds, "p50_ms": p50, "p99_ms": p99}))


if __name__ == "__main__":
    main()
