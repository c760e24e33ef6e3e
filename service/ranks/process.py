"""One rank: `python -m expertd.service.ranks.process DESCRIPTOR`, started by the front end or a node's agent.

It loads its part of every layer, and runs steps in the order of its ring. The descriptor is its socket to the
process that has started it: when that ends, so does this one, whatever it is doing.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from expertd.service.memory import OpenCuda, Register, nothing_to_register
from expertd.service.ranks import setup as words
from expertd.service.ranks.messages import receive, send
from expertd.service.ranks.regions import Exported, MappedRegions
from expertd.service.ranks.ring import Bell
from expertd.service.ranks.setup import RankSetup, Rings, RingSizes, Role
from expertd.service.util.heap import quick_imports, share_heap
from expertd.service.util.logs import configure_logging

logger = logging.getLogger(__name__)


class ControlSocket:
    """The socket to the front end, or a node's agent. A thread answers it; `send` is for any thread."""

    def __init__(self, connection: socket.socket, rings: Rings) -> None:
        self.register: Register = nothing_to_register  # with the device, once it is known
        self.open_cuda: OpenCuda | None = None
        self.replace_partitions: Callable[[dict[str, int] | None], None] = lambda _: None  # has them replaced
        self.record: Callable[[list[Any], Sequence[int]], None] = lambda _message, _files: None
        self.regions = MappedRegions()
        self.stopped = False
        self._connection, self._rings = connection, rings
        threading.Thread(target=self._answer, name="expertd-control", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Tell the front end; nothing happens if it is gone, since this process ends then."""
        send(self._connection, *message)

    def stop(self) -> None:
        """End after the present step."""
        self.stopped = True
        self._rings.command_bell.ring()

    def _answer(self) -> None:
        try:
            while not self.stopped:
                self._handle(*receive(self._connection))
        except BaseException:
            logger.exception("the connection to the front end failed")
            os._exit(1)

    def _handle(self, message: list[Any], descriptors: list[int]) -> None:
        match message:
            case []:  # the front end is gone, perhaps without time to clean up
                os._exit(1)
            case [words.MAP, number, num_bytes, offset, of_caller]:
                what = number, descriptors[0], num_bytes, offset, self.register, of_caller
                self._map(number, lambda: self.regions.map(*what))
            case [words.OPEN, number, handle, num_bytes]:
                assert self.open_cuda is not None
                memory, open_cuda = Exported(bytes.fromhex(handle), num_bytes), self.open_cuda
                self._map(number, lambda: self.regions.open(number, memory, open_cuda))
            case [words.UNMAP, number]:
                self.regions.unmap(number)
                self.send(words.UNMAPPED, number)
            case [words.STOP]:
                self.stop()
            case [words.PARTITIONS, sizes]:
                self.replace_partitions(sizes)
            case [words.RECORD, *what]:
                self.record(what, descriptors)
            case _:
                raise ValueError(f"message: expected one of those of a front end, got {message}")

    def _map(self, number: int, work: Callable[[], None]) -> None:
        text = ""
        try:
            work()
        except (OSError, RuntimeError, ValueError) as error:
            text = str(error) or type(error).__name__
        self.send(words.MAPPED, number, text)


def main() -> int:
    """Run until told to stop; the exit code."""
    # The front end is signalled too, and says what to do.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    message, descriptors = receive(connection)
    if not message:
        return 1
    setup_file, ring_file, *bells = descriptors
    with os.fdopen(setup_file, "rb") as file:
        setup = RankSetup.read(file)
    sizes, (command_bell, end_bell) = RingSizes.of(setup.settings), map(Bell, bells)
    rings = sizes.rings(ring_file, command_bell, end_bell)
    other_side = sizes.rings(ring_file, command_bell, end_bell)
    os.close(ring_file)
    share_heap()
    control = ControlSocket(connection, rings)
    level = setup.settings.log_level
    if setup.local_rank and level == "info":
        level = "warning"  # the others would repeat what the first rank of the node says
    configure_logging(
        level,
        f"rank {setup.rank}: ",
        bars=setup.local_rank == 0 and setup.role is not Role.PROXY,
        form=setup.settings.log_format,
    )
    if setup.role is Role.PROXY:
        return _stand_for(setup, control, rings)
    return _run(setup, control, rings, other_side)


def _stand_for(setup: RankSetup, control: ControlSocket, rings: Rings) -> int:
    with quick_imports():
        from expertd.service.ranks.nodes.proxy import Proxy

    proxy = Proxy(setup, control.regions, rings, control.send)
    control.replace_partitions = proxy.replace_partitions
    control.record = proxy.record
    return proxy.serve(lambda: control.stopped)


def _run(setup: RankSetup, control: ControlSocket, rings: Rings, other_side: Rings) -> int:
    # Imported here: it takes seconds, in which the front end may end already.
    with quick_imports():
        from expertd.service.ranks.nodes.remote import RemoteSteps
        from expertd.service.ranks.partitions import replace, shown
        from expertd.service.ranks.recording import RankRecorder, write_trace
        from expertd.service.ranks.worker.device import tell_changes
        from expertd.service.ranks.worker.worker import RankWorker

    remote = None
    if setup.role is Role.REMOTE:
        remote = RemoteSteps(setup, control.regions, other_side, control)

    def say(*message: Any) -> None:
        if remote is not None:
            remote.tell(*message)
        control.send(*message)

    try:
        part = RankWorker(setup, control.regions)
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError, MemoryError))
        if not expected:
            logger.exception("loading failed")
        say(words.FAILED, str(error) or type(error).__name__, expected)
        return 1
    control.register, control.open_cuda = part.loaded.register, part.loaded.open_cuda
    if remote is not None:
        remote.share(part.loaded.register)
    loaded = part.loaded

    def do_between_steps(job: Callable[[], None]) -> None:
        part.jobs.append(job)
        rings.command_bell.ring()

    def replace_partitions(sizes: dict[str, int] | None) -> None:
        do_between_steps(lambda: say(words.PARTITIONS, *replace(loaded, sizes)))

    recorder = RankRecorder(setup.rank, loaded, do_between_steps, partial(say, words.RECORDED))

    def record(message: list[Any], files: Sequence[int]) -> None:
        def write(trace: Callable[[], bytes]) -> None:
            if remote is None:
                write_trace(files[0], trace)
            else:  # the files of the front end are on its node
                remote.send_trace(trace())

        recorder.handle(message, write)

    control.replace_partitions, control.record = replace_partitions, record
    say(words.PARTITIONS, "", shown(loaded))
    say(words.LOADED, part.loaded.backend, part.loaded.device)
    tell_changes(part.loaded, partial(say, words.DEVICE))
    part.serve(rings, lambda: control.stopped, say)
    return 0


if __name__ == "__main__":
    os._exit(main())  # threads of libraries may wait for ranks that are gone
