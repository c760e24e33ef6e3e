"""Timeouts that pass while a GPU computes, writes the output, and announces it by itself."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from expertd.service.engine.forecast import Forecast
from tests.paths import ROOT
from tests.service.apps import MODEL
from tests.service.channels.servers import channel_server
from tests.service.processes import clean_environment
from tests.service.waiting import until

pytestmark = pytest.mark.gpu

LAYER = {
    **MODEL, "hidden_size": 2048, "intermediate_size": 2048, "num_experts": 8, "top_k": 8, "datatype": "BF16",
}  # fmt: skip
TOKENS = 8192  # of a request and of a step, which takes a few milliseconds
LIMITS = {
    "max_request_tokens": TOKENS, "max_batch_tokens": TOKENS, "max_queue_tokens": 4 * TOKENS,
    "prefill_chunk_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize(("where", "count"), [("host", 400), ("gpu", 1000)])
async def test_no_answer_is_lost_or_wrong(
    tmp_path: Path, where: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "step", lambda self, num_tokens: 0.0)  # else most are refused at once
    async with channel_server(tmp_path, None, LIMITS, backend="hopper", models=[LAYER]) as server:
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.service.channels.late_caller_gpu",
            f"http://127.0.0.1:{server.port}", "tiny", where, str(count),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=ROOT, env=clean_environment(),
        )  # fmt: skip
        printed, errors = await asyncio.wait_for(caller.communicate(), 240)
        assert caller.returncode == 0, errors.decode()
        outcomes = json.loads(printed)
        assert sum(outcomes.values()) == count
        assert outcomes["200"] > count // 20, outcomes
        assert outcomes["late"] > count // 20, outcomes

        def counted() -> float:
            return sum(
                server.metric("requests_total", model="tiny", status=status) for status in ("200", "503")
            )

        await until(lambda: counted() == count + 30)  # with those before it, without timeouts
