"""Runs the application on uvicorn. SIGTERM starts a drain that answers every accepted request."""

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType

from expertd.service.engine.engine import Phase
from expertd.service.engine.loading import Loader, load
from expertd.service.http.app import ExpertApp, SideServer
from expertd.service.http.certificates import Certificates
from expertd.service.http.listening import (
    Listener,
    NoChannelsError,
    allow_files,
    has_channels,
    listen,
    listen_for_channels,
)
from expertd.service.http.server_context import ServerContext
from expertd.service.http.serving import FLUSH_SECONDS, STOPPED, ConnectionServer, exit_process
from expertd.service.http.workers import Workers
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FEWEST_CONNECTIONS = 16
_OTHER_FILES = 256  # besides those that settings limit: lingering connections, libraries, devices


def num_files(settings: Settings, num_servers: int) -> int:
    """How many files may be open at once; `num_servers` accept as many connections each."""
    copies = 0 if settings.num_ranks == 1 else 1  # of each shared file, for ranks that start later
    regions = (2 + copies) * settings.shared_memory.max_regions  # the file, and its mapping's own descriptor
    any_channels = has_channels(settings) or settings.channels.nixl
    # Until it is claimed, an eventfd and both ends of a pipe beside two files; then a socket, and fewer.
    channels = (3 + 2 * (2 + copies)) * settings.channels.max_channels if any_channels else 0
    return num_servers * settings.limits.max_connections + regions + channels + _OTHER_FILES


def with_allowed_files(settings: Settings, num_servers: int) -> Settings:
    """`settings`, with fewer connections and a warning if a process may not have files for all of them."""
    count, limits = num_files(settings, num_servers), settings.limits
    missing = allow_files(count)
    if not missing:
        return settings
    # Of several HTTP processes each has as many files as this one.
    fitting = (limits.max_connections - math.ceil(missing / num_servers)) * settings.http_workers
    max_connections = min(limits.max_connections, max(_FEWEST_CONNECTIONS, fitting))
    expected = f"a limit of {count} open files"
    text = "limits.max_connections: expected %s, got %d (ulimit -n): accepting at most %d connections"
    logger.warning(text, expected, count - missing, max_connections)
    of_address = min(max_connections, limits.max_connections_per_address)
    update = {"max_connections": max_connections, "max_connections_per_address": of_address}
    return settings.model_copy(update={"limits": limits.model_copy(update=update)})


def serve(
    settings: Settings,
    loader: Loader = load,
    make_side_server: Callable[[ExpertApp, Settings], SideServer] | None = None,
) -> int:
    """Serve what `loader` loads until SIGTERM, SIGINT or SIGHUP.

    `make_side_server` makes another server around the application, with as many connections.

    Returns the exit code: 0 after a full drain, else 1. Before anything is loaded, raises BindError if it
    cannot listen, and SettingsError for a file of keys, or files of TLS, that cannot be used.
    """
    settings = with_allowed_files(settings, 1 if make_side_server is None else 2)
    with ExitStack() as stack:
        _leave_nothing(stack)
        with _signals_later() if settings.uds is not None else nullcontext():
            public = listen(settings)
            stack.callback(public.close)
        workers = None
        if settings.http_workers > 1:
            with _signals_later():
                workers = Workers(settings, public)
                stack.callback(workers.close)
        own = settings if workers is None else workers.engine_settings
        app = ExpertApp(own, loader)
        if make_side_server is not None:
            app.side_server = make_side_server(app, settings)
        try:
            with _signals_later():
                app.listener = listen_for_channels(settings, public.port)
                if app.listener is not None:
                    stack.callback(app.listener.remove)
        except NoChannelsError as error:
            logger.warning("%s", error)
        certificates = Certificates(own.tls) if own.tls.is_on else None
        # HTTP processes log what they pass on.
        context_settings = own if workers is None else own.model_copy(update={"access_log": False})
        context = ServerContext(app, app.infer, app.metrics, context_settings)
        server = _Server(app, context, public, workers, certificates)
        logger.info("listening on %s", public.address)
        if app.listener is not None:
            logger.info("channels are claimed at %s", app.listener.path)
        server.run(sockets=[public.socket if workers is None else workers.engine_listener.socket])
        server.log_end()
        engine = app.engine
        if engine.executor.running or engine.repository.is_reading or engine.device_failed:
            # A normal exit would abort while a thread is in native code, or free memory of a failed device.
            server.exit_now(server.exit_code)
        return server.exit_code


