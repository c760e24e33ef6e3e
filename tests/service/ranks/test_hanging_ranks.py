"""A rank that runs, but never ends its step: the deadline of steps notices it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.apps import Serving, error_of, hidden_request, rows, tiny_settings
from tests.service.ranks.hanging import allow_hanging, hang
from tests.service.ranks.servers import output_for, rank_processes, serving_ranks
from tests.service.waiting import until


@pytest.mark.slow
async def test_a_rank_that_hangs_costs_no_request_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_hanging(tmp_path, monkeypatch)
    settings = tiny_settings(ranks=2, step_timeout_seconds=1.5)
    async with serving_ranks(settings) as server, asyncio.timeout(60):
        values = rows(4)
        expected = await output_for(server, values)
        for rank in range(2):
            ranks = rank_processes()
            hang(ranks[rank])
            await check_that_callers_are_told(server, values)
            await until(lambda: server.app.engine.why_not_ready() is None, 30)
            assert (await output_for(server, values) == expected).all()
            assert not set(ranks) & set(rank_processes()), "the whole group is new"


async def check_that_callers_are_told(server: Serving, values: NDArray[np.float32]) -> None:
    """The one whose step hangs, and one in the queue that does not wait for that."""
    in_step = asyncio.create_task(server.infer(*hidden_request(values)))
    executor = server.app.engine.executor
    await until(lambda: executor.unanswered == 1 and executor.waiting("tiny") == (0, 0))
    impatient = await server.infer(*hidden_request(values, parameters={"timeout": 50_000}))
    assert "timeout" in error_of(impatient, 503)
    assert not in_step.done(), "its own deadline is earlier"
    refused = await in_step
    assert "a rank hangs: expected the end of a step within 1.5 s" in error_of(refused, 503)
    assert refused.headers["retry-after"] == "1"
