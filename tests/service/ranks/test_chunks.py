"""Long requests in chunks on several ranks."""

import asyncio
from pathlib import Path

import pytest

from expertd.service.ranks.front.loading import load_ranks
from tests.service.apps import rows, serving, tiny_settings
from tests.service.channels.servers import claimed
from tests.service.competing import CHUNKS, holding, in_chunks, polled
from tests.service.ranks.servers import close, output_for
from tests.service.ranks.steps import routed

pytestmark = pytest.mark.slow  # the server starts processes

LONG = rows(64, 5)


async def test_outputs_are_those_of_whole_requests(tmp_path: Path) -> None:
    loader, held = holding(load_ranks)
    settings = tiny_settings(CHUNKS, ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving(settings, loader) as server:
        (runner,) = held
        whole = await output_for(server, LONG)
        assert close(await in_chunks(server, runner, lambda: output_for(server, LONG)), whole)
        for ids in ("INT32", "INT64"):
            whole = await routed(server, LONG, ids)
            got = await in_chunks(server, runner, lambda ids=ids: routed(server, LONG, ids))  # type: ignore[misc]
            assert close(got, whole)
        peer = await claimed(server, max_tokens=64)
        async with polled(server):
            whole = await asyncio.to_thread(peer.infer, LONG)
            assert close(await in_chunks(server, runner, lambda: asyncio.to_thread(peer.infer, LONG)), whole)
        peer.close()
