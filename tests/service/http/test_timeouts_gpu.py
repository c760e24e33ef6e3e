"""Timeouts that pass while a GPU computes an output for a region of shared memory."""

import statistics
import time

import numpy as np
import pytest

from expertd.service.engine.forecast import Forecast
from tests.service.apps import json_request, serving, tiny_settings
from tests.service.channels.test_late_steps_gpu import LAYER, LIMITS, TOKENS
from tests.service.regions import region_input, region_output, registered
from tests.service.shm import shm_file

pytestmark = pytest.mark.gpu

COLUMNS = 2048
SIZE = TOKENS * COLUMNS * 2  # of hidden states in BF16
REQUESTS = 200


async def test_no_region_is_written_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forecast, "step", lambda self, num_tokens: 0.0)  # else most are refused at once
    random = np.random.default_rng(0)
    allowed = {"enabled": True}
    settings = tiny_settings(LIMITS, models=[LAYER], backend="hopper", shared_memory=allowed)
    given = region_input("r", [TOKENS, COLUMNS], 0, datatype="BF16", size=SIZE)

    def request(offset: int, seconds: float) -> bytes:
        parameters = {"timeout": int(1e6 * seconds)}
        return json_request(given, outputs=region_output("r", SIZE, offset), parameters=parameters)

    async with serving(settings) as server:
        with shm_file(3 * SIZE) as file:
            values = random.standard_normal((TOKENS, COLUMNS), dtype=np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            await registered(server, "r", file.key, 3 * SIZE)
            took = []
            for _ in range(20):
                began = time.perf_counter()
                # With a timeout, the output is copied to the region after the step, which takes longer.
                assert (await server.infer(request(SIZE, 0.9))).status_code == 200
                took.append(time.perf_counter() - began)
            usual = statistics.median(took)
            expected, marks = file.read(SIZE, SIZE), b"\x07" * SIZE
            late = 0
            for _ in range(REQUESTS):
                answer = await server.infer(request(SIZE, random.uniform(0.3, 2.0) * usual))
                if answer.status_code == 200:
                    assert file.read(SIZE, SIZE) == expected
                    continue
                assert answer.status_code == 503, answer.text
                late += "expired before its answer was ready" in answer.text
                file.write(marks, SIZE)
                assert (await server.infer(request(2 * SIZE, 0))).status_code == 200  # in a later step
                assert file.read(SIZE, SIZE) == marks
                assert file.read(SIZE, 2 * SIZE) == expected
            assert REQUESTS // 20 < late < REQUESTS
