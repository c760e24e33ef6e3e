"""Servers with several HTTP processes, and raw connections to them."""

import math
import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from expertd.service.settings.model import Settings
from tests.service.apps import MODEL, hidden_request, rows, tiny_settings
from tests.service.children import children_of
from tests.service.processes import ServerProcess
from tests.service.sockets import Answer, connect, infer, read_answer
from tests.service.waiting import wait_for

OTHER = {**MODEL, "name": "other", "hidden_size": 256, "datatype": "BF16"}
GOOD = infer(*hidden_request(rows(3)))


def two_processes(limits: Mapping[str, float] | None = None, **changes: Any) -> Settings:
    """Settings with two HTTP processes and the models "tiny" and "other"."""
    return tiny_settings(limits, **{"http_workers": 2, "models": [MODEL, OTHER], **changes})


def pause(pid: int) -> None:
    """Stop a process until SIGCONT; none of its threads runs when this returns."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        try:
            return all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks.iterdir())
        except FileNotFoundError:  # a thread has just ended
            return False

    wait_for(is_stopped, f"process {pid} is stopped")


def workers_of(server: ServerProcess) -> list[int]:
    """The process ids of the HTTP processes."""
    return children_of(server.process.pid, "http.worker")


def _has_channel(pid: int) -> bool:
    try:
        return "memfd:expertd-channel" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return False


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def samples(
    server: ServerProcess, name: str, headers: Mapping[str, str] | None = None
) -> dict[tuple[str, ...], float]:
    """The values of a metric other than 0, by the values of its labels in the order of their names."""
    families = text_string_to_metric_families(server.get("/metrics", headers).text)
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"expertd_{name}" and sample.value
    }


def asked(sock: socket.socket, request: bytes) -> Answer:
    """The answer to `request`."""
    sock.sendall(request)
    return read_answer(sock)


def connected(
    stack: ExitStack, server: ServerProcess, count: int, request: bytes = GOOD
) -> list[socket.socket]:
    """Connections spread evenly over the processes, each of which has its channel.

    A process that is busy accepts fewer: what another one has accepted beyond its share is closed again.
    """
    wait_for(lambda: all(map(_has_channel, workers_of(server))), "every process has its channel")
    processes = workers_of(server) or [server.process.pid]
    share, accepted = math.ceil(count / len(processes)), Counter[int]()
    socks = list[socket.socket]()
    while len(socks) < count:
        sock = connect(server.port)
        owner = wait_for(partial(_owner, server, sock, processes), "the connection is accepted")
        if accepted[owner] == share:
            sock.close()
            continue
        accepted[owner] += 1
        socks.append(stack.enter_context(sock))
        assert asked(sock, request).status == 200
    return socks


def _owner(server: ServerProcess, sock: socket.socket, processes: Sequence[int]) -> int | None:
    """The process that has the other end of a connection; None: it is not accepted yet."""
    ends = f":{server.port:04X}", f":{sock.getsockname()[1]:04X}"
    for line in Path(f"/proc/{os.getpid()}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
            name = f"socket:[{fields[9]}]"
            return next((process for process in processes if name in _files_of(process)), None)
    return None


def _files_of(process: int) -> set[str]:
    """What the descriptors of a process refer to."""
    found = set[str]()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found.add(str(descriptor.readlink()))
    return found


def all_received(server: ServerProcess) -> bool:
    """Whether nothing that was sent to the server waits in a socket."""
    port = f":{server.port:04X}"
    lines = [line.split() for line in Path(f"/proc/{os.getpid()}/net/tcp").read_text().splitlines()[1:]]
    open_ones = [fields for fields in lines if fields[3] == "01"]
    received = [fields[4].split(":")[1] for fields in open_ones if fields[1].endswith(port)]
    to_send = [fields[4].split(":")[0] for fields in open_ones if fields[2].endswith(port)]
    return bool(received) and all(int(count, 16) == 0 for count in (*received, *to_send))
