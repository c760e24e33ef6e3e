"""An HTTP process in front of the one that owns the device: `python -m expertd.service.http.worker`.

It parses requests and sends answers. Infer requests go to the engine through a channel, all others over the
engine's Unix socket. It ends when its connection to the engine's process does.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from expertd.service.channels.remote import RemoteEngine
from expertd.service.engine.metrics.requests import KeyCounts, RequestCounts
from expertd.service.http.accepting import Acceptor
from expertd.service.http.bodies import BodyReader
from expertd.service.http.certificates import Certificates
from expertd.service.http.engine_proxy import EngineProxy
from expertd.service.http.server_context import ServerContext
from expertd.service.http.serving import STOPPED, ConnectionServer, exit_process
from expertd.service.http.worker_setup import (
    DRAIN,
    FINISH,
    LEVEL,
    STOP,
    SharedCounts,
    WorkerSetup,
    channel_cells,
)
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.gate import Gate, KeyFile
from expertd.service.settings.keys import Keys
from expertd.service.statuses import infer_status
from expertd.service.tracing import tracing_of
from expertd.service.util.heap import share_heap
from expertd.service.util.logs import configure_logging, set_level
from expertd_client.channel.layout import GREETING

_MESSAGE_BYTES = 256


def main() -> int:
    """Serve until told to end; returns the exit code: 0 if every client has read its answer, else 1."""
    setup = WorkerSetup.model_validate_json(sys.stdin.buffer.read())
    source = f"HTTP process {setup.index}: "
    configure_logging(setup.settings.log_level, source, form=setup.settings.log_format)
    share_heap()
    server = _WorkerServer(setup)
    server.run(sockets=[])
    return server.exit_code


class _WorkerServer(ConnectionServer):
    def __init__(self, setup: WorkerSetup) -> None:
        settings = setup.settings
        self._setup = setup
        self._counts = SharedCounts(setup.counts, setup.num_processes, len(settings.models))
        shared_counts, index = self._counts, setup.index
        self._engine = RemoteEngine(settings, shared_counts.queues(index), shared_counts.buffered(index))
        self._control = socket.socket(fileno=setup.control)
        self._control.setblocking(False)
        self._is_finishing = False
        bodies = BodyReader(settings.limits)
        file = None
        if settings.keys is not None:
            assert setup.keys is not None, "a process without keys would admit everybody"
            file = KeyFile(settings.keys, Keys(setup.keys))
        certificates = None
        if settings.tls.is_on:
            assert setup.tls is not None, "a process without certificates would send in the clear"
            certificates = Certificates(settings.tls, setup.tls)
        gate = Gate(file, KeyCounts(self._counts.keys(setup.index)))
        proxy = EngineProxy(setup.engine, bodies, gate)
        counts = RequestCounts(self._engine.models, self._counts.requests(setup.index))
        self._tracing = tracing_of(settings.tracing)
        status_of = partial(infer_status, queue_full_status=settings.limits.queue_full_status)
        endpoint = InferEndpoint(self._engine, counts, gate, status_of, proxy.forward, self._tracing)
        context = ServerContext(proxy, endpoint, counts, settings)
        super().__init__(proxy, context, bodies.stop, lifespan=False, certificates=certificates)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The engine's process is signalled too, and says what to do.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._tracing is not None:
            self._tracing.start()
        setup, loop = self._setup, asyncio.get_running_loop()
        listener = socket.socket(fileno=setup.listener)
        self._accepting: set[asyncio.Task[object]] = set()
        self._acceptor = Acceptor(listener, self._counts.connections, setup.index, self._accepted)
        self._context.connection_limits.closed = self._acceptor.closed
        if not setup.waits:
            self._acceptor.start()
        loop.add_reader(self._control.fileno(), self._on_message)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._is_finishing

    def exit_now(self) -> None:
        exit_process(1)

    def _accepted(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        protocol = partial(self.new_protocol, self.server_state, {})
        task = loop.create_task(loop.connect_accepted_socket(protocol, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _on_message(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 4)
        except BlockingIOError:
            return
        except ConnectionError:
            message, descriptors = b"", []
        if message == GREETING:
            self._engine.connect(descriptors, self._control, channel_cells(self._setup.settings))
            if self._setup.waits:
                self._acceptor.start()
        elif message == DRAIN:
            self._drain()
        elif message.startswith(FINISH):
            self._finish(float(message[len(FINISH) :]))
        elif message.startswith(LEVEL):
            set_level(message[len(LEVEL) :].decode())
        elif message == STOP:
            self.end_now(STOPPED)
        elif not message:  # the engine's process is gone, perhaps without time to clean up
            shutil.rmtree(self._setup.engine.parent, ignore_errors=True)
            exit_process(1)

    def _drain(self) -> None:
        if not self._engine.draining:
            self.begin_drain()
            self._engine.draining = True

    def _finish(self, seconds: float) -> None:
        self._drain()
        self._acceptor.stop()
        self.exit_code = 0
        self._is_finishing = self.finish(seconds)


if __name__ == "__main__":
    os._exit(main())
