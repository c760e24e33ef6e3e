"""Where bodies end: chunked and of a known length, in any pieces."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.http.framing import ChunkedBody
from expertd.service.http.responses import RefusedError

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
