"""With the least memory that the settings allow, the largest requests of every kind are answered."""

import json
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from expertd.service.settings.model import Settings
from tests.service.apps import HIDDEN, TOP_K, binary_request
from tests.service.http.processes import two_processes
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import INFER, connect, head, infer, read_answer

pytestmark = pytest.mark.slow  # a server process each

BODY = 1 << 20
ROW = 2 * HIDDEN  # bytes of a token in BF16, and of one in JSON as "0,"
TOKENS = (BODY - 400) // ROW
OUTPUT = {"parameters": {"binary_data": True, "datatype": "FP32"}}


def least(http_workers: int) -> Settings:
    limits = dict.fromkeys(("max_request_tokens", "max_batch_tokens"), 4096)
    limits |= {"max_queue_tokens": 8192, "max_body_bytes": BODY, "max_json_bytes": BODY}
    needed = http_workers * (4 * BODY + 5 * 65536)
    return two_processes({**limits, "max_buffered_bytes": needed}, http_workers=http_workers)


@pytest.fixture(scope="module", params=[1, 2])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with server_process(least(request.param), tmp_path_factory.mktemp("server")) as process:
        yield process


def bf16(num_tokens: int, noise: bool = False) -> tuple[str, list[int], bytes]:
    data = bytes(num_tokens * ROW)
    if noise:
        small = np.random.default_rng(0).integers(0x3C00, 0x3F80, num_tokens * HIDDEN)
        data = small.astype(np.uint16).tobytes()
    return "BF16", [num_tokens, HIDDEN], data


def kinds() -> dict[str, bytes]:
    """A request of each kind, whose body is nearly as large as allowed and whose output is twice as large."""
    output = {"outputs": [{"name": "hidden_states", **OUTPUT}]}
    body, length = binary_request({"hidden_states": bf16(TOKENS)}, **output)
    header_length = f"Inference-Header-Content-Length: {length}"
    pieces = [body[begin : begin + 50_000] for begin in range(0, len(body), 50_000)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    noisy, noisy_length = binary_request({"hidden_states": bf16(TOKENS, noise=True)}, **output)
    routed = (TOKENS * ROW // (ROW + 8 * TOP_K) - 4) | 1  # odd, so that the hidden states are not aligned
    ids = np.tile(np.arange(TOP_K, dtype=np.int32), routed).tobytes()
    routing = {
        "topk_ids": ("INT32", [routed, TOP_K], ids),
        "topk_weights": ("FP32", [routed, TOP_K], bytes(4 * TOP_K * routed)),
    }
    unaligned = binary_request({**routing, "hidden_states": bf16(routed)}, **output)
    numbers = "[" + ",".join(["0"] * (TOKENS * HIDDEN)) + "]"
    tensor = {"name": "hidden_states", "datatype": "FP32", "shape": [TOKENS, HIDDEN], "data": 0}
    text = json.dumps({"inputs": [tensor], **output}).replace('"data": 0', f'"data": {numbers}').encode()
    return {
        "plain": infer(body, length),
        "chunked": head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked", header_length) + coded,
        "compressed": infer(zlib.compress(noisy, 1), noisy_length, "Content-Encoding: deflate"),
        "unaligned": infer(*unaligned),
        "JSON": infer(text, len(text)),
    }


@pytest.mark.parametrize("kind", ["plain", "chunked", "compressed", "unaligned", "JSON"])
def test_the_largest_request_is_answered(server: ServerProcess, kind: str) -> None:
    data = kinds()[kind]
    assert len(data) > 0.7 * BODY

    with connect(server.port) as sock:
        for _ in range(2):
            sock.sendall(data)
            answer = read_answer(sock)
            assert answer.status == 200, answer.body
            assert len(answer.body) > 2 * 0.9 * BODY
