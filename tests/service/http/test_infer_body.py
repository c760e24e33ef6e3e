"""Bodies as they arrive: small ones are bytes, large ones lie in the arena."""

from collections.abc import Iterator

import pytest

from expertd.service.http.protocol import oip_error
from expertd.service.inference.body import LARGE_BYTES, InferBody
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from expertd.service.memory import Arena, Span, host_view

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * MIB)
    yield arena
    assert arena.used_bytes == 0
    arena.close()


def pattern(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


@pytest.mark.parametrize("piece", [1000, 50_000, LARGE_BYTES])
def test_a_body_of_unknown_length_grows(arena: Arena, piece: int) -> None:
    data = pattern(MIB)
    body = InferBody(arena, BodyLimit(MIB), None, 16)
    for begin in range(0, MIB, piece):
        body.write(memoryview(data)[begin : begin + piece])
        assert body.rest is None
    content = body.content()
    assert isinstance(content, Span)
    assert host_view(content) == data
    with pytest.raises(
        RequestError, match=f"body: expected at most {MIB} bytes, got at least {MIB + 1}"
    ) as caught:
        body.write(memoryview(b"x"))
    assert caught.value.reason == "body_too_large"
    body.release()


def test_without_room_it_is_refused(arena: Arena) -> None:
    other = arena.take(3 * MIB)
    assert other is not None
    growing = InferBody(arena, BodyLimit(2 * MIB), None, 0)
    growing.write(memoryview(bytes(300_000)))
    for write in (
        lambda: InferBody(arena, BodyLimit(2 * MIB), MIB, 0),
        lambda: growing.write(memoryview(bytes(600_000))),
    ):
        with pytest.raises(RequestError, match="max_buffered_bytes: expected memory") as caught:
            write()
        refusal = oip_error(caught.value)
        assert (refusal.status, refusal.reason) == (503, "memory_full")
        assert refusal.headers == {"Retry-After": "1"}
    growing.release()
    other.release()
