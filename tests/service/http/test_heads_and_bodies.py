"""Which heads are taken, and which are refused; where bodies end; whole, byte by byte and in any pieces."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.engine.spec import specs_of
from expertd.service.http.framing import ChunkedBody
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.request_head import HeadParser, Heads, RequestHead
from expertd.service.http.responses import RefusedError
from expertd.service.inference.head import InferHead
from expertd.service.settings.parts import Limits
from tests.service.apps import HIDDEN, TOP_K, tiny_settings
from tests.service.sockets import INFER, head

INVALID = "request: expected HTTP/1.1, got invalid input: "


def byte_by_byte(data: bytes) -> list[RequestHead]:
    """What a parser finds in `data`."""
    parser = HeadParser(Limits())
    return [found for byte in data if (found := parser.feed(bytes([byte]))) is not None]


def parsed(*headers: str, line: str = f"POST {INFER} HTTP/1.1", host: str | None = "x") -> RequestHead:
    """The head, which means the same if it arrives byte by byte."""
    data = head(line, *headers, host=host)
    whole = Heads(Limits()).parse(data)
    assert [part.headers for part in byte_by_byte(data)] == [whole.headers]
    return whole


def refusal(*headers: str, line: str = "POST / HTTP/1.1", host: str | None = "x") -> tuple[int, str]:
    """The status and text for a head, which is refused byte by byte, too."""
    data = head(line, *headers, host=host)
    with pytest.raises(RefusedError) as caught:
        Heads(Limits()).parse(data)
    with pytest.raises(RefusedError) as in_pieces:
        byte_by_byte(data)
    assert in_pieces.value.status == caught.value.status
    return caught.value.status, str(caught.value)


@pytest.mark.parametrize("before", ["", " ", "\t", " \t "])
@pytest.mark.parametrize("behind", ["", " ", "\t", " \t "])
def test_blanks_around_a_value_are_no_part_of_it(before: str, behind: str) -> None:
    found = parsed(
        f"Content-Length:{before}12{behind}",
        f"Inference-Header-Content-Length:{before}5{behind}",
        f"Expect:{before}100-continue{behind}",
        host=f"{before}x:80{behind}",
    )
    assert (found.content_length, found.chunked, found.expects_continue) == (12, False, True)
    assert isinstance(found.infer, InferHead)
    found.infer.read(Limits())
    assert (found.infer.content_length, found.infer.header_length) == (12, 5)
    assert parsed(f"Transfer-Encoding:{before}chunked{behind}").chunked


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Length: 1 2"],
        ["Content-Length: +5"],
        ["Content-Length: -5"],
        ["Content-Length: 5,5"],
        ["Content-Length: 0x5"],
        ["Content-Length:"],
        ["Content-Length:  "],
        ["Content-Length: 5\x0b"],
        ["Content-Length: 5\xa0"],
        [f"Content-Length: {2**64}"],
        ["Content-Length: 5 ", "Content-Length: 6"],
        ["Content-Length: 5 ", "content-length: 5"],
        ["Content-Length : 5"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding:"],
        ["Transfer-Encoding: chunked\x0b"],
        ["Transfer-Encoding: chunked\t", "Content-Length: 5"],
        ["Content-Length: 5", "Transfer-Encoding: chunked "],
        ["Authorization Bearer secret: x"],
        ["A: b\r\n c"],
        ["A: b\nC: d"],
        [f"{'a' * 90}: \x01"],
        ["A: b\rC: d"],
        ["A: \x00secret"],
        [": b"],
        ["A", "B: c"],
    ],
)
def test_invalid_headers_are_refused_without_their_values(headers: list[str]) -> None:
    status, text = refusal(*headers)
    assert status == 400
    assert text.startswith(INVALID)
    assert "secret" not in text


@pytest.mark.parametrize(
    ("codings", "got"),
    [
        (["gzip"], "gzip"),
        (["chunked, chunked"], "chunked, chunked"),
        (["chunked", "chunked "], "chunked, chunked"),
        (["chunked,"], "chunked,"),
        (["chunked;a=b"], "chunked;a=b"),
        (["xchunked"], "xchunked"),
        (["chunked\tx"], "chunked\\tx"),
    ],
)
def test_each_coding_but_chunked_is_refused(codings: list[str], got: str) -> None:
    headers = [f"Transfer-Encoding: {coding}" for coding in codings]
    assert refusal(*headers) == (501, f"Transfer-Encoding: expected chunked, got '{got}'")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("GET / HTTP/1.2", "HTTP version: expected 1.1 or 1.0, got 1.2"),
        ("GET / HTTP/2.0", "HTTP version: expected 1.1 or 1.0, got 2.0"),
        ("PRI * HTTP/2.0", "HTTP version: expected 1.1 or 1.0, got 2.0"),
        ("GET /", "HTTP version: expected 1.1 or 1.0, got 0.9"),
        ("GET / RTSP/1.1", "protocol: expected HTTP, got RTSP or ICE"),
        ("PLAY / RTSP/1.0", "protocol: expected HTTP, got RTSP or ICE"),
        ("SOURCE / ICE/1.0", "protocol: expected HTTP, got RTSP or ICE"),
    ],
)
def test_other_versions_and_protocols_are_refused(line: str, text: str) -> None:
    assert refusal(line=line) == (505, text)


@pytest.mark.parametrize(
    "line",
    [
        "get / HTTP/1.1",
        "OTHER / HTTP/1.1",
        "GET\t/ HTTP/1.1",
        " GET / HTTP/1.1",
        "GET /\x01 HTTP/1.1",
        "GET /\xe9 HTTP/1.1",
        "GET",
        "GET / ",
        "GET / HTTP/1.1 ",
        "GET / HTTP/1.10",
        "GET / http/1.1",
        "GET /a b HTTP/1.1",
        "POST /v2/models/my model/infer HTTP/1.1",
        "GET foo HTTP/1.1",
        "GET ?a HTTP/1.1",
        "GET /\tfoo HTTP/1.1",
        "GET / HTTP/1.1\nA: b",
    ],
)
def test_invalid_request_lines_are_refused(line: str) -> None:
    status, text = refusal(line=line)
    assert status == 400
    assert text.startswith(INVALID)


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "expertd.models.svc",
        "expertd.models.svc.cluster.local.",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:8000",
        "[fe80::1%25eth0]",
        "[::ffff:127.0.0.1]",
        "xn--bcher-kva.example",
        "my_container_1:8000",
        "%2Frun%2Fexpertd.sock",
        "x:",
        "",
    ],
)
def test_a_host_of_common_clients_is_taken(host: str) -> None:
    assert (b"host", host.encode()) in parsed(host=host).headers
    assert (b"host", host.encode()) in parsed(line="GET / HTTP/1.0", host=host).headers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "host",
    [
        "a b",
        "a/b",
        "a:b",
        "a:1:2",
        "::1",
        "[::1",
        "[::1]x",
        "[x]",
        "user@a",
        "a?",
        "a\\b",
        '"a"',
        "%4",
        "\xe9",
    ],
)
def test_an_invalid_host_is_refused(host: str, version: str) -> None:
    status, text = refusal(line=f"GET / HTTP/{version}", host=host)
    assert status == 400
    assert text.startswith("Host: expected a name or an address, with or without a port, got '")


FP32_WITH_ROUTING = 4 * HIDDEN + (8 + 4) * TOP_K  # bytes of a token, with 64-bit ids


HEADER = {"inference-header-content-length": 100}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"content-length": 100 + 64 * FP32_WITH_ROUTING, **HEADER}, 64),
        ({"content-length": 100 + 64 * 2 * HIDDEN, **HEADER}, 30),
        ({"content-length": 100, **HEADER}, 1),
        ({"content-length": 50, **HEADER}, 1),
        ({"content-length": 1 << 20}, 1),
        (HEADER, 1),
        ({"content-length": 1 << 20, "content-encoding": "gzip", **HEADER}, 1),
    ],
)
def test_the_least_number_of_tokens(headers: dict[str, object], expected: int) -> None:
    settings = tiny_settings(limits={"max_body_bytes": 1 << 21})
    given = [(name.encode(), str(value).encode()) for name, value in headers.items()]
    head = HttpHead("tiny", "1", given)
    head.read(settings.limits)
    assert head.min_tokens(specs_of(settings)["tiny"]) == expected


AFTER = b"GET / HTTP/1.1\r\n\r\n"


def chunked(chunks: list[bytes], trailers: bytes = b"") -> bytes:
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
    return coded + b"0\r\n" + trailers + b"\r\n"


def decode(pieces: list[bytes], max_trailers: int = 100) -> tuple[bytes, bytes]:
    """The body in `pieces`, and what follows it."""
    body = bytearray()
    framing = ChunkedBody(body.extend, max_trailers)
    for number, piece in enumerate(pieces):
        end = framing.feed(piece, 0)
        if framing.done:
            return bytes(body), piece[end:] + b"".join(pieces[number + 1 :])
        assert end == len(piece)
    raise AssertionError(f"the body has no end, after {bytes(body)!r}")


@given(st.lists(st.binary(max_size=40), max_size=5), st.lists(st.integers(0, 200), max_size=6))
def test_a_chunked_body_ends_where_the_next_request_begins(chunks: list[bytes], cuts: list[int]) -> None:
    data = chunked(chunks, b"X: 1\r\n") + AFTER
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(bounds)]
    assert decode(pieces) == (b"".join(chunks), AFTER)


def test_many_chunks_are_decoded_in_turns() -> None:
    data = chunked([b"x"] * 5000) + AFTER
    body = bytearray()
    framing = ChunkedBody(body.extend, 100)
    ends = [0]
    while not framing.done:
        ends.append(framing.feed(data, ends[-1]))
    assert bytes(body) == b"x" * 5000
    assert data[ends[-1] :] == AFTER
    assert max(end - begin for begin, end in pairwise(ends)) < 6 * 1000


def test_extensions_and_leading_zeros_are_skipped() -> None:
    assert decode([b'003;a=b\r\nabc\r\n2 ; c="d"\r\nde\r\n000\r\n\r\n']) == (b"abcde", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1\na\r\n",
        b"1;\x00\r\na\r\n",
        b"1;\ra\r\n",
        b"1" * 16 + b"\r\n",
        b"1" * 1025,
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"0\r\n x: y\r\n\r\n",
        b"0\r\nx y: z\r\n\r\n",
        b"0\r\nx\r\n\r\n",
        b"0\r\nx: \x00\r\n\r\n",
        b"0\r\nx: y\n\r\n",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        with pytest.raises(RefusedError, match=r"expected HTTP/1\.1, got invalid input: ") as caught:
            decode(pieces)
        assert caught.value.status == 400


@pytest.mark.parametrize("size", [1, 5000])
def test_a_line_with_a_size_is_limited_however_it_arrives(size: int) -> None:
    data = b"3;" + b"x" * 1100 + b"\r\nabc\r\n0\r\n\r\n"
    body = ChunkedBody(None, 1000)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    with pytest.raises(RefusedError, match="a chunk size that is too long"):
        list(map(partial(body.feed, position=0), pieces))


def test_trailers_are_limited() -> None:
    trailers = b"a: b\r\n" * 10
    assert decode([chunked([b"x"], trailers)], max_trailers=len(trailers) + 2) == (b"x", b"")
    for data, size in ((chunked([b"x"], trailers), 60), (b"0\r\nx: " + bytes(100), 103)):
        text = f"^trailers: expected at most 59 bytes, got at least {size}$"
        with pytest.raises(RefusedError, match=text) as caught:
            decode([data], max_trailers=59)
        assert caught.value.status == 431
