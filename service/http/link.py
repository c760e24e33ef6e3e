"""The life of one client's connection: open, refused, closed; and the answers on their way."""

import asyncio
import logging
from abc import abstractmethod
from typing import Protocol

from expertd.service.http.paced_transport import PacedTransport, PlainTransport
from expertd.service.http.places import shown_peer
from expertd.service.http.refused import RefusedError
from expertd.service.http.sender import Sender
from expertd.service.http.shared import ServerState, Shared
from expertd.service.http.timer import Timer
from expertd.service.inference.errors import RequestError

logger = logging.getLogger(__name__)

# Lingering close: after a refusal, further input is read and dropped for this long. Closing a socket with
# unread bytes resets the connection, and the client would lose the response.
_LINGER_SECONDS = 2.0
_MAX_LINGERING = 256

# When the server ends, a request may be in the socket already: idle connections are read for this long.
LAST_INPUT_SECONDS = 0.05


class Call(Protocol):
    """A request, from the connection's side."""

    def leave(self, error: RequestError | None = None) -> None:
        """The client has disconnected before the answer; or its body was refused with `error`."""

    def sent(self, delivered: bool) -> None:
        """The answer was sent; or not, because the client had disconnected."""


class Link(asyncio.BufferedProtocol):
    """Sends one answer at a time; the subclass reads the requests.

    _is_admitted   by somebody else, who has counted the connection
    _call          the request that is received or answered now
    _is_answered   whether its answer has begun
    _is_written    whether all of it is written
    _is_last       whether the connection ends after it
    _ignore_input  after a refusal, or after the client's last request
    """

    def __init__(self, shared: Shared, state: ServerState, is_admitted: bool) -> None:
        self._is_admitted = is_admitted
        self.loop = asyncio.get_running_loop()
        self._shared = shared
        self._state = state
        self._limits = shared.limits
        self._timer = Timer(self.loop)  # for input: idle, or a head or body that does not arrive
        self._call: Call | None = None
        self._is_answered = self._is_written = self._is_last = False
        self._shuts_down = False  # after the answers to what was received
        self._ignore_input = False
        self._gone = False  # the client disconnected, or was cut off: unsent data is lost
        self._is_lingering = False
        self._counts_as_lingering = False  # in shared.lingering
        self._address: str | None = None  # what has to be given back to shared.places

    # Of the subclass.

    @abstractmethod
    def _settle(self) -> None:
        """Handle the next request, or wait for it."""

    @abstractmethod
    def _drop_incomplete(self, error: RequestError | None = None) -> None:
        """End a request whose body will not arrive, or is refused with `error`."""

    @abstractmethod
    def _leave_rest(self) -> None:
        """Count the requests that were received, but not begun."""

    @property
    @abstractmethod
    def has_input(self) -> bool:
        """Whether input waits that was not handled: of the current request's body, or behind it."""

    @property
    @abstractmethod
    def _has_unread(self) -> bool:
        """Whether the socket may hold input that was not read."""

    # The server's side.

    @property
    def has_pending_output(self) -> bool:
        """Whether an answer is not computed or not sent yet."""
        return self._call is not None or self.transport.get_write_buffer_size() > 0

    def shutdown(self) -> None:
        """Close after the answers to what has arrived, or arrives within LAST_INPUT_SECONDS if it is idle."""
        self._shuts_down = True
        if self._call is None and not self.has_input and not self._ignore_input:
            self._timer.set(LAST_INPUT_SECONDS, self._end)

    def stop(self, error: RefusedError) -> None:
        """Answer the current request with `error`, unless its answer has begun, and close."""
        if self._call is not None and not self._is_answered and not self.transport.is_closing():
            self._call = None  # its own answer is discarded
            self._write_refusal(error)
        self.transport.close()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not isinstance(transport, PacedTransport):  # without TLS
            transport = PlainTransport(transport, self.loop, self)
        self.transport: PacedTransport = transport
        seconds = self._shared.keep_alive_seconds
        least = self._shared.least_read_bytes
        self._sender = Sender(transport, self.loop, seconds, least, self._sent, self._cut_off)
        refusal = None
        if not self._is_admitted:
            self._address, refusal = self._shared.places.take(transport.get_extra_info("peername"))
        if refusal is None:
            self._state.connections.add(self)
            self._timer.set(seconds, self._close)
            return
        self._shared.warn(refusal)
        if self._shared.lingering >= _MAX_LINGERING:
            transport.abort()
            return
        self._shared.lingering += 1
        self._counts_as_lingering = True
        self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._gone or exc is not None or self._call is not None
        self._state.connections.discard(self)
        self._timer.close()
        self._sender.stop()
        self.transport.lost()
        if self._counts_as_lingering:
            self._shared.lingering -= 1
        self._drop_incomplete()
        call, self._call = self._call, None
        if call is None:
            pass
        elif self._is_answered:
            call.sent(False)
        else:
            call.leave()
        if not self._ignore_input:
            self._leave_rest()
        if not self._is_admitted:
            self._shared.places.leave(self._address)

    def pause_writing(self) -> None:
        self.transport.raw_paused()

    def resume_writing(self) -> None:
        self.transport.raw_resumed()

    # Called by the transport; see `Owner`.

    def writing_paused(self) -> None:
        self._sender.pause()

    def writing_resumed(self) -> None:
        self._sender.resume()

    def eof_received(self) -> None:
        """The client has gone, and with it who waits for an answer; the event loop closes the transport."""
        if self._call is not None:
            self._abort()

    # Answers.

    def _written(self) -> None:
        """The answer is written; the next request begins when the transport holds none of it any more."""
        self._is_written = True
        if not self._sender.holds_bytes:
            self._sent()

    def _sent(self) -> None:
        call = self._call
        if call is None or not self._is_written:
            return
        self._call = None
        call.sent(not (self._gone or self.transport.is_closing()))
        if self._is_last:
            self._end()
        else:
            self._settle()

    def _end(self) -> None:
        """Read no further request, and close."""
        self._ignore_input = True
        self._finish()

    def _finish(self) -> None:
        """Close after the last answer."""
        self._timer.clear()
        if self._has_unread:
            self._linger()
        else:
            self.transport.close()

    # Refusals.

    def _refuse(self, error: RefusedError) -> None:
        """Send `error` to a client whose input is no request, and close."""
        client = shown_peer(self.transport.get_extra_info("peername"))
        logger.debug("refused input from %s: %d, %s", client, error.status, error)
        self._shared.count_refusal(error.status)
        self._ignore_input = True
        if self.transport.is_closing():
            return
        self._write_refusal(error)
        self._linger()

    def _write_refusal(self, error: RefusedError) -> None:
        self.transport.write(error.response(self._state.default_headers))

    def _linger(self) -> None:
        if self.transport.is_closing():
            return
        self._is_lingering = True
        self.transport.resume_reading()
        self.transport.write_eof()
        self._timer.set(_LINGER_SECONDS, self.transport.abort)

    # Ends.

    def _close(self) -> None:
        """Close an idle connection, or one whose client does not send what it should."""
        self._ignore_input = True
        self.transport.close()

    def _cut_off(self) -> None:
        """Abort a connection whose client does not read its response, or too slowly."""
        self._shared.cut_off += 1
        self._abort()

    def _abort(self) -> None:
        self._gone = True
        self.transport.abort()
