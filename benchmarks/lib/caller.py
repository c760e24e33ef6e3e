"""A program that calls a server again and again: over HTTP, with tensors in regions, or through channels.

It reads a line of JSON from stdin, prepares, and answers with a line when it is ready. Then it reads {start,
seconds}, and sends requests until `seconds` after `start`: each of `connections` callers as soon as one of
its `slots` is free. It prints the stamps [sent, answered] of each request, in nanoseconds of the machine's
monotonic clock, which all processes share. Then it reads the next line. `start_callers` and `call_together`
are for the programs that start it. A line has:

way          http, region or channel
url, models  of the server; over HTTP, the first model only; of channels, each caller calls all in turn
tokens, hidden_size, datatype  of a request: FP32 or BF16 (the default)
device       of the tensors, None: memory of the host
connections  callers, each of which has its own connection or channel
slots        requests in flight, of each caller of channels
pause        seconds between an answer and the next request
over_nixl    whether channels are over NIXL
spin         seconds for which a caller of channels looks for an answer before it sleeps
"""

import base64
import itertools
import json
import os
import select
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import shared_memory
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.processes import Program
from expertd_client import ExpertClient

CALLER = "benchmarks.lib.caller"
POWER_SECONDS = 2.0  # that a GPU takes to reach the clock that its power limit allows
SPIN_SECONDS = 0.02  # longer than a step: a caller that sleeps is woken 0.05 to 0.2 ms late
WARM_REQUESTS = 24  # among them those that a server captures as CUDA graphs
Stamps = list[tuple[int, int]]
Loop = Callable[[int], Stamps]
"""Calls until a time in nanoseconds."""


def tokens_of(num_tokens: int, hidden_size: int, datatype: str = "BF16") -> NDArray[Any]:
    """The tokens that all callers send: float32, or the bits of bfloat16."""
    shape = num_tokens, hidden_size
    rows = np.random.default_rng(num_tokens).standard_normal(shape, dtype=np.float32)
    return rows if datatype == "FP32" else (rows.view(np.uint32) >> 16).astype(np.uint16)


