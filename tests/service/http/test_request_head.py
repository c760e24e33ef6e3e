"""Which heads are taken, what they mean, and the text for those that are refused; whole and byte by byte."""

import pytest

from expertd.service.http.infer_head import InferHead
from expertd.service.http.refused import RefusedError
from expertd.service.http.request_head import HeadParser, Heads, RequestHead
from expertd.service.settings.parts import Limits
from tests.service.sockets import INFER, head

INVALID = "request: expected HTTP/1.1, got invalid input: "
LINE = "a request line other than METHOD TARGET VERSION, with CR and LF behind it"


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
    ("headers", "got"),
    [
        (["Content-Length: 1 2"], "Content-Length '1 2'"),
        (["Content-Length: +5"], "Content-Length '+5'"),
        (["Content-Length: -5"], "Content-Length '-5'"),
        (["Content-Length: 5,5"], "Content-Length '5,5'"),
        (["Content-Length: 0x5"], "Content-Length '0x5'"),
        (["Content-Length:"], "Content-Length ''"),
        (["Content-Length:  "], "Content-Length ''"),
        (["Content-Length: 5\x0b"], "a control character in the value of Content-Length"),
        (["Content-Length: 5\xa0"], "Content-Length '5\\xa0'"),
        ([f"Content-Length: {2**64}"], f"Content-Length '{2**64}'"),
        (["Content-Length: 5 ", "Content-Length: 6"], "Content-Length 2 times"),
        (["Content-Length: 5 ", "content-length: 5"], "Content-Length 2 times"),
        (["Content-Length : 5"], "the header name 'Content-Length '"),
        (["Transfer-Encoding : chunked"], "the header name 'Transfer-Encoding '"),
        (["Transfer-Encoding:"], "Transfer-Encoding ''"),
        (["Transfer-Encoding: chunked\x0b"], "a control character in the value of Transfer-Encoding"),
        (["Transfer-Encoding: chunked\t", "Content-Length: 5"], "Content-Length beside Transfer-Encoding"),
        (["Content-Length: 5", "Transfer-Encoding: chunked "], "Content-Length beside Transfer-Encoding"),
        (["Authorization Bearer secret: x"], "the header name 'Authorization '"),
        (["A: b\r\n c"], "the header name ' '"),
        (["A: b\nC: d"], "a control character in the value of A"),
        ([f"{'a' * 90}: \x01"], f"a control character in the value of {'a' * 77}..."),
        (["A: b\rC: d"], "a control character in the value of A"),
        (["A: \x00secret"], "a control character in the value of A"),
        ([": b"], "the header name ''"),
        (["A", "B: c"], "the header 'A' without a colon"),
    ],
)
def test_invalid_headers_are_refused_in_our_words(headers: list[str], got: str) -> None:
    assert refusal(*headers) == (400, INVALID + got)


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
    ("line", "got"),
    [
        ("GET / RTSP/1.1", "'RTSP/1.1'"),
        ("PLAY / RTSP/1.0", "'RTSP/1.0'"),
        ("SOURCE / ICE/1.0", "'ICE/1.0'"),
        ("GET / HTTP/1.10", "'HTTP/1.10'"),
        ("GET / HTTP/1.2", "1.2"),
        ("GET / HTTP/2.0", "2.0"),
        ("PRI * HTTP/2.0", "2.0"),
        ("GET /", "0.9"),
    ],
)
def test_other_protocols_and_versions_are_refused(line: str, got: str) -> None:
    assert refusal(line=line) == (505, f"HTTP version: expected 1.1 or 1.0, got {got}")


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("get / HTTP/1.1", "the method 'get'"),
        ("OTHER / HTTP/1.1", "the method 'OTHER'"),
        ("GET\t/ HTTP/1.1", "the method 'GET\\t/'"),
        (" GET / HTTP/1.1", "the method ''"),
        ("GET /\x01 HTTP/1.1", "a target with a byte that is not allowed"),
        ("GET /\xe9 HTTP/1.1", "a target with a byte that is not allowed"),
        ("GET", LINE),
        ("GET / ", LINE),
        ("GET / HTTP/1.1 ", LINE),
        ("GET / http/1.1", LINE),
        ("GET /a b HTTP/1.1", LINE),
        ("POST /v2/models/my model/infer HTTP/1.1", LINE),
        ("GET foo HTTP/1.1", "a target that is neither a path nor a URL"),
        ("GET ?a HTTP/1.1", "a target that is neither a path nor a URL"),
        ("GET /\tfoo HTTP/1.1", "a target with a byte that is not allowed"),
        ("GET / HTTP/1.1\nA: b", LINE),
    ],
)
def test_invalid_request_lines_are_refused_in_our_words(line: str, got: str) -> None:
    assert refusal(line=line) == (400, INVALID + got)


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
