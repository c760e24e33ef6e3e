"""The names of streams in the trace of a server with lanes in partitions, on a GPU."""

import asyncio
import json

import numpy as np
import numpy.typing as npt
import pytest

from tests.service.apps import hidden_request, output_of, serving, tiny_settings
from tests.service.engine.repeated_captures import MODEL

pytestmark = pytest.mark.gpu

LANES = {"decode_max_tokens": 2, "decode_partition": "decode", "prefill_partition": "prefill"}


def hidden_states(num_tokens: int) -> npt.NDArray[np.float32]:
    return np.ones((num_tokens, 2048), np.float32)


async def test_partitions_and_copies_are_named() -> None:
    settings = tiny_settings(
        models=[MODEL],
        backend="hopper",
        lanes={**LANES, "decode_batch_tokens": 4},
        partitions={"decode": 16, "prefill": 64},
    )
    async with serving(settings) as server:

        async def load() -> None:
            for _ in range(20):
                for num_tokens in (1, 8):
                    output_of(await server.infer(*hidden_request(hidden_states(num_tokens))))

        output_of(await server.infer(*hidden_request(hidden_states(1))))
        asked = server.http.post("/v1/profile", json={"steps": 20, "seconds": 20})
        response, _ = await asyncio.gather(asked, load())
    assert response.status_code == 200, response.text
    events = json.loads(response.content)["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["ph"] == "M"
    }
    used = {threads[event["pid"], event["tid"]] for event in events if event.get("cat") == "kernel"}
    for begin in (
        "decode lane, partition decode (16 SMs)",
        "prefill lane, partition prefill (64 SMs)",
        "decode lane, copies in",
        "prefill lane, copies out",
    ):
        assert any(name.startswith(begin) for name in used), (begin, sorted(used))