def infer_request(
    model: str,
    tokens: NDArray[Any],
    places: tuple[dict[str, Any], dict[str, Any]] | None = None,
    **parameters: object,
) -> bytes:
    """A whole binary request; places: the regions of its tensors, instead of bodies."""
    datatype = "FP32" if tokens.dtype == np.float32 else "BF16"
    tensor = {"name": "hidden_states", "shape": tokens.shape, "datatype": datatype}
    source, target = places or ({"binary_data_size": tokens.nbytes}, {"binary_data": True})
    head = {
        "inputs": [{**tensor, "parameters": source}],
        "outputs": [{"name": "hidden_states", "parameters": target}],
        "parameters": parameters,
    }
    text = json.dumps(head).encode()
    body = text if places else text + tokens.tobytes()
    length = "" if places else f"Inference-Header-Content-Length: {len(text)}\r\n"
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n{length}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Connection:
    """One keep-alive connection: `call` waits for the answer, `begin`, `write` and `read` never do."""

    def __init__(self, port: int, blocking: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(blocking)
        self.unsent = memoryview(b"")
        self.sent = self.status = self.length = 0
        self._buffer = memoryview(bytearray(1 << 20))
        self._head = b""
        self._left = -1  # bytes of the answer's body; -1: its head is not complete

    def call(self, request: bytes) -> int:
        """The status of the answer."""
        self.begin(request)
        while not self.read():
            pass
        return self.status

    def begin(self, request: bytes) -> None:
        """Send as much of a request as the socket takes."""
        self.unsent, self._head, self._left = memoryview(request), b"", -1
        self.sent = time.perf_counter_ns()
        self.write()

    def write(self) -> None:
        """Send more of it."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass

    def read(self) -> bool:
        """Receive what is there; whether the answer is complete. Raises RuntimeError if there is none."""
        if not (count := self.socket.recv_into(self._buffer)):
            raise RuntimeError("the server closed the connection")
        if self._left >= 0:
            self._left -= count
            return not self._left
        self._head += self._buffer[:count]
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *lines = head.lower().split(b"\r\n")
        self.status = int(first.split()[1])
        self.length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        self._left = self.length - len(rest)
        return not self._left


def http_loop(connections: Sequence[Connection], request: bytes, min_bytes: int, pause: float) -> Loop:
    """Closed loops over all connections in one thread, which costs least where servers share its cores."""
    of = {connection.socket.fileno(): connection for connection in connections}

    def call(until: int) -> Stamps:
        stamps: Stamps = []
        with select.epoll() as poll:

            def send(connection: Connection) -> None:
                connection.begin(request)
                interest = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
                poll.modify(connection.socket, interest)

            for connection in connections:
                poll.register(connection.socket, 0)
                send(connection)
            calling = len(connections)
            while calling:
                for descriptor, event in poll.poll():
                    connection = of[descriptor]
                    if connection.unsent and event & select.EPOLLOUT:
                        connection.write()
                        if not connection.unsent:
                            poll.modify(connection.socket, select.EPOLLIN)
                    if not event & ~select.EPOLLOUT or not connection.read():
                        continue
                    now = time.perf_counter_ns()
                    if connection.status != 200 or connection.length < min_bytes:
                        raise RuntimeError(
                            f"answer: expected 200 and {min_bytes} bytes, got {connection.status} and "
                            f"{connection.length}"
                        )
                    stamps.append((connection.sent, now))
                    if now < until:
                        wait(pause)
                        send(connection)
                    else:
                        calling -= 1
                        poll.unregister(connection.socket)
        return stamps

    return call


def channel_loop(channels: Sequence[Any], tokens: int, pause: float) -> Loop:
    """One caller: a request in each slot, each through the next channel."""
    now, indices = time.perf_counter_ns, range(len(channels[0].slots))

    def call(until: int) -> Stamps:
        stamps: Stamps = []
        turn = itertools.cycle(channels)

        def send(index: int) -> tuple[int, int, Any, Any]:
            channel, sent = next(turn), now()
            return sent, index, channel, channel.submit(channel.slots[index], tokens, synchronize=False)

        waiting = deque(map(send, indices))
        while waiting:
            sent, index, channel, ticket = waiting.popleft()
            channel.wait(ticket)
            answered = now()
            stamps.append((sent, answered))
            if answered < until:
                wait(pause)
                waiting.append(send(index))
        return stamps

    return call


def wait(seconds: float) -> None:
    """As long as a caller takes between two steps; without sleeping, which takes longer than this."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def fill(rows: Any, device: str | None) -> None:
    """Write the tokens that all callers send to rows [tokens, H]."""
    bits = tokens_of(*rows.shape)
    if device is None:
        rows.view(np.uint16)[:] = bits
        return
    import torch

    rows.view(torch.uint16).copy_(torch.from_numpy(bits))
    torch.cuda.synchronize(device)


@contextmanager
def region(url: str, tokens: NDArray[Any], device: str | None) -> Iterator[tuple[dict[str, Any], ...]]:
    """The places of a request's tensors in a region with its input before its output: Triton's, or CUDA's."""
    name, size = f"benchmark-{os.getpid()}", 2 * tokens.nbytes
    base = f"{url}/v2/{'system' if device is None else 'cuda'}sharedmemory/region/{name}"

    def post(action: str, **body: object) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{base}/{action}", json.dumps(body).encode())).read()

    with ExitStack() as stack:
        if device is None:
            memory = shared_memory.SharedMemory(create=True, size=size)
            stack.callback(memory.unlink)
            stack.callback(memory.close)
            assert memory.buf is not None
            memory.buf[: tokens.nbytes] = tokens.tobytes()
            post("register", key=f"/{memory.name}", offset=0, byte_size=size)
        else:
            index = int(device.removeprefix("cuda:"))
            handle = {"b64": base64.b64encode(cuda_memory(tokens, index)).decode()}
            post("register", raw_handle=handle, device_id=index, byte_size=size)
        stack.callback(post, "unregister")
        place = {"shared_memory_region": name, "shared_memory_byte_size": tokens.nbytes}
        yield place, {**place, "shared_memory_offset": tokens.nbytes}


def cuda_memory(tokens: NDArray[Any], device: int) -> bytes:
    """The handle of a GPU's memory with room for input and output, which lives as long as this process."""
    from cuda.bindings import runtime

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    checked(runtime.cudaSetDevice(device))
    memory = checked(runtime.cudaMalloc(2 * tokens.nbytes))
    kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    checked(runtime.cudaMemcpy(memory, tokens.ctypes.data, tokens.nbytes, kind))
    checked(runtime.cudaDeviceSynchronize())
    return bytes(checked(runtime.cudaIpcGetMemHandle(memory)).reserved)


def loops_of(given: dict[str, Any], stack: ExitStack) -> list[Loop]:
    """The loops of all callers, each for a thread of its own."""
    callers, device, pause = given.get("connections", 1), given.get("device"), given.get("pause", 0.0)
    if given["way"] != "channel":
        port = urlsplit(given["url"]).port
        assert port is not None
        tokens = tokens_of(given["tokens"], given["hidden_size"], given.get("datatype", "BF16"))
        places: Any = None
        if given["way"] == "region":
            places = stack.enter_context(region(given["url"], tokens, device))
        connections = [Connection(port, blocking=False) for _ in range(callers)]
        for connection in connections:
            stack.callback(connection.socket.close)
        request = infer_request(given["models"][0], tokens, places)
        return [http_loop(connections, request, 1 if places else tokens.nbytes, pause)]
    loops = []
    for _ in range(callers):
        client = stack.enter_context(ExpertClient(given["url"]))
        channels = [
            stack.enter_context(
                client.open_channel(
                    model,
                    num_slots=given.get("slots", 1),
                    max_tokens=given["tokens"],
                    datatype="BF16",
                    device=device,
                    spin_seconds=given.get("spin", SPIN_SECONDS),
                    over_nixl=given.get("over_nixl", False),
                )
            )
            for model in given["models"]
        ]
        for slot in (slot for channel in channels for slot in channel.slots):
            fill(slot.hidden_states, device)
        loops.append(channel_loop(channels, given["tokens"], pause))
    return loops


def run_loops(loops: Sequence[Loop], until: int) -> Stamps:
    """The stamps of all loops."""
    if len(loops) == 1:
        return loops[0](until)
    stamps: Stamps = []
    errors: list[BaseException] = []

    def run(loop: Loop) -> None:
        try:
            stamps.extend(loop(until))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return stamps


def start_callers(
    callers: Sequence[Program], given: Sequence[dict[str, Any]], seconds: float, lead: float
) -> float:
    """Have callers call as they are given, once all are ready; when that begins, by time.perf_counter.

    lead  seconds for which they keep the server busy before
    """
    for caller, each in zip(callers, given, strict=True):
        caller.write(each)
    for caller in callers:
        caller.read()
    start = time.perf_counter() + lead
    for caller in callers:
        caller.write({"start": start, "seconds": seconds})
    return start


def call_together(
    given: dict[str, Any], seconds: float, processes: int = 1, lead: float = 0.0, module: str = CALLER
) -> list[float]:
    """What requests took in these seconds that processes with the same callers have sent, sorted."""
    with ExitStack() as stack:
        callers = [stack.enter_context(Program(module)) for _ in range(processes)]
        start = start_callers(callers, [given] * processes, seconds, lead)
        stamps = [stamp for caller in callers for stamp in caller.read()["stamps"]]
    return sorted((answered - sent) / 1e9 for sent, answered in stamps if sent >= 1e9 * start)


def main() -> None:
    """Call servers until stdin ends."""
    for line in sys.stdin:
        with ExitStack() as stack:
            given = json.loads(line)
            loops = loops_of(given, stack)
            at_once = given.get("connections", 1) * given.get("slots", 1)
            for _ in range(max(1, WARM_REQUESTS // at_once)):
                run_loops(loops, 0)
            print(json.dumps("ready"), flush=True)
            window = json.loads(sys.stdin.readline())
            until = round(1e9 * (window["start"] + window["seconds"]))
            print(json.dumps({"stamps": run_loops(loops, until)}), flush=True)


if __name__ == "__main__":
    main()