def _leave_nothing(stack: ExitStack) -> None:
    """Have signals close `stack` before they end the process, until the server has handlers of its own."""

    def close_first(number: int, frame: FrameType | None, then: Callable[..., object]) -> None:
        stack.close()
        then(number, frame)

    for number in _ENDING:
        if callable(then := signal.getsignal(number)):
            signal.signal(number, partial(close_first, then=then))


@contextmanager
def _signals_later() -> Iterator[None]:
    """Handle signals after the block: what it makes is in the stack then.

    Not by a mask: other threads, of libraries, would get them.
    """
    arrived: list[tuple[int, FrameType | None]] = []
    handlers = {number: then for number in _ENDING if callable(then := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, then in handlers.items():
            signal.signal(number, then)
        for arrived_number, frame in arrived:
            handlers[signal.Signals(arrived_number)](arrived_number, frame)


class _Server(ConnectionServer):
    """A signal ends readiness at once; connections end after every accepted request is answered."""

    def __init__(
        self,
        app: ExpertApp,
        context: ServerContext,
        listener: Listener,
        workers: Workers | None,
        certificates: Certificates | None,
    ) -> None:
        super().__init__(app, context, app.stop_reading, lifespan=True, certificates=certificates)
        self._listener = listener
        self._app = app
        self._engine = app.engine
        self._workers = workers
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[bool] | None = None
        self._drain_by = 0.0  # when drain_timeout_seconds end, in the event loop's time

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        if self._workers is not None:
            self._workers.start(self._app)
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(signal.SIGHUP, hangup)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Replaces uvicorn's handler, which raises the signal again after shutdown, so the exit code is not 0.
        self._signals += 1
        if self._signals == 1:
            self.begin_drain()
        self._engine.begin_drain()
        if self._workers is not None:
            self._workers.drain()
        if self._signals == 2:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stop_now)
        elif self._signals > 2:
            self.exit_now()

    async def on_tick(self, counter: int) -> bool:
        keys = self._app.gate.refresh() if self._workers is None else self._workers.refresh_files()
        if keys is not None:
            self._app.channels.close_others({key.name for key in keys.keys if "infer" in key.rights})
        if self._signals or self._engine.phase is Phase.FAILED:
            self._app.stop_showing()
        settings = self._engine.settings
        now = asyncio.get_running_loop().time()
        if self._engine.phase is Phase.FAILED:
            if not self._workers_ended(settings.drain_timeout_seconds):
                return await super().on_tick(counter)
            return self.finish(settings.drain_timeout_seconds)
        if self._signals and self._drain is None:
            if self._signals == 1:
                logger.info("shutting down after all accepted requests are answered")
            self._drain_by = now + settings.shutdown_delay_seconds + settings.drain_timeout_seconds
            self._drain = asyncio.create_task(self._engine.drain())
        # The responses still have to be sent, within the same timeout.
        if self._drain is not None and self._drain.done() and self._workers_ended(self._drain_by - now):
            drained = self._drain.result() and (self._workers is None or self._workers.succeeded)
            self.exit_code = 0 if drained else 1
            return self.finish(self._drain_by - now)
        return await super().on_tick(counter)

    def finish(self, seconds: float) -> bool:
        if self._app.side_server is not None:
            self._app.side_server.finish(max(1.0, seconds))
        return super().finish(seconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.remove()  # before the socket closes: another server may listen there from then on
        await super().shutdown(sockets)
        if self._app.side_server is not None and self._app.side_server.cut_off:
            self.exit_code = 1

    def log_end(self) -> None:
        """Say how many requests were answered."""
        requests = self._app.metrics.request_totals().values()
        answered = sum(each.success.count for each in requests)
        others = sum(each.failure.count for each in requests)
        logger.info("ended; infer requests answered: %d, refused or cancelled: %d", answered, others)

    def end_now(self, text: str, flush_seconds: float = FLUSH_SECONDS) -> None:
        asyncio.get_running_loop().call_later(flush_seconds, self.log_end)
        super().end_now(text, flush_seconds)

    def exit_now(self, code: int = 1) -> None:
        self._listener.remove()
        if self._app.listener is not None:
            self._app.listener.remove()
        if self._workers is not None:
            self._workers.close()
        exit_process(code)

    def _stop_now(self) -> None:
        left = self._engine.executor.unanswered
        logger.warning("second signal: exiting at once, with unanswered requests: %d", left)
        if self._workers is None:
            self.end_now(STOPPED)
        else:  # when this process ends, they do
            self._workers.stop()
            self.end_now(STOPPED, 3 * FLUSH_SECONDS)

    def _workers_ended(self, seconds: float) -> bool:
        """Let the HTTP processes answer what they have, within `seconds`; True once they have ended."""
        return self._workers is None or self._workers.finish(seconds)
