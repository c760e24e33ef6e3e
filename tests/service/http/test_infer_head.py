"""What the head of an infer request tells before the body."""

import pytest

from expertd.service.engine.spec import specs_of
from expertd.service.http.infer_head import HttpHead
from tests.service.apps import HIDDEN, TOP_K, tiny_settings

FP32_WITH_ROUTING = 4 * HIDDEN + (8 + 4) * TOP_K  # bytes of a token, with 64-bit ids


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"content-length": 100 + 64 * FP32_WITH_ROUTING, "inference-header-content-length": 100}, 64),
        ({"content-length": 100 + 64 * 2 * HIDDEN, "inference-header-content-length": 100}, 30),
        ({"content-length": 100, "inference-header-content-length": 100}, 1),
        ({"content-length": 50, "inference-header-content-length": 100}, 1),
        ({"content-length": 1 << 20}, 1),
        ({"inference-header-content-length": 100}, 1),
        (
            {
                "content-length": 1 << 20,
                "inference-header-content-length": 100,
                "content-encoding": "gzip",
            },
            1,
        ),
    ],
)
def test_the_least_number_of_tokens(headers: dict[str, object], expected: int) -> None:
    settings = tiny_settings(limits={"max_body_bytes": 1 << 21})
    given = [(name.encode(), str(value).encode()) for name, value in headers.items()]
    head = HttpHead("tiny", "1", given)
    head.read(settings.limits)
    assert head.min_tokens(specs_of(settings)["tiny"]) == expected
