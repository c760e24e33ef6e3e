"""Memory of refused requests is free at once: garbage collection comes too late for bodies of megabytes."""

import gc
import gzip
import tracemalloc

import pytest

from tests.service.apps import error_of, hidden_request, rows, serving, tiny_settings

BYTES = 1 << 20
TOO_MANY, LENGTH = hidden_request(rows(65))
ZIPPED = gzip.compress(TOO_MANY + bytes(BYTES))
TEXT = b'{"inputs": "' + b"x" * BYTES + b'"}'


@pytest.mark.parametrize(
    ("body", "length", "headers"), [(ZIPPED, LENGTH, {"Content_Encoding": "gzip"}), (TEXT, None, {})]
)
async def test_refused_bodies_do_not_wait_for_the_garbage_collector(
    body: bytes, length: int | None, headers: dict[str, str]
) -> None:
    settings = tiny_settings({"max_body_bytes": 2 * BYTES, "max_json_bytes": 2 * BYTES})
    async with serving(settings) as server:
        error_of(await server.infer(body, length, **headers), 400)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(10):
                error_of(await server.infer(body, length, **headers), 400)
            assert tracemalloc.get_traced_memory()[0] < 4 * BYTES
        finally:
            tracemalloc.stop()
            gc.enable()
