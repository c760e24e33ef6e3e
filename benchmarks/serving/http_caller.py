"""A caller of a server over HTTP in a process of its own: raw keep-alive sockets, one thread each.

The request is built once and sent again and again; every answer's status and size is checked. Latency is from
the first byte sent to the last byte received. See `benchmarks.lib.callers` for when requests count.
"""

import json
import socket
import sys
import threading
import time

import numpy as np

from benchmarks.lib.callers import window


def infer_request(model: str, num_tokens: int, hidden_size: int, **parameters: object) -> bytes:
    """A whole binary BF16 request of random tokens; with `region` parameters, without its tensors."""
    generator = np.random.default_rng(num_tokens)
    rows = generator.standard_normal((num_tokens, hidden_size), dtype=np.float32)
    data = (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    shape = {"name": "hidden_states", "shape": [num_tokens, hidden_size], "datatype": "BF16"}
    source, target = parameters.get("input"), parameters.get("output")
    head = {
        "inputs": [{**shape, "parameters": source or {"binary_data_size": len(data)}}],
        "outputs": [{"name": "hidden_states", "parameters": target or {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    body = text if source else text + data
    header = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n{'' if source else header}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)

    def call(self, request: bytes) -> int:
        """Send a request and read the answer; its number of body bytes. Raises RuntimeError unless 200."""
        self._socket.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = self._socket.recv(65536)
            if not piece:
                raise RuntimeError("the server closed the connection")
            received += piece
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        if lines[0].split()[1] != b"200":
            raise RuntimeError(received[:500].decode())
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        left = length - len(rest)
        while left:
            left -= self._socket.recv_into(self._buffer, min(left, len(self._buffer)))
        return length

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def run(port: int, request: bytes, least_bytes: int, connections: int, seconds: float) -> list[float]:
    """Latencies in seconds of a closed loop over each of the connections, of requests that count."""
    latencies: list[float] = []
    errors: list[BaseException] = []
    connected = [Connection(port) for _ in range(connections)]
    begin, end = window(seconds)

    def loop(connection: Connection) -> None:
        try:
            while (sent := time.perf_counter()) < end:
                if connection.call(request) < least_bytes:
                    raise RuntimeError(f"expected at least {least_bytes} bytes")
                if sent >= begin:
                    latencies.append(time.perf_counter() - sent)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(connection,)) for connection in connected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return latencies


def main() -> None:
    """Reads {port, model, tokens, hidden_size, connections, seconds} from stdin; prints latencies as JSON."""
    given = json.loads(sys.stdin.readline())
    request = infer_request(given["model"], given["tokens"], given["hidden_size"])
    least = given["tokens"] * given["hidden_size"] * 2
    print(json.dumps(run(given["port"], request, least, given["connections"], given["seconds"])))


if __name__ == "__main__":
    main()
