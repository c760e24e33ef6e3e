"""Callers that send what is no request, or lie about it. Each function is a process."""

import gzip
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle

from tests.service.apps import HIDDEN, hidden_request, rows
from tests.service.sockets import head, infer
from tests.soak.plan import Plan, seeded
from tests.soak.reference import MAX_TOKENS
from tests.soak.tally import Tally

_SECONDS = 20.0  # until a refusal, or the end of the connection
_OTHER_REFUSALS = (501, 503, 505)
BODY, LENGTH = hidden_request(rows(2))
POST = "POST /v2/models/tiny/infer HTTP/1.1"


def wrong_requests(key: str) -> dict[str, bytes]:
    """What is refused, or ends the connection, whoever sends it."""
    auth = f"Authorization: Bearer {key}"
    sized = f"Content-Length: {len(BODY)}"
    split = f"Inference-Header-Content-Length: {LENGTH}"
    deep = b'{"inputs":' + b"[" * 5000
    many, many_length = hidden_request(rows(MAX_TOKENS + 1))
    bomb = gzip.compress(bytes(1 << 24))
    lies = BODY.replace(b'"binary_data_size": 1024', b'"binary_data_size": 9999')
    return {
        "garbage": bytes(range(256)) * 4,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        "HTTP/9": head("GET / HTTP/9.9"),
        "no host": head("GET /v2 HTTP/1.1", host=None),
        "two lengths": head(POST, auth, sized, "Content-Length: 1", split) + BODY,
        "negative length": head(POST, auth, "Content-Length: -1"),
        "length and chunks": head(POST, auth, sized, "Transfer-Encoding: chunked", split) + b"0\r\n\r\n",
        "obscure encoding": head(POST, auth, "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
        "space before colon": head(POST, auth, "Content-Length : 3") + b"abc",
        "folded header": head(POST, auth, "X: a\r\n b"),
        "bare line feeds": b"GET /v2 HTTP/1.1\nHost: x\n\n",
        "endless header": head(POST, "X: " + "a" * 70_000),
        "many headers": head(POST, *[f"X{number}: 1" for number in range(200)]),
        "wrong chunk": head(POST, auth, "Transfer-Encoding: chunked") + b"zz\r\n",
        "huge chunk": head(POST, auth, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n",
        "huge body": head(POST, auth, f"Content-Length: {1 << 40}", split),
        "no key": infer(BODY, LENGTH),
        "wrong key": infer(BODY, LENGTH, "Authorization: Bearer nobody"),
        "no rights": infer(BODY, LENGTH, "Authorization: Bearer secret-of-metrics"),
        "unknown model": head("POST /v2/models/none/infer HTTP/1.1", auth, sized, split) + BODY,
        "wrong method": head("DELETE /v2/models/tiny/infer HTTP/1.1", auth),
        "CONNECT": head("CONNECT x:1 HTTP/1.1", auth),
        "too many tokens": infer(many, many_length, auth),
        "lying size": infer(lies, LENGTH, auth),
        "header beyond the body": infer(BODY, len(BODY) + 1, auth),
        "deep JSON": infer(deep, len(deep), auth),
        "no JSON": infer(b"\xff" * 100, 100, auth),
        "a bomb": infer(bomb, len(bomb), auth, "Content-Encoding: gzip"),
        "unknown encoding": infer(BODY, LENGTH, auth, "Content-Encoding: br"),
        "wrong names": infer(json.dumps({"inputs": [{"name": "x"}]}).encode(), 28, auth),
    }


def wrong(plan: Plan, tally: Tally) -> None:
    """One wrong request after the other, cut at random places into pieces."""
    chance = seeded(tally)
    for name, data in cycle(wrong_requests(plan.key).items()):
        if plan.stage.is_over:
            return
        cut = chance.randrange(len(data) + 1)
        _attempt(plan, tally, name, lambda sock: _send(sock, data[:cut], data[cut:]))  # noqa: B023
        time.sleep(0.01)


def _attempt(plan: Plan, tally: Tally, name: str, send: Callable[[socket.socket], None]) -> None:
    mark = plan.stage.mark
    tally.count("sent")
    try:
        with socket.create_connection(("127.0.0.1", plan.port), timeout=_SECONDS) as sock:
            with suppress(ConnectionError):  # it may be refused before all of it is sent
                send(sock)
            status = _status(sock)
    except (ConnectionError, OSError) as error:
        unchanged = plan.stage.owes_answer(mark)
        ends = isinstance(error, ConnectionResetError | BrokenPipeError) or not unchanged
        if unchanged and not ends:
            print(f"soak: {name}: {error!r}", flush=True)
        tally.count(("refused" if unchanged else "cut") if ends else "lost")
        return
    if status in (0, *_OTHER_REFUSALS) or 400 <= status < 500:
        tally.count("refused")
        return
    print(f"soak: {name}: {status}", flush=True)
    tally.count("failed" if status >= 500 else "wrong")


def _send(sock: socket.socket, *parts: bytes) -> None:
    for part in parts:
        sock.sendall(part)


def _status(sock: socket.socket) -> int:
    """The status of the first answer that is no interim one; 0: the connection ended without any."""
    data = b""
    while True:
        while data.startswith(b"HTTP/1.1 100") and b"\r\n\r\n" in data:
            data = data.partition(b"\r\n\r\n")[2]
        if len(data) >= 12 and not data.startswith(b"HTTP/1.1 100"):
            return int(data[9:12])
        piece = sock.recv(65536)
        if not piece:
            return 0
        data += piece


def wrong_lines(plan: Plan, tally: Tally) -> None:
    """Requests of a channel that are refused in their slots, and channels that end by lying numbers."""
    from tests.service.channels.peer import ChannelClosedError, Peer

    chance = seeded(tally)
    while not plan.stage.is_over:
        mark = plan.stage.mark
        try:
            peer = Peer(_opened(plan))
        except (OSError, ValueError, ChannelClosedError):
            time.sleep(0.05)
            continue
        try:
            for _ in range(20):
                line = chance.randbytes(64)
                tally.count("sent")
                peer.write(peer.sequence + 1, line)
                peer.sequence += 1
                answer = peer.wait(peer.sequence, _SECONDS)
                tally.count("refused" if answer.status in (200, 400, 413, 503) else "failed")
            peer.words[peer.starts[0] // 8] = 1 << 60  # a sequence that lies
            peer.ring()
        except ChannelClosedError:
            tally.count("cut")
        except (TimeoutError, AssertionError):
            tally.count("lost" if plan.stage.owes_answer(mark) else "cut")
        finally:
            peer.close()
        time.sleep(0.05)


def _opened(plan: Plan) -> dict[str, object]:
    """A new channel, as POST answers. Raises OSError, ValueError."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", plan.port, timeout=_SECONDS)
    try:
        body = json.dumps({"version": 3, "model": "tiny", "num_slots": 4, "max_tokens": 16})
        connection.request("POST", "/v1/channels", body, {"Authorization": f"Bearer {plan.key}"})
        response = connection.getresponse()
        if response.status != 201:
            raise ValueError(response.status)
        found: dict[str, object] = json.load(response)
        return found
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


assert HIDDEN == 128, "the sizes of the lies above"
